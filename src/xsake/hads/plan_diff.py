"""Plans as text: a summary of one, or the differences of two, from their JSON."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

BAR_WIDTH = 40
MAX_HEADS = 10
_SKIPPED = ("heads", "summary")


def format_plan(document: dict[str, Any], shares: Float[np.ndarray, "L Hq"]) -> str:
    """Format a plan: summary, share of blocks by layer, densest and sparsest heads."""
    lines = [
        document["summary"],
        f"budget {document['budget']:.2%}, with selection {document['effective_budget']:.2%}",
        "",
        "layer  mean  share of visible blocks, sparsest and densest head",
    ]
    for layer, row in enumerate(shares):
        length = round(float(row.mean()) * BAR_WIDTH)
        bar = "#" * length + "." * (BAR_WIDTH - length)
        lines.append(f"{layer:5}  {row.mean():4.0%}  {bar}  {row.min():4.0%} {row.max():4.0%}")
    order = np.argsort(shares, axis=None, kind="stable").tolist()
    for name, heads in (("densest", order[::-1][:MAX_HEADS]), ("sparsest", order[:MAX_HEADS])):
        labels = (f"{_head(head, shares.shape[1])} {shares.flat[head]:.0%}" for head in heads)
        lines += ["", f"{name} heads:  " + ", ".join(labels)]
    return "\n".join(lines)


def diff_plans(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Format the differences of two plans, by field and by head."""
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
        elif key not in _SKIPPED:
            yield f"{name}{key}", part


def _heads(before: list[list[dict]], after: list[list[dict]]) -> list[str]:
    old, new = (
        {(i, j): head for i, row in enumerate(plan) for j, head in enumerate(row)}
        for plan in (before, after)
    )
    if old.keys() != new.keys():
        return [f"heads: {len(old)} -> {len(new)}, not compared"]
    changed = [head for head in old if old[head] != new[head]]
    if not changed:
        return []
    gain = lambda head: new[head]["blocks"] - old[head]["blocks"]
    changed.sort(key=lambda head: -abs(gain(head)))
    lines = [f"heads: {len(changed)} of {len(old)} differ, largest change of blocks first"]
    for layer, head in changed[:MAX_HEADS]:
        lines.append(f"  L{layer}H{head}: " + _change(old[layer, head], new[layer, head]))
    if len(changed) > MAX_HEADS:
        lines.append(f"  and {len(changed) - MAX_HEADS} more")
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
