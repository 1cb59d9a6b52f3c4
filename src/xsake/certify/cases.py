"""The named cases: heads of known models, lengths, budgets and passes, and selections of them."""

import fnmatch
import functools
from typing import NamedTuple

from xsake.certify.case import Case, PassName
from xsake.certify.family import Family
from xsake.errors import ArgumentError

PASSES: tuple[PassName, ...] = ("forward", "dq", "dkv")
SELECTED_PASSES: tuple[PassName, ...] = ("selected_forward", "selected_backward")
SMOKE_TARGETS = ("v5e", "v6e")


class Heads(NamedTuple):
    """Heads of a published model; norms on queries and keys happen outside attention."""

    q: int
    kv: int
    dim: int


MODELS: dict[str, Heads] = {
    "smollm2_135m": Heads(9, 3, 64),
    "llama3_8b": Heads(32, 8, 128),
    "qwen3_14b": Heads(40, 8, 128),
    "gemma3_4b": Heads(8, 4, 256),
}

# Tokens -> tokens of a block. A longer text gets larger blocks, or full causal lists grow to
# millions of items; the cases named `block128` keep small ones to show that long lists are split.
LENGTHS: dict[int, int] = {4096: 128, 16384: 128, 32768: 256, 131072: 512}
# Every length and every budget; not each with each, as what compiles depends on neither alone.
SIZES = ((4096, 1.0), (4096, 0.25), (4096, 0.10), (16384, 0.25), (32768, 0.10), (131072, 0.10))
# Most query heads of one call at 128k: more would be computed by several devices or calls.
MOST_HEADS_AT_128K = 16
# Native sparse attention selects blocks of 64 tokens, 16 of them for every token.
SELECTED_BLOCK, SELECTED_SLOTS = 64, 16


@functools.cache
def every_case() -> dict[str, Case]:
    """All cases that are to compile, by name.

    Example:
        >>> every_case()["llama3_8b_4k_25_bf16_forward"].q_heads
        32
    """
    kinds = []
    for shape in MODELS:
        kinds += [(shape, tokens, budget, LENGTHS[tokens], {}) for tokens, budget in SIZES]
        kinds.append((shape, 4096, 0.25, 128, {"dtype": "float32"}))
    # Few are traced: making the list on the device compiles ten times as long as the kernel.
    kinds += [(shape, 4096, 0.25, 128, {"traced": True}) for shape in ("smollm2_135m", "llama3_8b")]
    kinds.append(("llama3_8b", 131072, 0.10, 128, {}))
    # The passes over one problem follow each other: its layout is then made once.
    cases = [_case(name, *sizes, **more) for *sizes, more in kinds for name in PASSES]
    cases += [
        _selected(name, shape, tokens, dtype)
        for shape in MODELS
        for tokens, dtype in ((4096, "bfloat16"), (32768, "bfloat16"), (4096, "float32"))
        for name in SELECTED_PASSES
    ]
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), "two cases share a name"
    return by_name


def select(selection: str, family: Family) -> list[Case]:
    """The cases of a selection, the family's controls included.

    Args:
        selection: "smoke" (a few minutes), "all", or a shell pattern on case names.
        family: whose controls to add.

    Returns:
        Cases in the order in which they are to run.
    """
    controls = {case.name: case for case in family.CONTROLS}
    if selection == "smoke":
        return [*filter(family.serves, _smoke()), *controls.values()]
    known = {name: case for name, case in every_case().items() if family.serves(case)} | controls
    if selection == "all":
        return list(known.values())
    chosen = [case for name, case in known.items() if fnmatch.fnmatchcase(name, selection)]
    if not chosen:
        raise ArgumentError(
            "No case has such a name.",
            got=selection,
            expected=f'"smoke", "all" or a pattern on names such as {next(iter(known))}',
        )
    return chosen


def _smoke() -> list[Case]:
    kinds = ("smollm2_135m_4k_25_bf16", "smollm2_135m_4k_25_bf16_traced", "gemma3_4b_4k_100_bf16")
    more = ("smollm2_135m_4k_25_f32", "llama3_8b_16k_25_bf16")
    found = [every_case()[f"{kind}_{name}"] for kind in kinds + more for name in PASSES]
    return found + [every_case()[f"smollm2_135m_4k_bf16_{name}"] for name in SELECTED_PASSES]


def _selected(pass_name: PassName, shape: str, tokens: int, dtype: str) -> Case:
    """Lists of every token, as native sparse attention makes them; heads of a group share them."""
    heads, block, slots = MODELS[shape], SELECTED_BLOCK, SELECTED_SLOTS
    visible = range(1, tokens // block + 1)
    short = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    return Case.model_validate(
        {
            "name": f"{shape}_{tokens // 1024}k_{short}_{pass_name}",
            "pass_name": pass_name, "shape": shape, "tokens": tokens,
            "q_heads": heads.q, "kv_heads": heads.kv, "head_dim": heads.dim, "dtype": dtype,
            "budget": sum(min(slots, x) for x in visible) / sum(visible),
            "block": block, "slots": slots,
        }
    )  # fmt: skip


def _case(pass_name: PassName, shape: str, tokens: int, budget: float, block: int, **more) -> Case:
    q_heads, kv_heads, head_dim = MODELS[shape]
    if tokens == 131072 and q_heads > MOST_HEADS_AT_128K:
        group = q_heads // kv_heads
        kv_heads = MOST_HEADS_AT_128K // group
        q_heads = kv_heads * group
    parts = [
        shape,
        f"{tokens // 1024}k",
        f"{budget:.0%}".removesuffix("%"),
        {"bfloat16": "bf16", "float32": "f32"}[more.get("dtype", "bfloat16")],
        *([f"block{block}"] if block != LENGTHS[tokens] else []),
        *(["traced"] if more.get("traced") else []),
        pass_name,
    ]
    return Case(
        name="_".join(parts),
        pass_name=pass_name,
        shape=shape,
        tokens=tokens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        budget=budget,
        block=block,
        **more,
    )
