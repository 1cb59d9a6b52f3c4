"""A slow second reading of layouts, token by token, and the inputs that tests draw."""

import numpy as np
from hypothesis import strategies as st

from tests.masks import examples
from xsake import masks
from xsake.testing import expand


def pairs_of_mask(mask, heads, q_tokens, kv_tokens):
    """bool [heads, Tq, Tk]: what the mask allows, pair by pair."""
    q, kv = np.arange(q_tokens)[:, None], np.arange(kv_tokens)[None, :]
    return np.stack([expand.pairs(mask, q, kv, h) for h in range(heads)])


def pairs_of_layout(layout):
    """bool [batch, heads, Tq, Tk]: the pairs a layout says exist."""
    starts, blocks = np.asarray(layout.row_starts), np.asarray(layout.kv_block)
    partial = np.asarray(layout.is_partial)
    shape = layout.heads, layout.q_tokens, layout.kv_tokens
    allowed = np.ones(shape, bool) if layout.mask is None else pairs_of_mask(layout.mask, *shape)
    pairs = np.zeros((layout.batch, *shape), bool)
    for b in range(layout.batch):
        for h in range(layout.heads):
            for i in range(layout.q_blocks):
                row = (b * layout.heads + h) * layout.q_blocks + i
                q = slice(i * layout.block_q, (i + 1) * layout.block_q)
                for item in range(starts[row], starts[row + 1]):
                    kv = slice(blocks[item] * layout.block_kv, (blocks[item] + 1) * layout.block_kv)
                    pairs[b, h, q, kv] = allowed[h, q, kv] if partial[item] else True
    return pairs


def listed_items(layout):
    """The items as sorted tuples (batch, head, query block, kv block, partial)."""
    starts = np.asarray(layout.row_starts)
    found = []
    for row in range(layout.rows):
        plane, i = divmod(row, layout.q_blocks)
        b, h = divmod(plane, layout.heads)
        for item in range(starts[row], starts[row + 1]):
            found.append((b, h, i, int(layout.kv_block[item]), bool(layout.is_partial[item])))
    return found


def cut(array, layout):
    """A token plane [Tq, Tk] as blocks: yields (i, j, tokens inside the bounds)."""
    for i in range(layout.q_blocks):
        for j in range(layout.kv_blocks):
            q = slice(i * layout.block_q, (i + 1) * layout.block_q)
            kv = slice(j * layout.block_kv, (j + 1) * layout.block_kv)
            yield i, j, array[q, kv]


headless_masks = examples.composites() | st.sampled_from(examples.TABLES + examples.COMBINATIONS)
any_masks = st.one_of(
    headless_masks, st.lists(headless_masks, min_size=2, max_size=3).map(masks.PerHead)
)
block_sizes = st.sampled_from([1, 4, 7, 8, 16])
lengths = st.integers(1, 40)


@st.composite
def block_grids(draw, batches=(1, 2), heads=(1, 2, 4)):
    """Random block choices with lengths that need not divide anything."""
    sizes = {
        "q_tokens": draw(lengths),
        "kv_tokens": draw(lengths),
        "block_q": draw(block_sizes),
        "block_kv": draw(block_sizes),
    }
    blocks = (
        -(-sizes["q_tokens"] // sizes["block_q"]),
        -(-sizes["kv_tokens"] // sizes["block_kv"]),
    )
    shape = draw(st.sampled_from(batches)), draw(st.sampled_from(heads)), *blocks
    density = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    chosen = np.random.default_rng(draw(st.integers(0, 20))).random(shape) < density
    return chosen, sizes
