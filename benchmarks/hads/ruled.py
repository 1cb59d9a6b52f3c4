"""Published rules as attention functions: the decoder runs layer by layer, and each layer asks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from benchmarks.baselines import LayerSample, RuleScope, SelectionRule
from benchmarks.baselines.rule import causal_grid, take_rows
from benchmarks.baselines.token_columns import TokenColumns
from benchmarks.hads.losses import measured_rows
from xsake.attention import BlockSparseAttention
from xsake.hads.budget import ForcedBlocks, row_counts, total_blocks, visible_blocks
from xsake.layout import BlockLayout
from xsake.masks import Causal
from xsake.model import DenseAttention, LayerCall

Rule = SelectionRule | TokenColumns

FORCED = ForcedBlocks()
NONE = ForcedBlocks(0, 0)  # a ranking forces its own blocks
COLUMN_BUCKET = 128  # lists of columns are padded to a multiple of it


class RuleCalibration:
    """Dense attention that shows every layer of the calibration documents to rules.

    Args:
        rules: to calibrate.
        block: tokens of a block.
    """

    needs_layer_number = True

    def __init__(self, rules: list[Rule], block: int):
        self.rules, self.block = rules, block
        self.samples: list[LayerSample] = []

    def __call__(self, q, k, v, call: LayerCall):
        masses = np.asarray(measured_rows(q, k, call.scale, block=self.block))
        sample = _sample(q, k, call, self.block, masses)
        for rule in self.rules:
            rule.observe(sample)
        self.samples.append(sample)
        return DenseAttention()(q, k, v, call)

    def finish(self) -> None:
        """Fit the rules to all samples."""
        for rule in self.rules:
            rule.finish()

    def levels(self, rule: SelectionRule, works: list[float]) -> list[float]:
        """Return the threshold of a rule for each share of work.

        Blocks of the whole model compete, as published: at its threshold a rule does this share of
        work on average over the calibration documents, more in some layers and documents.
        """
        tokens, heads, dim = self.samples[0].q.shape
        priorities = [rule.rank(sample).priority.ravel() for sample in self.samples]
        free = np.sort(np.concatenate([x[np.isfinite(x)] for x in priorities]))[::-1]
        n, planes = tokens // self.block, heads * len(self.samples)
        visible = planes * visible_blocks(n)
        forced = visible - len(free)
        budgets = [work - rule.cost(tokens, self.block, dim) for work in works]
        last = [round(budget * visible) - forced - 1 for budget in budgets]
        return [float(free[min(max(place, 0), len(free) - 1)]) for place in last]


class RuleAttention:
    """Attention by a rule at a share of work, outside of jit; batches of one.

    Args:
        rule: calibrated, if it learns.
        work: blocks and their selection, as a share of dense attention.
        block: tokens of a block.
        level: threshold of a rule whose blocks compete over the whole model.
    """

    needs_layer_number = True

    def __init__(self, rule: Rule, work: float, *, block: int, level: float | None = None):
        self.rule, self.work, self.block, self.level = rule, work, block, level
        self.pairs = self.visible = 0

    def __call__(self, q, k, v, call: LayerCall):
        _, tokens, heads, dim = q.shape
        sample = _sample(q, k, call, self.block)
        counts = self.row_counts(heads, tokens, dim)
        n = sample.blocks
        if isinstance(self.rule, TokenColumns):
            chosen = self.rule.choose(sample, counts)
            blocks, columns = chosen.blocks, chosen.columns
            self._count(blocks, (columns >= 0).sum() / self.block)
            width = math.ceil(columns.shape[-1] / COLUMN_BUCKET) * COLUMN_BUCKET
            columns = np.pad(columns, ((0, 0), (0, 0), (0, width - columns.shape[-1])),
                             constant_values=-1)  # fmt: skip
            attend = _attend_columns(call.scale, self.block, heads * visible_blocks(n))
            return attend(q, k, v, jnp.asarray(blocks), jnp.asarray(columns))
        priority = self.rule.rank(sample).priority
        if self.rule.scope is RuleScope.MODEL:
            assert self.level is not None, f"{self.rule.name} has no threshold"
            blocks = priority >= self.level
        else:
            blocks = take_rows(priority, counts, NONE)
        self._count(blocks, 0.0)
        return _attend_blocks(call.scale, self.block, heads * visible_blocks(n))(
            q, k, v, jnp.asarray(blocks)
        )

    def measured_work(self, tokens: int, dim: int) -> float:
        """Return the work of all calls so far, selection included."""
        return self.pairs / self.visible + self.rule.cost(tokens, self.block, dim)

    def row_counts(self, heads: int, tokens: int, dim: int) -> Int[np.ndarray, "Hq Nq"]:
        """Return the blocks of each row of a layer: equal for every head, constant by row."""
        assert self.rule.scope is not RuleScope.HEADS, "not a rule of this ladder"
        budget, n = self.work - self.rule.cost(tokens, self.block, dim), tokens // self.block
        total = total_blocks(budget, heads=heads, n=n, forced=FORCED)
        totals = np.full(heads, total // heads) + (np.arange(heads) < total % heads)
        return row_counts(totals, n, FORCED)

    def _count(self, blocks: np.ndarray, more: float) -> None:
        self.pairs += float(blocks.sum()) + more
        self.visible += len(blocks) * int(causal_grid(blocks.shape[-1]).sum())


def _sample(q, k, call: LayerCall, block: int, masses=None) -> LayerSample:
    """Return the layer of a model as a rule sees it."""
    layer = int(call.layer)
    return LayerSample(np.asarray(q[0]), np.asarray(k[0]), call.scale, block, layer, 0, masses)


def _layout(blocks: Array, tokens: int, block: int, capacity: int) -> BlockLayout:
    return BlockLayout.from_block_mask(
        blocks[None], q_tokens=tokens, kv_tokens=tokens, block_q=block, block_kv=block,
        mask=Causal(), capacity=capacity,
    )  # fmt: skip


@functools.cache
def _attend_blocks(scale: float, block: int, capacity: int):
    """Return compiled attention over at most `capacity` blocks."""

    def attend(q, k, v, blocks):
        layout = _layout(blocks, q.shape[1], block, capacity)
        return BlockSparseAttention(scale=scale)(q, k, v, mask=Causal(), layout=layout)

    return jax.jit(attend)


@functools.cache
def _attend_columns(scale: float, block: int, capacity: int):
    """Return compiled attention over blocks, and over single keys of each row of blocks."""

    def attend(q, k, v, blocks, columns):
        layout = _layout(blocks, q.shape[1], block, capacity)
        operator = BlockSparseAttention(scale=scale)
        parts = [
            operator(q, k, v, mask=Causal(), layout=layout, return_lse=True),
            attend_columns(q, k, v, columns, scale=scale),
        ]
        lse = jnp.logaddexp(*(part[1] for part in parts))
        return sum(out * jnp.exp(own - lse)[..., None] for out, own in parts).astype(q.dtype)

    return jax.jit(attend)


def attend_columns(
    q: Float[Array, "1 T Hq D"],
    k: Float[Array, "1 T Hk D"],
    v: Float[Array, "1 T Hk D"],
    columns: Int[Array, "Hq Nq C"],
    *,
    scale: float,
) -> tuple[Float[Array, "1 T Hq D"], Float[Array, "1 T Hq"]]:
    """Compute the attention of each row of queries to its own keys.

    Args:
        q, k, v: of one sequence.
        columns: keys of each row of each head, before its queries; -1 is padding.
        scale: factor on q.k.

    Returns:
        Output and log-sum-exp; 0 and -inf for rows without keys.
    """
    _, tokens, heads, dim = q.shape
    group, rows = heads // k.shape[2], columns.shape[1]

    def of_head(head):
        queries = q[0, :, head].reshape(rows, tokens // rows, dim)
        own = columns[head]
        keys, values = (jnp.take(x[0, :, head // group], own, axis=0) for x in (k, v))
        s = scale * jnp.einsum("nbd,ncd->nbc", queries, keys)
        s = jnp.where(own[:, None] >= 0, s, -jnp.inf)
        lse = jax.nn.logsumexp(s, axis=-1)
        p = jnp.exp(s - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
        out = jnp.einsum("nbc,ncd->nbd", p, values)
        return out.reshape(tokens, dim), lse.reshape(tokens)

    out, lse = jax.lax.map(of_head, jnp.arange(heads))
    return jnp.moveaxis(out, 0, 1)[None], lse.T[None]
