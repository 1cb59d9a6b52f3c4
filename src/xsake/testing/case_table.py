"""Conformance table: named cases that every implementation must pass.

Shapes are small because compilation dominates the cost of a case.
"""

import dataclasses
from typing import Any

import numpy as np

from xsake.layout import BlockLayout
from xsake.masks import (
    AbstractMask,
    BigBird,
    Causal,
    Chunked,
    Explicit,
    FromFunction,
    Full,
    Longformer,
    PerHead,
    Random,
    Segments,
    Sinks,
    Strided,
    Window,
)
from xsake.testing.cases import ConformanceCase

EVERY_STRUCTURE = PerHead(
    [
        Causal() & (Window(left=20, right=0) | Sinks(count=3)),
        Causal() & Strided(stride=7, width=2),
        Causal() & Chunked(size=24),
        Longformer(window=9, global_tokens=5),
        BigBird(window=5, global_tokens=2, keep=0.3, seed=1, cell=16),
        Causal() & ~Window(left=30, right=0),
        Segments(np.repeat([0, 1, -1], [40, 40, 13])),
        FromFunction(lambda q_pos, kv_pos: (q_pos + kv_pos) % 3 == 0),
    ]
)
SAME_STRUCTURE = PerHead([Causal() & Window(left=left, right=0) for left in (3, 17, 40, 90)])


def _explicit() -> Explicit:
    """Return random pairs with empty rows, columns, query block and kv block."""
    table = np.random.default_rng(7).random((90, 75)) < 0.3
    table[[0, 5, 41, 89]] = False
    table[16:32] = False
    table[:, [2, 33, 74]] = False
    table[:, 48:64] = False
    return Explicit(table)


def _from_grid(case: ConformanceCase, grid: np.ndarray, block: int, **options) -> BlockLayout:
    tokens = {"q_tokens": case.q_tokens, "kv_tokens": case.kv_tokens}
    return BlockLayout.from_block_mask(grid, **tokens, block_q=block, block_kv=block, **options)


