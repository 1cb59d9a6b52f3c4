"""Named cases: models, lengths, budgets and passes, and selections of them."""

import fnmatch
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from xsake.certify.family import TargetFamily
from xsake.certify.record import CompileCase, PassName
from xsake.errors import ArgumentError

PASSES: tuple[PassName, ...] = ("forward", "dq", "dkv")
SELECTED_PASSES: tuple[PassName, ...] = ("selected_forward", "selected_backward")
PAGED_PASS: PassName = "paged_decode"
SMOKE_TARGETS = ("v5e", "v6e")


class AttentionShape(NamedTuple):
    """Head counts and size of a published model."""

    q: int
    kv: int
    dim: int


MODELS: dict[str, AttentionShape] = {
    "smollm2_135m": AttentionShape(9, 3, 64),
    "llama3_8b": AttentionShape(32, 8, 128),
    "qwen3_14b": AttentionShape(40, 8, 128),
    "gemma3_4b": AttentionShape(8, 4, 256),
}

# Tokens -> tokens per block. Longer sequences use larger blocks, as full causal lists would have
# millions of entries; the `block128` cases keep small ones to test the splitting of long lists.
LENGTHS: dict[int, int] = {4096: 128, 16384: 128, 32768: 256, 131072: 512}
# Every length and every budget, but not all combinations.
SIZES = ((4096, 1.0), (4096, 0.25), (4096, 0.10), (16384, 0.25), (32768, 0.10), (131072, 0.10))
# Query heads per call at 128k.
MAX_HEADS_AT_128K = 16
# Native sparse attention selects 16 blocks of 64 tokens per token.
SELECTED_BLOCK, SELECTED_SLOTS = 64, 16
# Attention over pages: tokens, share of the pages that are listed, tokens of a page, queries.
PAGED_SIZES: tuple[tuple[int, float, int, int, dict[str, Any]], ...] = (
    (4096, 1.0, 16, 1, {}),
    (32768, 0.25, 16, 1, {}),
    (131072, 0.25, 32, 1, {}),
    (32768, 1.0, 32, 1, {"is_int8": True}),
    (4096, 1.0, 16, 1, {"dtype": "float32"}),
    (32768, 1.0, 16, 64, {}),  # tokens of a draft, or a chunk of a prompt
)
_DTYPES = {"bfloat16": "bf16", "float32": "f32"}


@functools.cache
def all_cases() -> dict[str, CompileCase]:
    """Return all positive cases by name.

    Example:
        >>> all_cases()["llama3_8b_4k_25_bf16_forward"].q_heads
        32
    """
    problems = []
    for shape in MODELS:
        problems += [(shape, tokens, budget, LENGTHS[tokens], {}) for tokens, budget in SIZES]
        problems.append((shape, 4096, 0.25, 128, {"dtype": "float32"}))
    # Few are traced: building the list on the device compiles ten times as long as the kernel.
    problems += [
        (shape, 4096, 0.25, 128, {"traced": True}) for shape in ("smollm2_135m", "llama3_8b")
    ]
    problems.append(("llama3_8b", 131072, 0.10, 128, {}))
    # The passes of one problem are adjacent: its layout is cached.
    cases = [_case(name, *sizes, **more) for *sizes, more in problems for name in PASSES]
    cases += [
        _selected_case(name, shape, tokens, dtype)
        for shape in MODELS
        for tokens, dtype in ((4096, "bfloat16"), (32768, "bfloat16"), (4096, "float32"))
        for name in SELECTED_PASSES
    ]
    cases += [_paged_case(shape, *sizes) for shape in MODELS for sizes in PAGED_SIZES]
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), "two cases share a name"
    return by_name


