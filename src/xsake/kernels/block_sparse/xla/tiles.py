"""A call cut into blocks, with tiles of scores and their element mask."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from xsake.kernels import blocking, online_softmax
from xsake.kernels.batching import axes_of
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, compute_dtype
from xsake.kernels.blocking import BlockLists, TokenBlocks, take
from xsake.kernels.row_loop import Step


class BlockedCall(NamedTuple):
    """The inputs by block, `[blocks, block, D]` each, and the positions of their tokens."""

    inputs: BlockSparseInputs
    config: BlockSparseConfig
    k: Any  # NaN where the value is not finite
    v: Any  # finite
    bias: Any  # [pairs of blocks, block_q, block_kv] or None
    q_tokens: TokenBlocks
    kv_tokens: TokenBlocks

    @property
    def layout(self):
        return self.inputs.layout

    @property
    def dtype(self):
        return compute_dtype(self.inputs)

    @property
    def axes(self) -> frozenset[str]:
        """Mesh axes of `shard_map` that the inputs vary over."""
        return axes_of(self.inputs.q)

    @property
    def q_heads(self) -> int:
        return self.inputs.q.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.inputs.k.shape[2]

    def scale_queries(self, q: Array) -> Array:
        """Queries times `query_factor`, in the dtype of the tiles."""
        factor = online_softmax.query_factor(self.config.scale, self.config.softcap)
        return q.astype(self.dtype) * jnp.asarray(factor, self.dtype)

    def bias_tile(self, rows: Array, kv_block: Array) -> Array | None:
        """The bias of q rows [rows, K] against kv blocks, [rows, K, block_q, block_kv]; or None."""
        if self.bias is None:
            return None
        return take(self.bias, self.bias_index(rows, kv_block)).astype(self.dtype)

    def bias_index(self, rows: Array, kv_block: Array) -> Array:
        """Index in `bias` of a q row and a kv block; any index for items that do not exist."""
        bias, layout = self.inputs.bias, self.layout
        assert bias is not None
        head = rows // layout.q_blocks
        plane = head // self.q_heads % bias.shape[0] * bias.shape[1]
        plane = plane + head % self.q_heads % bias.shape[1]
        kv_block = jnp.minimum(kv_block, layout.kv_blocks - 1)
        return (plane * layout.q_blocks + rows % layout.q_blocks) * layout.kv_blocks + kv_block

    def element_mask(self, rows: Array, kv_block: Array, step: Step) -> Array | None:
        """Element mask of a step with one block per row, [rows, block_q or 1, block_kv or 1].

        None if no pair has to be masked. Rows without an item have p = 0 anyway, but under a bias
        their gradient may still be 0 * NaN.
        """
        if step.is_masked:
            return self._pair_mask(rows, kv_block, step.exists)
        return None if self.bias is None else step.exists[..., None]

    def _pair_mask(self, rows: Array, kv_block: Array, exists: Array) -> Array:
        layout, mask = self.layout, self.layout.mask
        head, q_block = rows // layout.q_blocks, rows % layout.q_blocks
        batch, head = head // self.q_heads, head % self.q_heads
        kv_block = jnp.minimum(kv_block, layout.kv_blocks - 1)
        token = kv_block[:, None] * layout.block_kv + jnp.arange(layout.block_kv)[None]
        allowed = ((token < self.kv_tokens.tokens) & exists)[:, None, :]
        if layout.q_tokens % layout.block_q:
            # Scores of padded queries may be NaN, like those of padded keys.
            q_token = q_block[:, None] * layout.block_q + jnp.arange(layout.block_q)[None]
            allowed = allowed & (q_token < layout.q_tokens)[:, :, None]
        if mask is not None:
            q_pos = _lookup(self.q_tokens.positions, batch, q_block)[:, :, None]
            kv_pos = _lookup(self.kv_tokens.positions, batch, kv_block)[:, None, :]
            which = None if mask.heads is None else head * mask.heads // self.q_heads
            which = None if which is None else which[:, None, None]
            allowed = allowed & mask.allows(q_pos, kv_pos, which)
        if self.q_tokens.segments is not None:
            q_ids = _lookup(self.q_tokens.segments, batch, q_block)[:, :, None]
            kv_ids = _lookup(self.kv_tokens.segments, batch, kv_block)[:, None, :]
            allowed = allowed & (q_ids == kv_ids) & (q_ids >= 0)
        return allowed


def _lookup(blocks: Array, batch: Array, block: Array) -> Array:
    return take(blocks, (batch % blocks.shape[0], block))


def cut_call(inputs: BlockSparseInputs, config: BlockSparseConfig) -> BlockedCall:
    """Cut the arrays of a call into blocks."""
    layout, bias = inputs.layout, inputs.bias
    k, v = online_softmax.isolate_nonfinite(inputs.k, inputs.v)
    if bias is not None:
        bias = blocking.pairs_to_blocks(bias, layout.block_q, layout.block_kv)
    return BlockedCall(
        inputs,
        config,
        blocking.to_blocks(k, layout.block_kv),
        blocking.to_blocks(v, layout.block_kv),
        bias,
        blocking.q_token_blocks(inputs, layout.block_q),
        blocking.kv_token_blocks(inputs, layout.block_kv),
    )


def kv_block_lookup(call: BlockedCall, lists: BlockLists):
    """Make `RowBody.lookup` of rows of query blocks: kv blocks [rows, K], or the zero block."""
    start, block = jnp.asarray(lists.rows.start), jnp.asarray(lists.block)

    def lookup(rows, index, exists):
        at = jnp.minimum(take(start, rows)[:, None] + index, block.shape[0] - 1)
        return jnp.where(exists, take(block, at), call.layout.kv_blocks)

    return lookup


class RowTile(NamedTuple):
    """One step of rows of query blocks."""

    s: Array  # [rows, block_q, K * block_kv], masked pairs included
    mask: Array | None  # broadcasts against s; None if all pairs of existing items are visible
    k: Array  # [rows, K * block_kv, D]
    v: Array  # [rows, K * block_kv, Dv]


def row_tile(call: BlockedCall, rows: Array, q: Array, step: Step) -> RowTile:
    """Scores of query blocks against the kv blocks of a step."""
    layout = call.layout
    head = rows // layout.q_blocks
    head = head // call.q_heads * call.kv_heads + head % call.q_heads // (
        call.q_heads // call.kv_heads
    )
    index = blocking.block_index(head[:, None], step.items, layout.kv_blocks)
    k, v = (join_items(take(x, index)).astype(call.dtype) for x in (call.k, call.v))
    bias = call.bias_tile(rows[:, None], step.items)
    if bias is not None:
        bias = jnp.moveaxis(bias, 1, 2).reshape(rows.shape[0], layout.block_q, -1)
    qk = jnp.einsum("rmd,rnd->rmn", q, k, precision="highest")
    s = online_softmax.to_scores(qk, bias, call.config.softcap)
    return RowTile(s, call.element_mask(rows, step.items[:, 0], step), k, v)


def join_items(x: Array) -> Array:
    """[rows, K, block, D] -> [rows, K * block, D]."""
    return x.reshape(x.shape[0], -1, x.shape[-1])
