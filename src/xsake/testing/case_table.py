"""Conformance table: named cases that every implementation must pass.

Shapes are small because compilation dominates the cost of a case.
"""

import dataclasses

import numpy as np

from xsake.layout import BlockLayout
from xsake.masks import (
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


def _grid_layout(case: ConformanceCase) -> BlockLayout:
    """Build random per-head block grids under the mask; one head has no blocks."""
    rng = np.random.default_rng(3)
    blocks = -(-case.q_tokens // 16), -(-case.kv_tokens // 16)
    density = np.linspace(0.0, 0.9, case.q_heads)[:, None, None]
    grid = rng.random((case.q_heads, *blocks)) < density
    return BlockLayout.from_block_mask(
        grid,
        q_tokens=case.q_tokens,
        kv_tokens=case.kv_tokens,
        block_q=16,
        block_kv=16,
        mask=case.mask,
    )


def _batched_layout(case: ConformanceCase) -> BlockLayout:
    """Build a layout from indices and counts, per batch entry and head."""
    rng = np.random.default_rng(4)
    q_blocks, kv_blocks, width = -(-case.q_tokens // 16), -(-case.kv_tokens // 16), 3
    shape = (case.batch, case.q_heads, q_blocks)
    indices = np.argsort(rng.random((*shape, kv_blocks)), axis=-1)[..., :width].astype(np.int32)
    return BlockLayout.from_indices_counts(
        indices,
        rng.integers(0, width + 1, shape).astype(np.int32),
        q_tokens=case.q_tokens,
        kv_tokens=case.kv_tokens,
        block_q=16,
        block_kv=16,
        mask=case.mask,
    )


def _kv_head_layout(case: ConformanceCase) -> BlockLayout:
    """Build one list per kv head, shared by its query heads."""
    rule = PerHead([Causal() & Window(left=10 + 25 * h, right=0) for h in range(case.kv_heads)])
    return BlockLayout.from_mask(
        rule, q_tokens=case.q_tokens, kv_tokens=case.kv_tokens, block_q=16, block_kv=16
    )


def _resize_layout(block_q: int, block_kv: int):
    """Return a builder of the mask's layout at blocks of 64, resized."""

    def build(case: ConformanceCase) -> BlockLayout:
        layout = BlockLayout.from_mask(
            case.rule, q_tokens=case.q_tokens, kv_tokens=case.kv_tokens, block_q=64, block_kv=64
        )
        return layout.resize(block_q, block_kv)

    return build


def _merged_grid(case: ConformanceCase) -> BlockLayout:
    """Build a sparse grid merged to larger blocks with unlisted parts."""
    return _grid_layout(case).resize(32, 48)


def _traced_grid_layout(case: ConformanceCase) -> BlockLayout:
    return _grid_layout(case).traced(capacity=200)


def _two_thirds(case: ConformanceCase) -> BlockLayout:
    """Build a random grid without the mask, which is a separate argument."""
    blocks = -(-case.q_tokens // 16), -(-case.kv_tokens // 16)
    grid = np.random.default_rng(4).random(blocks) < 0.67
    return BlockLayout.from_block_mask(
        grid, q_tokens=case.q_tokens, kv_tokens=case.kv_tokens, block_q=16, block_kv=16
    )


def _empty_layout(case: ConformanceCase) -> BlockLayout:
    grid = np.zeros((1, -(-case.q_tokens // 32), -(-case.kv_tokens // 32)), bool)
    return BlockLayout.from_block_mask(
        grid, q_tokens=case.q_tokens, kv_tokens=case.kv_tokens, block_q=32, block_kv=32
    )


_PACKED = (((30, 20, 27), (30, 20, 27)), ((60,), (60,)))
_LATE = tuple(range(60, 93))

MASKS = [
    ConformanceCase("causal", Causal(), block=(32, 32)),
    ConformanceCase("causal_by_mask_argument", Causal(), q_tokens=150, kv_tokens=150),
    ConformanceCase("full_odd_length", Full(), block=(32, 32), q_tokens=77, kv_tokens=77),
    ConformanceCase("no_mask_at_all", q_tokens=40, kv_tokens=100),
    ConformanceCase(
        "explicit_with_empty_rows_and_columns",
        _explicit(),
        block=(16, 16),
        q_tokens=90,
        kv_tokens=75,
    ),
    ConformanceCase("random_cells", Causal() & Random(keep=0.4, seed=2, cell=8), block=(16, 32)),
    ConformanceCase(
        "every_structure",
        EVERY_STRUCTURE,
        block=(16, 16),
        q_tokens=93,
        kv_tokens=93,
        q_heads=8,
        kv_heads=2,
        head_dim=16,
        value_dim=16,
    ),
]

# Windows, lengths and block size for which another library gave wrong results.
WINDOWS = [
    ConformanceCase(
        f"window_{left}_{right}",
        Window(left=left, right=right),
        block=(64, 64),
        q_tokens=330,
        kv_tokens=330,
        kv_heads=1,
        head_dim=16,
        value_dim=16,
    )
    for left, right in ((100, 100), (256, 0), (0, 256))
]

SHAPES = [
    ConformanceCase("more_keys_than_queries", Full(), block=(16, 32), q_tokens=40, kv_tokens=101),
    ConformanceCase("more_queries_than_keys", Causal(), block=(32, 16), q_tokens=101, kv_tokens=40),
    ConformanceCase(
        "one_token",
        Causal(),
        block=(16, 16),
        batch=4,
        q_heads=8,
        kv_heads=8,
        q_tokens=1,
        kv_tokens=1,
    ),
    ConformanceCase(
        "decode_one_query",
        Causal() & Window(left=50, right=0),
        batch=4,
        q_tokens=1,
        kv_tokens=90,
        q_heads=4,
        q_positions=(89,),
    ),
    ConformanceCase(
        "single_visible_key", Window(left=0, right=0), block=(16, 16), q_tokens=50, kv_tokens=50
    ),
    ConformanceCase("head_dim_80", Causal(), block=(32, 32), head_dim=80, value_dim=80),
    ConformanceCase("head_dim_96_values_40", Causal(), block=(32, 32), head_dim=96, value_dim=40),
    ConformanceCase(
        "head_dim_192_values_128", Causal(), block=(32, 32), head_dim=192, value_dim=128
    ),
    ConformanceCase(
        "head_dim_256",
        Causal(),
        block=(32, 32),
        q_tokens=64,
        kv_tokens=64,
        head_dim=256,
        value_dim=256,
    ),
    ConformanceCase(
        "head_dim_64_longer",
        Causal(),
        block=(64, 64),
        q_tokens=256,
        kv_tokens=256,
        head_dim=64,
        value_dim=64,
    ),
    ConformanceCase(
        "rows_of_many_full_blocks",
        Causal(),
        block=(128, 128),
        q_tokens=800,
        kv_tokens=800,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        value_dim=16,
    ),
    ConformanceCase("explicit_scale", Causal(), block=(32, 32), scale=0.4),
]

GROUPS = [
    ConformanceCase(
        "group_heads_differ", SAME_STRUCTURE, block=(16, 16), q_heads=4, kv_heads=2, batch=2
    ),
    ConformanceCase(
        "eight_heads_one_kv",
        Causal() & Window(left=33, right=0),
        block=(32, 16),
        q_heads=8,
        kv_heads=1,
        head_dim=16,
        value_dim=16,
    ),
    ConformanceCase("layout_per_kv_head", layout=_kv_head_layout, q_heads=4, kv_heads=2),
]

LAYOUTS = [
    ConformanceCase(
        "ragged_grid",
        Causal(),
        layout=_grid_layout,
        q_heads=4,
        kv_heads=2,
        q_tokens=93,
        kv_tokens=93,
    ),
    ConformanceCase(
        "ragged_grid_traced",
        Causal(),
        layout=_traced_grid_layout,
        q_heads=4,
        kv_heads=2,
        q_tokens=93,
        kv_tokens=93,
    ),
    ConformanceCase(
        "indices_and_counts_per_batch",
        layout=_batched_layout,
        q_heads=4,
        kv_heads=2,
        batch=2,
        q_tokens=93,
        kv_tokens=70,
    ),
    ConformanceCase(
        "split_64_to_32_16",
        Causal() & Window(left=70, right=0),
        layout=_resize_layout(32, 16),
        q_tokens=150,
        kv_tokens=150,
    ),
    ConformanceCase(
        "merged_64_to_128",
        Causal() & Window(left=70, right=0),
        layout=_resize_layout(128, 128),
        q_tokens=150,
        kv_tokens=150,
    ),
    ConformanceCase(
        "merged_grid_with_holes",
        Causal(),
        layout=_merged_grid,
        q_heads=4,
        kv_heads=2,
        q_tokens=93,
        kv_tokens=93,
    ),
    ConformanceCase("empty_layout", layout=_empty_layout, q_tokens=64, kv_tokens=64),
    ConformanceCase(
        "empty_layout_with_sinks", layout=_empty_layout, q_tokens=64, kv_tokens=64, sinks=0
    ),
]

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
        "everything",
        SAME_STRUCTURE,
        block=(16, 32),
        q_heads=4,
        kv_heads=2,
        batch=2,
        q_tokens=93,
        kv_tokens=93,
        softcap=3.0,
        sinks=2,
        bias=(True, True),
        segments=_PACKED,
    ),
]

COORDINATES = [
    ConformanceCase(
        "layout_with_positions",
        Causal() & Window(left=30, right=0),
        layout=_two_thirds,
        q_positions=tuple(range(9, 105)),
        kv_positions=tuple(range(4, 100)),
    ),
    ConformanceCase("packed_segments", Causal(), block=(16, 16), batch=2, segments=_PACKED),
    ConformanceCase(
        "cross_segments", None, q_tokens=60, kv_tokens=80, segments=(((20, 30), (50, 25)),)
    ),
    ConformanceCase(
        "late_queries",
        Causal() & Window(left=40, right=0),
        q_tokens=33,
        kv_tokens=93,
        q_positions=_LATE,
    ),
    ConformanceCase(
        "positions_per_batch",
        Causal(),
        batch=2,
        q_tokens=33,
        kv_tokens=93,
        q_positions=(_LATE, tuple(range(33))),
    ),
    ConformanceCase(
        "shuffled_keys",
        Causal() & Window(left=25, right=0),
        kv_positions=tuple(int(p) for p in np.random.default_rng(5).permutation(96)),
    ),
]


def _with_dtype(dtype: str, names: set[str]) -> list[ConformanceCase]:
    all_cases = MASKS + SHAPES + GROUPS + LAYOUTS + TERMS + COORDINATES
    selected = [case for case in all_cases if case.name in names]
    return [
        dataclasses.replace(case, name=f"{case.name}_{dtype}", dtype=dtype) for case in selected
    ]


LOW_PRECISION = _with_dtype(
    "bfloat16",
    {
        "explicit_with_empty_rows_and_columns",
        "head_dim_64_longer",
        "group_heads_differ",
        "everything",
        "ragged_grid",
    },
) + _with_dtype("float16", {"head_dim_64_longer", "everything"})

CASES = MASKS + WINDOWS + SHAPES + GROUPS + LAYOUTS + TERMS + COORDINATES + LOW_PRECISION
BY_NAME = {case.name: case for case in CASES}