def select_cases(selection: str, family: TargetFamily) -> list[CompileCase]:
    """Select cases, the family's controls included.

    Args:
        selection: "smoke" (a few minutes), "all", or a shell pattern on case names.
        family: adds its controls and filters supported cases.

    Returns:
        Cases in the order of execution.
    """
    controls = {case.name: case for case in family.CONTROLS}
    if selection == "smoke":
        return [*filter(family.supports, _smoke_cases()), *controls.values()]
    known = {name: case for name, case in all_cases().items() if family.supports(case)} | controls
    if selection == "all":
        return list(known.values())
    selected = [case for name, case in known.items() if fnmatch.fnmatchcase(name, selection)]
    if not selected:
        raise ArgumentError(
            "case-selection", "No case matches the selection.", got=selection,
            expected=f'"smoke", "all" or a pattern on names such as {next(iter(known))}',
        )  # fmt: skip
    return selected


def _smoke_cases() -> list[CompileCase]:
    names = ("smollm2_135m_4k_25_bf16", "smollm2_135m_4k_25_bf16_traced", "gemma3_4b_4k_100_bf16")
    more = ("smollm2_135m_4k_25_f32", "llama3_8b_16k_25_bf16")
    cases = [all_cases()[f"{case}_{name}"] for case in names + more for name in PASSES]
    cases += [all_cases()[f"smollm2_135m_4k_bf16_{name}"] for name in SELECTED_PASSES]
    return [*cases, all_cases()["smollm2_135m_4k_100_bf16_page16_paged_decode"]]


def _selected_case(pass_name: PassName, shape: str, tokens: int, dtype: str) -> CompileCase:
    """Return a case of native sparse attention: one list per token, shared by a group of heads."""
    visible = range(1, tokens // SELECTED_BLOCK + 1)
    budget = sum(min(SELECTED_SLOTS, x) for x in visible) / sum(visible)
    return _make_case(
        (shape, f"{tokens // 1024}k", _DTYPES[dtype], pass_name), MODELS[shape],
        pass_name=pass_name, shape=shape, tokens=tokens, dtype=dtype, budget=budget,
        block=SELECTED_BLOCK, slots=SELECTED_SLOTS,
    )  # fmt: skip


def _paged_case(
    shape: str, tokens: int, budget: float, page: int, q_tokens: int, more: dict[str, Any]
) -> CompileCase:
    """Return a case of attention over pages: one list per kv head."""
    dtype = "int8" if more.get("is_int8") else _DTYPES[more.get("dtype", "bfloat16")]
    name = [
        shape, f"{tokens // 1024}k", f"{budget:.0%}".removesuffix("%"), dtype, f"page{page}",
        *([f"{q_tokens}queries"] if q_tokens > 1 else []), PAGED_PASS,
    ]  # fmt: skip
    return _make_case(
        name, MODELS[shape], pass_name=PAGED_PASS, shape=shape, tokens=tokens, budget=budget,
        block=page, slots=int(tokens * budget) // page, q_tokens=q_tokens, **more,
    )  # fmt: skip


def _case(
    pass_name: PassName, shape: str, tokens: int, budget: float, block: int, **more
) -> CompileCase:
    heads = MODELS[shape]
    if tokens == 131072 and heads.q > MAX_HEADS_AT_128K:
        group = heads.q // heads.kv
        kv = MAX_HEADS_AT_128K // group
        heads = AttentionShape(kv * group, kv, heads.dim)
    name = [
        shape, f"{tokens // 1024}k", f"{budget:.0%}".removesuffix("%"),
        _DTYPES[more.get("dtype", "bfloat16")],
        *([f"block{block}"] if block != LENGTHS[tokens] else []),
        *(["traced"] if more.get("traced") else []),
        pass_name,
    ]  # fmt: skip
    return _make_case(
        name, heads, pass_name=pass_name, shape=shape, tokens=tokens, budget=budget, block=block,
        **more,
    )  # fmt: skip


def _make_case(name: Iterable[str], heads: AttentionShape, **fields) -> CompileCase:
    return CompileCase(
        name="_".join(name), q_heads=heads.q, kv_heads=heads.kv, head_dim=heads.dim, **fields
    )
