"""Plans as text for people: one told, or two compared; knows their JSON and not their type."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

BAR = 40
FEW = 10
_NOT_TOLD = ("heads", "summary")


def told(document: dict[str, Any], shares: Float[np.ndarray, "L Hq"]) -> str:
    """A plan on one screen: what it is, how its layers are fed, and its extreme heads.

    Args:
        document: the plan as JSON has it.
        shares: of the visible blocks that each head computes.
    """
    lines = [
        document["summary"],
        f"budget {document['budget']:.2%}, with selection {document['effective_budget']:.2%}",
        "",
        "layer  mean  share of visible blocks, the narrowest and the broadest head",
    ]
    for layer, row in enumerate(shares):
        filled = round(float(row.mean()) * BAR)
        bar = "#" * filled + "." * (BAR - filled)
        lines.append(f"{layer:5}  {row.mean():4.0%}  {bar}  {row.min():4.0%} {row.max():4.0%}")
    order = np.argsort(shares, axis=None, kind="stable").tolist()
    for name, heads in (("most", order[::-1][:FEW]), ("least", order[:FEW])):
        named = (f"{_head(head, shares.shape[1])} {shares.flat[head]:.0%}" for head in heads)
        lines += ["", f"fed {name}:  " + ", ".join(named)]
    return "\n".join(lines)


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What is different between two plans, by field and by head.

    Args:
        before: a plan as JSON has it.
        after: the other.
    """
    old, new = dict(_fields(before)), dict(_fields(after))
    lines = [
        f"{name}: {old.get(name, 'nothing')} -> {new.get(name, 'nothing')}"
        for name in old | new
        if old.get(name) != new.get(name)
    ]
    lines += _heads(before["heads"], after["heads"])
    return "\n".join(lines) or "no difference"


def _fields(value: dict[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, part in value.items():
        if isinstance(part, dict):
            yield from _fields(part, f"{name}{key}.")
        elif key not in _NOT_TOLD:
            yield f"{name}{key}", part


def _heads(before: list[list[dict]], after: list[list[dict]]) -> list[str]:
    old, new = (
        {(i, j): head for i, row in enumerate(plan) for j, head in enumerate(row)}
        for plan in (before, after)
    )
    if old.keys() != new.keys():
        return [f"heads: {len(old)} -> {len(new)}, not compared"]
    changed = [place for place in old if old[place] != new[place]]
    if not changed:
        return []
    gain = lambda place: new[place]["blocks"] - old[place]["blocks"]
    changed.sort(key=lambda place: -abs(gain(place)))
    lines = [f"heads: {len(changed)} of {len(old)} differ, those with most blocks moved first"]
    for place in changed[:FEW]:
        lines.append(f"  L{place[0]}H{place[1]}: " + _change(old[place], new[place]))
    if len(changed) > FEW:
        lines.append(f"  and {len(changed) - FEW} more")
    return lines


def _change(old: dict[str, Any], new: dict[str, Any]) -> str:
    parts = []
    if old["blocks"] != new["blocks"]:
        blocks = old["blocks"], new["blocks"]
        parts.append(f"{blocks[0]} -> {blocks[1]} blocks ({blocks[1] - blocks[0]:+})")
    if old["kind"] != new["kind"]:
        parts.append(f"{old['kind']} -> {new['kind']}")
    others = [name for name in ("offsets", "columns", "weights") if old[name] != new[name]]
    return ", ".join(parts + ["other " + " and ".join(others)] * bool(others))


def _head(flat: int, heads: int) -> str:
    layer, head = divmod(flat, heads)
    return f"L{layer}H{head}"
