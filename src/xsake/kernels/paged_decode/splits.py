"""Calls over pages cut into splits of their lists, for kernels that copy pages into fast memory.

A program computes a tile of the queries of one kv head over one split of its list, in steps of a
few pages. Splits of a list run in parallel and are merged by their log-sum-exps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.kernels import online_softmax
from xsake.kernels.blocking import pad_axis
from xsake.kernels.mask_program import MaskProgram, trace_mask
from xsake.kernels.paged_decode.types import PagedConfig, PagedInputs


class SplitSizes(NamedTuple):
    """Sizes of a call's tiles and splits."""

    tile: int  # rows of a tile: queries of a kv head, the heads of its group counted
    tiles: int
    slots: int  # pages of a step
    steps: int  # of a split
    splits: int

    @property
    def rows(self) -> int:
        return self.tile * self.tiles


class SplitCall(NamedTuple):
    """Arrays of a call by kv head (batch times head) and by list (batch times lists)."""

    q: Any  # [heads, rows, D]
    row_integers: Any  # int32 [heads, 1 + N, rows]: position, -1 for padding; N mask integers
    bounds: Any  # int32 [lists, splits, 2]: first step with a page, and the one after the last
    page: Any  # int32 [lists, splits, steps * slots], negative if unused
    position: Any  # int32 [lists, splits, steps, slots * page size], negative without a key
    k_scale: Any  # float32 [heads, splits, steps, slots * page size], or None
    v_scale: Any