def _num_blocks(case: ConformanceCase, block: int) -> tuple[int, int]:
    return -(-case.q_tokens // block), -(-case.kv_tokens // block)


def _from_mask(case: ConformanceCase, mask: AbstractMask, block: int) -> BlockLayout:
    tokens = {"q_tokens": case.q_tokens, "kv_tokens": case.kv_tokens}
    return BlockLayout.from_mask(mask, **tokens, block_q=block, block_kv=block)


def _grid_layout(case: ConformanceCase) -> BlockLayout:
    """Build random per-head block grids under the mask; one head has no blocks."""
    density = np.linspace(0.0, 0.9, case.q_heads)[:, None, None]
    grid = np.random.default_rng(3).random((case.q_heads, *_num_blocks(case, 16))) < density
    return _from_grid(case, grid, 16, mask=case.mask)


def _batched_layout(case: ConformanceCase) -> BlockLayout:
    """Build a layout from indices and counts, per batch entry and head."""
    rng = np.random.default_rng(4)
    q_blocks, kv_blocks = _num_blocks(case, 16)
    shape, width = (case.batch, case.q_heads, q_blocks), 3
    indices = np.argsort(rng.random((*shape, kv_blocks)), axis=-1)[..., :width].astype(np.int32)
    return BlockLayout.from_indices_counts(
        indices, rng.integers(0, width + 1, shape).astype(np.int32), q_tokens=case.q_tokens,
        kv_tokens=case.kv_tokens, block_q=16, block_kv=16, mask=case.mask,
    )  # fmt: skip


def _kv_head_layout(case: ConformanceCase) -> BlockLayout:
    """Build one list per kv head, shared by its query heads."""
    windows = [Causal() & Window(left=10 + 25 * h, right=0) for h in range(case.kv_heads)]
    return _from_mask(case, PerHead(windows), 16)


def _two_thirds(case: ConformanceCase) -> BlockLayout:
    """Build a random grid without the mask, which is a separate argument."""
    return _from_grid(case, np.random.default_rng(4).random(_num_blocks(case, 16)) < 0.67, 16)


def _empty_layout(case: ConformanceCase) -> BlockLayout:
    return _from_grid(case, np.zeros((1, *_num_blocks(case, 32)), bool), 32)


def _tokens(q_tokens: int, kv_tokens: int | None = None) -> dict[str, Any]:
    return {"q_tokens": q_tokens, "kv_tokens": q_tokens if kv_tokens is None else kv_tokens}


def _dims(head_dim: int, value_dim: int | None = None) -> dict[str, Any]:
    return {"head_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim}


_PACKED = (((30, 20, 27), (30, 20, 27)), ((60,), (60,)))
_LATE = tuple(range(60, 93))

_SHORT_WINDOW = Causal() & Window(left=70, right=0)
_GROUPED: dict[str, Any] = {"q_heads": 4, "kv_heads": 2}

MASKS = [
    ConformanceCase("causal", Causal(), block=(32, 32)),
    ConformanceCase("causal_by_mask_argument", Causal(), **_tokens(150)),
    ConformanceCase("full_odd_length", Full(), block=(32, 32), **_tokens(77)),
    ConformanceCase("no_mask_at_all", **_tokens(40, 100)),
    ConformanceCase(
        "explicit_with_empty_rows_and_columns", _explicit(), block=(16, 16), **_tokens(90, 75)
    ),
    ConformanceCase("random_cells", Causal() & Random(keep=0.4, seed=2, cell=8), block=(16, 32)),
    ConformanceCase(
        "every_structure", EVERY_STRUCTURE, block=(16, 16), **_tokens(93), q_heads=8, kv_heads=2,
        **_dims(16),
    ),
]  # fmt: skip

# Windows, lengths and block size for which another library gave wrong results.
WINDOWS = [
    ConformanceCase(
        f"window_{left}_{right}", Window(left=left, right=right), block=(64, 64), **_tokens(330),
        kv_heads=1, **_dims(16),
    )
    for left, right in ((100, 100), (256, 0), (0, 256))
]  # fmt: skip

SHAPES = [
    ConformanceCase("more_keys_than_queries", Full(), block=(16, 32), **_tokens(40, 101)),
    ConformanceCase("more_queries_than_keys", Causal(), block=(32, 16), **_tokens(101, 40)),
    ConformanceCase(
        "one_token", Causal(), block=(16, 16), batch=4, q_heads=8, kv_heads=8, **_tokens(1)
    ),
    ConformanceCase(
        "decode_one_query", Causal() & Window(left=50, right=0), batch=4, **_tokens(1, 90),
        q_heads=4, q_positions=(89,),
    ),
    ConformanceCase(
        "single_visible_key", Window(left=0, right=0), block=(16, 16), **_tokens(50)
    ),
    ConformanceCase("head_dim_80", Causal(), block=(32, 32), **_dims(80)),
    ConformanceCase("head_dim_96_values_40", Causal(), block=(32, 32), **_dims(96, 40)),
    ConformanceCase("head_dim_192_values_128", Causal(), block=(32, 32), **_dims(192, 128)),
    ConformanceCase("head_dim_256", Causal(), block=(32, 32), **_tokens(64), **_dims(256)),
    ConformanceCase("head_dim_64_longer", Causal(), block=(64, 64), **_tokens(256), **_dims(64)),
    ConformanceCase(
        "rows_of_many_full_blocks", Causal(), block=(128, 128), **_tokens(800), **_GROUPED,
        **_dims(16),
    ),
    ConformanceCase("explicit_scale", Causal(), block=(32, 32), scale=0.4),
]  # fmt: skip

GROUPS = [
    ConformanceCase("group_heads_differ", SAME_STRUCTURE, block=(16, 16), **_GROUPED, batch=2),
    ConformanceCase(
        "eight_heads_one_kv", Causal() & Window(left=33, right=0), block=(32, 16), q_heads=8,
        kv_heads=1, **_dims(16),
    ),
    ConformanceCase("layout_per_kv_head", layout=_kv_head_layout, **_GROUPED),
]  # fmt: skip

LAYOUTS = [
    ConformanceCase("ragged_grid", Causal(), layout=_grid_layout, **_GROUPED, **_tokens(93)),
    ConformanceCase(
        "ragged_grid_traced", Causal(), layout=lambda case: _grid_layout(case).traced(capacity=200),
        **_GROUPED, **_tokens(93),
    ),
    ConformanceCase(
        "indices_and_counts_per_batch", layout=_batched_layout, **_GROUPED, batch=2,
        **_tokens(93, 70),
    ),
    ConformanceCase(
        "split_64_to_32_16", _SHORT_WINDOW, **_tokens(150),
        layout=lambda case: _from_mask(case, case.rule, 64).resize(32, 16),
    ),
    ConformanceCase(
        "merged_64_to_128", _SHORT_WINDOW, **_tokens(150),
        layout=lambda case: _from_mask(case, case.rule, 64).resize(128, 128),
    ),
    ConformanceCase(
        "merged_grid_with_holes", Causal(), layout=lambda case: _grid_layout(case).resize(32, 48),
        **_GROUPED, **_tokens(93),
    ),
    ConformanceCase("empty_layout", layout=_empty_layout, **_tokens(64)),
    ConformanceCase("empty_layout_with_sinks", layout=_empty_layout, **_tokens(64), sinks=0),
]  # fmt: skip

TERMS = [
    ConformanceCase("softcap", Causal(), block=(32, 32), softcap=1.5, logits=2.0),
    ConformanceCase(
        "sinks", Causal() & Window(left=20, right=0), block=(16, 16), sinks=0, q_heads=4
    ),
    ConformanceCase("two_sinks_per_head", Causal(), block=(32, 16), sinks=2, q_heads=4),
    ConformanceCase("bias_shared", Causal(), block=(32, 32), bias=(False, False), batch=2),
    ConformanceCase(
        "bias_per_batch_and_head", Causal(), block=(32, 32), bias=(True, True), batch=2, q_heads=4
    ),
    ConformanceCase(
        "everything", SAME_STRUCTURE, block=(16, 32), **_GROUPED, batch=2, **_tokens(93),
        softcap=3.0, sinks=2, bias=(True, True), segments=_PACKED,
    ),
]  # fmt: skip

COORDINATES = [
    ConformanceCase(
        "layout_with_positions", Causal() & Window(left=30, right=0), layout=_two_thirds,
        q_positions=tuple(range(9, 105)), kv_positions=tuple(range(4, 100)),
    ),
    ConformanceCase("packed_segments", Causal(), block=(16, 16), batch=2, segments=_PACKED),
    ConformanceCase("cross_segments", None, **_tokens(60, 80), segments=(((20, 30), (50, 25)),)),
    ConformanceCase(
        "late_queries", Causal() & Window(left=40, right=0), **_tokens(33, 93), q_positions=_LATE
    ),
    ConformanceCase(
        "positions_per_batch", Causal(), batch=2, **_tokens(33, 93),
        q_positions=(_LATE, tuple(range(33))),
    ),
    ConformanceCase(
        "shuffled_keys", Causal() & Window(left=25, right=0),
        kv_positions=tuple(int(p) for p in np.random.default_rng(5).permutation(96)),
    ),
]  # fmt: skip


def _with_dtype(dtype: str, names: set[str]) -> list[ConformanceCase]:
    all_cases = MASKS + SHAPES + GROUPS + LAYOUTS + TERMS + COORDINATES
    selected = [case for case in all_cases if case.name in names]
    return [
        dataclasses.replace(case, name=f"{case.name}_{dtype}", dtype=dtype) for case in selected
    ]


LOW_PRECISION = _with_dtype("bfloat16", {
    "explicit_with_empty_rows_and_columns", "head_dim_64_longer", "group_heads_differ",
    "everything", "ragged_grid",
}) + _with_dtype("float16", {"head_dim_64_longer", "everything"})  # fmt: skip

CASES = MASKS + WINDOWS + SHAPES + GROUPS + LAYOUTS + TERMS + COORDINATES + LOW_PRECISION
BY_NAME = {case.name: case for case in CASES}
