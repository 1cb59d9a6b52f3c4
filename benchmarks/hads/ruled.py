"""A published rule as attention: the decoder runs layer by layer, and each layer asks it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.baselines import LayerSample, RuleScope, SelectionRule
from benchmarks.baselines.rule import take_pool, take_rows
from benchmarks.hads.losses import measured_rows
from xsake.attention import BlockSparseAttention
from xsake.hads.budget import (
    ForcedBlocks,
    apportion,
    row_counts,
    total_blocks,
    visible_blocks,
)
from xsake.layout import BlockLayout
from xsake.layout.grid import count_blocks
from xsake.masks import Causal
from xsake.model import LayerCall

FORCED = ForcedBlocks()
NONE = ForcedBlocks(0, 0)  # a ranking forces its own blocks


class Ruled:
    """Attention by a rule at an effective budget, outside of jit; batches of one.

    A rule whose blocks compete over the whole model lets them compete inside each layer here, all
    layers having the same total: layers run one after the other, as they do for everyone.

    Args:
        rule: calibrated, if it learns.
        effective: blocks and the price of choosing them, as a share of dense attention.
        block: tokens of a block.
        layers: of the model.
    """

    needs_layer_number = True

    def __init__(self, rule: SelectionRule, effective: float, *, block: int, layers: int):
        self.rule, self.effective, self.block, self.layers = rule, effective, block, layers
        self._compiled = functools.cache(_attention)

    def budget(self, tokens: int, head_dim: int) -> float:
        """What is left for blocks."""
        return self.effective - self.rule.cost(tokens, self.block, head_dim)

    def __call__(self, q, k, v, call: LayerCall):
        chosen = self.chosen(q, k, call)
        count = int(self._totals(q).sum(1).max())
        return self._compiled(call.scale, self.block, count)(q, k, v, chosen)

    def chosen(self, q, k, call: LayerCall) -> np.ndarray:
        """The blocks of one layer, `[Hq, Nq, Nk]`."""
        masses = None
        if self.rule.name.startswith("oracle"):
            masses = np.asarray(measured_rows(q, k, block=self.block))
        scene = LayerSample(
            np.asarray(q[0]), np.asarray(k[0]), call.scale, self.block, int(call.layer), 0, masses
        )
        priority = self.rule.rank(scene).priority
        n = priority.shape[-1]
        totals = self._totals(q)[int(call.layer)]
        if self.rule.scope is RuleScope.MODEL:
            return take_pool(priority, int(totals.sum()), NONE)
        return take_rows(priority, row_counts(totals, n, FORCED), NONE)

    def _totals(self, q) -> np.ndarray:
        """Blocks of every head of every layer."""
        _, tokens, q_heads, head_dim = q.shape
        heads, n = q_heads * self.layers, count_blocks(tokens, self.block)
        total = total_blocks(self.budget(tokens, head_dim), heads=heads, n=n, forced=FORCED)
        weights = np.ones(heads)
        if self.rule.scope is RuleScope.HEADS:
            weights = np.concatenate([self.rule.shares(layer) for layer in range(self.layers)])
        minimum, maximum = np.full(heads, FORCED.total(n)), np.full(heads, visible_blocks(n))
        return apportion(weights, total, minimum, maximum).reshape(self.layers, q_heads)


def _attention(scale: float, block: int, capacity: int):
    """Compiled attention over chosen blocks, at most `capacity`."""
    operator = BlockSparseAttention(scale=scale)

    @jax.jit
    def attend(q, k, v, chosen):
        tokens = q.shape[1]
        layout = BlockLayout.from_block_mask(
            jnp.asarray(chosen)[None], q_tokens=tokens, kv_tokens=tokens, block_q=block,
            block_kv=block, mask=Causal(), capacity=capacity,
        )  # fmt: skip
        return operator(q, k, v, mask=Causal(), layout=layout)

    return attend