def make_sizes(
    inputs: PagedInputs,
    step_keys: int,
    split_keys: int,
    tile: int,
    multiple: int,
    *,
    is_whole: bool = False,
) -> SplitSizes:
    """Tiles of at most `tile` rows, a multiple of `multiple`; steps and splits of whole pages.

    A step has at most the slots of the lists, unless `is_whole`.
    """
    rows = inputs.q.shape[1] * (inputs.q.shape[2] // inputs.k.shape[1])
    capacity = max(inputs.page.shape[2], 1)
    slots = max(step_keys // inputs.page_size, 1)
    slots = slots if is_whole else min(slots, capacity)
    steps = min(max(split_keys // (slots * inputs.page_size), 1), -(-capacity // slots))
    tile = min(tile, -(-rows // multiple) * multiple)
    return SplitSizes(tile, -(-rows // tile), slots, steps, -(-capacity // (slots * steps)))


def define_forward(launch: Callable[..., tuple[Array, Array]]) -> Callable[..., Any]:
    """Make `forward` of a backend.

    `launch(inputs, config, program, interpret)` returns o [heads, splits, rows, Dv] and
    lse [heads, splits, rows]; `interpret` is false on a device.
    """

    def forward(
        inputs: PagedInputs, config: PagedConfig, platform: str, interpret: Any = False
    ) -> tuple[Array, Array]:
        """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
        program = trace_mask(config.mask)
        assert isinstance(program, MaskProgram)  # others are refused before

        # Arrays that are copied page by page must not have the axis of `vmap`.
        @jax.custom_batching.sequential_vmap
        def run(inputs: PagedInputs) -> tuple[Array, Array]:
            return _merge_splits(inputs, *launch(inputs, config, program, interpret))

        return run(inputs)

    return forward


def cut_call(inputs: PagedInputs, sizes: SplitSizes, program: MaskProgram) -> SplitCall:
    """The arrays of a call, padded to whole tiles and splits."""
    (batch, *_, dim), (kv_heads, size) = inputs.q.shape, inputs.k.shape[1:3]
    q = _by_kv_head(inputs.q, kv_heads).reshape(batch * kv_heads, -1, dim)
    capacity = sizes.splits * sizes.steps * sizes.slots
    page, number = (pad_axis(x, 2, capacity, -1) for x in (inputs.page, inputs.number))
    by_split = lambda x, *shape: x.reshape(-1, sizes.splits, *shape)
    is_live = by_split(page >= 0, sizes.steps, sizes.slots).any(-1)
    step = jnp.arange(sizes.steps)[None, None]
    first = jnp.where(is_live, step, sizes.steps).min(-1)
    bounds = jnp.stack([first, jnp.where(is_live, step + 1, 0).max(-1)], -1)
    head = jnp.arange(kv_heads)[None, :, None]

    def scale_of_keys(scale: Any) -> Any:
        if scale is None:
            return None
        x = jnp.repeat(scale[jnp.maximum(page, 0), head], size, axis=2)
        return by_split(x, sizes.steps, sizes.slots * size)

    return SplitCall(
        pad_axis(q, 1, sizes.rows, 0),
        _row_integers(inputs, program, sizes.rows),
        bounds.astype(jnp.int32),
        by_split(page, sizes.steps * sizes.slots),
        by_split(_key_positions(inputs, page, number), sizes.steps, sizes.slots * size),
        scale_of_keys(inputs.k_scale),
        scale_of_keys(inputs.v_scale),
    )


def _by_kv_head(x: Array, kv_heads: int) -> Array:
    """[B, Tq, Hq, ...] -> [B, Hk, G, Tq, ...]."""
    batch, tokens, heads = x.shape[:3]
    x = jnp.moveaxis(x, 1, 2)
    return x.reshape(batch, kv_heads, heads // kv_heads, tokens, *x.shape[3:])


def _key_positions(inputs: PagedInputs, page: Array, number: Array) -> Array:
    """Position of every key of the slots, -1 where there is none: [B, Hl, slots, page size]."""
    position = number[..., None] * inputs.page_size + jnp.arange(inputs.page_size)[None, None, None]
    has_key = (page >= 0)[..., None] & (position < inputs.lengths[:, None, None, None])
    return jnp.where(has_key, position, -1)


def _row_integers(inputs: PagedInputs, program: MaskProgram, rows: int) -> Array:
    """Position of every row and the integers of its head; see `SplitCall`."""
    (batch, tokens, q_heads, _), kv_heads = inputs.q.shape, inputs.k.shape[1]
    shape = batch, tokens, q_heads
    tables = program.tables[:, np.arange(q_heads) * program.heads // q_heads]
    integers = [inputs.q_positions[:, :, None], *(table[None, None] for table in tables)]
    by_row = [
        _by_kv_head(jnp.broadcast_to(x, shape), kv_heads).reshape(batch * kv_heads, 1, -1)
        for x in integers
    ]
    return pad_axis(jnp.concatenate(by_row, 1).astype(jnp.int32), 2, rows, -1)


def visible_pairs(program: MaskProgram, rows: list[Array], kv_pos: Array) -> Array:
    """Whether a row sees a key; `rows` are the integers of `SplitCall`, broadcast to the tile."""
    q_pos, *scalars = rows
    allowed = program.allows(jnp.maximum(q_pos, 0), jnp.maximum(kv_pos, 0), scalars)
    return allowed & (q_pos >= 0) & (kv_pos >= 0)


def _merge_splits(inputs: PagedInputs, o: Array, lse: Array) -> tuple[Array, Array]:
    """Merge o [heads, splits, rows, Dv] and lse [heads, splits, rows] of all splits.

    Returns:
        `(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`.
    """
    (batch, tokens, q_heads, _), kv_heads = inputs.q.shape, inputs.k.shape[1]
    p, m = _split_weights(lse)
    l = p.sum(1)
    o = online_softmax.normalize((p[..., None] * o).sum(1), l[..., None])
    lse = online_softmax.log_sum_exp(m, l, online_softmax.BASE_E)

    def by_query(x: Array) -> Array:
        x = x[:, : tokens * q_heads // kv_heads]
        x = x.reshape(batch, q_heads, tokens, *x.shape[2:])
        return jnp.moveaxis(x, 2, 1)

    return by_query(o).astype(inputs.q.dtype), by_query(lse)


def _split_weights(lse: Array) -> tuple[Array, Array]:
    """Weight of every split [heads, splits, rows], and the maximum that it is relative to."""
    m = lse.max(1)
    return jnp.exp(lse - jnp.where(m == -jnp.inf, 0, m)[:, None]), m
