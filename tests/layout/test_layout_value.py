"""A layout as a value: invariants, pytree, statistics and pictures."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.errors import ArgumentError, LayoutError
from xsake.layout import BlockGrid, BlockLayout
from xsake.layout.csr import Items, check_shapes
from xsake.masks import Causal, Full, PerHead, Window

RAGGED = PerHead([Causal(), Causal() & Window(31, 0)])


def ragged():
    return BlockLayout.from_mask(RAGGED, q_tokens=128, block_q=16, block_kv=16)


def make(row_starts=(0, 1, 3), kv_block=(0, 0, 1), is_partial=(0, 0, 0), **changes):
    sizes = {"q_tokens": 16, "kv_tokens": 16, "block_q": 8, "block_kv": 8} | changes
    return BlockLayout(
        np.array(row_starts, np.int32),
        np.array(kv_block, np.int32),
        np.array(is_partial, bool),
        **sizes,
    )


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"row_starts": (1, 1, 3)}, "row_starts"),
        ({"row_starts": (0, 2, 1)}, "row_starts"),
        ({"row_starts": (0, 1, 4)}, "row_starts"),
        ({"row_starts": (0, 3)}, "incompatible shapes"),
        ({"kv_block": (0, 1, 1)}, "strictly ascending"),
        ({"kv_block": (0, 1, 0)}, "strictly ascending"),
        ({"kv_block": (0, 0, 2)}, "out of range"),
        ({"kv_block": (-1, 0, 1)}, "out of range"),
        ({"kv_tokens": 13}, "extends past"),
        ({"heads": 2}, "incompatible shapes"),
        ({"mask": PerHead([Causal(), Full()])}, "different numbers of heads"),
        ({"block_q": 0}, "invalid block_q"),
        ({"q_tokens": 2**40}, "invalid q_tokens"),
    ],
)
def test_broken_layouts_are_refused(broken, message):
    make()
    with pytest.raises(LayoutError, match=message):
        make(**broken)


def test_arrays_of_unequal_length_or_other_types_are_refused():
    grid = BlockGrid(q_tokens=8, kv_tokens=8, block_q=8, block_kv=8)
    starts, one, two = np.array([0, 1], np.int32), np.zeros(1, np.int32), np.zeros(2, bool)
    with pytest.raises(LayoutError, match="incompatible shapes"):
        check_shapes(Items(starts, one, two), grid, None)
    with pytest.raises(LayoutError, match="wrong dtypes"):
        check_shapes(Items(starts, one.astype(np.int64), two[:1]), grid, None)


def test_traced_layouts_are_validated_on_demand():
    layout = make().traced()
    broken = dataclasses.replace(layout, kv_block=layout.kv_block.at[2].set(0))
    with pytest.raises(LayoutError, match="strictly ascending"):
        broken.validate()


def test_full_blocks_the_mask_forbids_are_found_by_validate():
    with pytest.raises(LayoutError, match="XSK-301.full-block"):
        make(mask=Causal()).validate()
    make(is_partial=(1, 0, 1), mask=Causal()).validate()


def test_an_empty_layout_and_rows_without_blocks_are_fine():
    empty = make(row_starts=(0, 0, 0), kv_block=(), is_partial=())
    assert empty.items == 0
    assert empty.transpose(1, 1).items == 0
    assert empty.resize(4, 4).items == empty.resize(16, 16).items == 0
    assert empty.with_mask(Causal()).expand(heads=2, batch=3).items == 0
    assert empty.stats().budget == 0
    assert empty.traced().validate().with_mask(Causal()).items == 0
    assert BlockLayout.from_json(empty.to_json()).items == 0
    assert str(empty)


def test_a_layout_is_a_pytree_of_its_arrays():
    layout = ragged()
    leaves, tree = jax.tree.flatten(layout)
    assert len(leaves) == 3
    assert tree == jax.tree.structure(ragged())
    assert hash(tree) == hash(jax.tree.structure(ragged()))
    jax.tree.map(lambda leaf: None, layout)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(layout)]
    assert names == [".row_starts", ".kv_block", ".is_partial"]
    shapes = jax.eval_shape(lambda value: value.transpose(1, 2), layout)
    assert shapes.q_block.shape == (layout.items,)


def test_static_layouts_become_traced_when_passed_through_jit():
    seen = []

    @jax.jit
    def count(layout):
        seen.append(layout.is_static)
        with pytest.raises(LayoutError, match="XSK-301.traced-values"):
            _ = layout.items
        assert str(layout).startswith("BlockLayout(traced")
        return layout.row_starts[-1]

    layout = ragged()
    assert count(layout) == layout.items
    assert count(layout.with_mask(RAGGED)) == layout.items
    assert seen == [False]


def test_statistics_of_a_causal_layout_with_ragged_heads():
    stats = ragged().stats()
    assert stats.is_causal
    assert stats.head_items == (36, 21)
    assert stats.items == 57
    assert stats.visible_blocks == 72
    assert stats.budget == pytest.approx(57 / 72)
    assert stats.head_budgets == pytest.approx((1.0, 21 / 36))
    assert (stats.full, stats.partial) == (28 + 7, 8 + 14)
    assert stats.longest_row == 8
    assert stats.mean_row == pytest.approx(57 / 16)
    assert stats.imbalance == pytest.approx(36 / 28.5)
    assert stats.padding_waste == pytest.approx(8 * 16 / 57)
    assert stats.nbytes == 17 * 4 + 57 * 5
    assert "79.2%" in str(stats)


def test_statistics_count_all_blocks_if_one_lies_above_the_diagonal():
    chosen = np.eye(4, dtype=bool)
    assert BlockLayout.from_block_mask(chosen, block_q=8, block_kv=8).stats().visible_blocks == 10
    chosen[0, 3] = True
    stats = BlockLayout.from_block_mask(chosen, block_q=8, block_kv=8).stats()
    assert (stats.visible_blocks, stats.is_causal, stats.empty_rows) == (16, False, 0)


def test_statistics_use_positions_when_blocks_are_not_square():
    layout = BlockLayout.from_mask(Causal(), q_tokens=30, kv_tokens=50, block_q=16, block_kv=8)
    assert layout.stats().visible_blocks == 2 + 4
    assert layout.stats().budget == 1


def test_pictures_in_characters():
    layout = BlockLayout.from_mask(Causal(), q_tokens=64, block_q=16, block_kv=16)
    assert layout.to_ascii() == "+...\n#+..\n##+.\n###+"
    large = BlockLayout.from_mask(Causal(), q_tokens=131_072)
    lines = large.to_ascii(width=8).splitlines()
    assert lines == ["++......", "##++....", "####++..", "######++"]
    with pytest.raises(ArgumentError):
        layout.to_ascii(head=1)
    with pytest.raises(ArgumentError):
        layout.to_ascii(width=1)


def test_printing_shows_summary_and_picture():
    text = str(ragged())
    assert "57 blocks" in text
    assert "#+......" in text
    assert "head 0 of 2" in text
    assert "static" in repr(ragged())
    assert "traced" in repr(ragged().traced())
    assert "57 blocks" in str(ragged().traced())


def test_pictures_in_png(tmp_path):
    layout = ragged()
    layout.draw(tmp_path / "all.png")
    layout.traced().draw(tmp_path / "one.png", head=1)
    with pytest.raises(ArgumentError, match="XSK-102.draw-index"):
        layout.draw(tmp_path / "none.png", head=2)
    for name in ("all.png", "one.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5_000


def test_grid_arithmetic():
    grid = BlockGrid(q_tokens=20, kv_tokens=30, block_q=8, block_kv=16, batch=2, heads=3)
    assert (grid.q_blocks, grid.kv_blocks, grid.rows) == (3, 2, 18)
    row = np.arange(18)
    assert (
        (grid.row_to_batch(row) * 3 + grid.row_to_head(row)) * 3 + grid.row_to_q_block(row) == row
    ).all()
    spans = grid.spans(jnp, jnp.array([0, 2]), jnp.array([0, 1]))
    assert [edge.tolist() for edge in spans] == [[0, 16], [7, 19], [0, 16], [15, 29]]
    with pytest.raises(LayoutError, match="XSK-301.int32-rows"):
        BlockGrid(2**30, 2**30, 1, 1, batch=2, heads=2)


def test_static_layouts_compare_by_content():
    layout, again = make(), make()
    assert layout == again and hash(layout) == hash(again)
    others = [
        make(is_partial=(0, 1, 0)),
        make(row_starts=(0, 2, 3), kv_block=(0, 1, 0)),
        make(q_tokens=15),
        make(mask=Causal()),
        make().with_capacity(4),
        make().traced(3),
        "a layout",
    ]
    assert all(layout != other for other in others)
    assert len({layout, again, *others[:-1]}) == len(others)


def test_traced_layouts_are_equal_only_as_objects():
    layout = make().traced(3)
    assert layout == layout and layout != make().traced(3)
    assert len({layout, make().traced(3)}) == 2
