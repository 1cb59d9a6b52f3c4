"""What a TPU kernel knows of the group of blocks at hand: which of its pairs exist."""

import functools
from operator import and_
from typing import Any

import jax.numpy as jnp
from jax import lax

from xsake.kernels.block_sparse.ragged_grid import quotient, remainder
from xsake.kernels.block_sparse.rule import Rule
from xsake.kernels.block_sparse.tpu_lists import Listing
from xsake.kernels.block_sparse.work_list import LIVE, PARTIAL


class Group:
    """The blocks that a row meets at once.

    Args:
        listing: the list that is walked.
        own: number of the row's own block.
        met: numbers of the blocks.
        words: their words.
        shown: their element masks, or None each.
        tables: the rule's integers.
        keys_first: tiles of logits are [keys, queries].
    """

    def __init__(self, listing: Listing, own, met, words, shown, tables, keys_first: bool):
        self._listing, self._own, self._met, self._words = listing, own, met, words
        self._shown, self._tables, self._keys_first = shown, tables, keys_first

    def visible(self, slot: int, queries: Any, keys: Any):
        """Which pairs of a slot exist, in the orientation of the pass's tiles."""
        listed, grid, rule = self._listing.listed, self._listing.grid, self._listing.rule
        shape, q_axis, kv_axis = (listed.block_q, listed.block_kv), 0, 1
        if self._keys_first:
            shape, q_axis, kv_axis = shape[::-1], 1, 0
        q_number, kv_number = grid.q_and_kv(self._own, self._met[slot])
        kv_token = _tokens(kv_number, grid.kv_blocks, listed.block_kv, shape, kv_axis)
        q_token = _tokens(q_number, grid.q_blocks, listed.block_q, shape, q_axis)
        rules = []
        if listed.kv_tokens % listed.block_kv:
            rules.append(kv_token < listed.kv_tokens)
        if listed.q_tokens % listed.block_q:
            # Padded queries exist as little as padded keys: their logits may be NaN.
            rules.append(q_token < listed.q_tokens)
        if isinstance(rule, Rule):
            q_pos = _along(queries.positions, shape, q_axis, q_token)
            kv_pos = _along(keys.positions, shape, kv_axis, kv_token)
            rules.append(rule.allows(q_pos, kv_pos, self._scalars(rule, q_number)))
        if self._shown[slot] is not None:
            rules.append(self._shown[slot][...].astype(jnp.int32) != 0)
        if queries.segments is not None:
            q_ids = _along(queries.segments, shape, q_axis)
            rules.append((q_ids == _along(keys.segments, shape, kv_axis)) & (q_ids >= 0))
        live = _is_set(self._words[slot], LIVE, shape)
        if not rules:
            return live
        full = jnp.logical_not(_is_set(self._words[slot], PARTIAL, shape))
        return live & (full | functools.reduce(and_, rules))

    def _scalars(self, rule: Rule, q_number) -> list:
        """The integers of the rule for the head that is at work."""
        head = 0
        if rule.heads > 1:
            q_heads = self._listing.grid.q_heads
            head = quotient(self._listing.grid.q_head(q_number), q_heads // rule.heads)
        return [self._tables[row * rule.heads + head] for row in range(len(rule.rows))]


def _tokens(number, blocks: int, block: int, shape: tuple[int, int], axis: int):
    """Indices of a block's tokens along an axis of a tile."""
    return remainder(number, blocks) * block + lax.broadcasted_iota(jnp.int32, shape, axis)


def _is_set(word, flag: int, shape: tuple[int, int]):
    """A flag as a tile: scalars do not become truth values of vectors on their own."""
    return jnp.full(shape, word & flag, jnp.int32) != 0


def _along(ref, shape: tuple[int, int], axis: int, default: Any = None) -> Any:
    """The numbers [1, n] of a ref along an axis of a tile."""
    if ref is None:
        return default
    numbers = ref[...]
    return jnp.broadcast_to(numbers, shape) if axis == 1 else column(numbers, shape[1])


def column(numbers, width: int):
    """[1, n] -> [n, width]: numbers that lie along lanes, laid along sublanes."""
    return jnp.broadcast_to(numbers, (width, numbers.shape[1])).T
