"""Sparse attention driven by a plan: estimate masses, choose blocks, build their layout."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.attention import BlockSparseAttention
from xsake.attention.layer_call import LayerCall
from xsake.cache import PrefillState
from xsake.errors import ArgumentError, UnsupportedError
from xsake.hads.budget import visible_blocks
from xsake.hads.error_bounds import audited_choice
from xsake.hads.plan import SparsityPlan
from xsake.hads.selectors import (
    Chunk,
    ScoringContext,
    correct_later_rows,
    correct_masses,
    from_spec,
)  # fmt: skip
from xsake.hads.topk import BudgetScope, choose
from xsake.layout import BlockLayout
from xsake.layout.grid import count_blocks
from xsake.masks import Causal


@dataclasses.dataclass(frozen=True, eq=False)
class PlanAttention:
    """Attention function of a plan, for `xsake.model.Decoder` and models with the same interface.

    Self-attention over a whole sequence is sparse at any length. Block lists are arrays of a fixed
    capacity, so new inputs do not recompile. So are the chunks of a prompt whose cache has the
    state of `init_prefill`; other steps that extend a cache are dense.

    Args:
        plan: blocks per head and the selector.
        scope: unit that shares a budget at run time; None: that of the plan. With `ROW` the choice
            of a row does not depend on later tokens; wider scopes use the whole sequence.
        operator: implementation and mesh; its block sizes are those of dense steps.
    """

    plan: SparsityPlan
    scope: BudgetScope | None = None
    operator: BlockSparseAttention = BlockSparseAttention()

    def __call__(self, q, k, v, call: LayerCall):
        """Compute the attention of one layer."""
        model = self.plan.model
        if (q.shape[2], k.shape[2], k.shape[3]) != (model.q_heads, model.kv_heads, model.head_dim):
            raise ArgumentError(
                "plan-attention-model",
                "the plan belongs to another model",
                got=f"{q.shape[2]} query heads, {k.shape[2]} kv heads of {k.shape[3]}",
                expected=f"{model.q_heads}, {model.kv_heads} of {model.head_dim} ({model.name})",
                fix="calibrate this model",
            )
        if call.pages is not None and call.pages.prefill is not None:
            return call.apply(self.operator, q, k, v, self.chunk_layout(q, k, call))
        if q.shape[1] != k.shape[1] or call.q_positions is not None:
            return call.apply(self.operator, q, k, v)
        return call.apply(self.operator, q, k, v, self.layout(q, k, call))

    @property
    def is_chunkable(self) -> bool:
        """Whether a prompt can be processed in chunks: no row's blocks depend on later rows."""
        is_dynamic = self.plan.selector.name not in ("none", "random")
        return is_dynamic and self.plan.eps is None and self._scope is BudgetScope.ROW

    def init_prefill(self, num_tokens: Sequence[int], capacity: int, dtype: Any) -> PrefillState:
        """Return the state of a prefill in chunks, each of a multiple of the plan's block.

        Args:
            num_tokens: of each prompt, which determines how many blocks its rows get.
            capacity: of the cache in tokens.
            dtype: of queries.
        """
        if not self.is_chunkable:
            raise UnsupportedError(
                "plan-chunks",
                "blocks of this plan depend on the whole prompt",
                got=f"scope {self._scope}, selector {self.plan.selector.name!r}, "
                f"policy {self.plan.policy.name!r}",
                expected="scope 'row', a selector, no bound",
                fix="PlanAttention(plan, BudgetScope.ROW), or process the prompt in one piece",
            )
        model, block = self.plan.model, self.plan.block
        rows = count_blocks(capacity, block)
        counts = np.zeros((model.layers, len(num_tokens), model.q_heads, rows), np.int32)
        for sequence, tokens in enumerate(num_tokens):
            n = count_blocks(tokens, block)
            counts[:, sequence, :, :n] = self.counts(n)
        shape = model.layers, len(num_tokens), block, model.q_heads, model.head_dim
        return PrefillState(jnp.asarray(counts), jnp.zeros(shape, dtype))

    def layout(self, q, k, call: LayerCall) -> BlockLayout:
        """Return the block layout of one layer for this input."""
        tokens, block = q.shape[1], self.plan.block
        chosen = self.chosen(q, k, call)
        n = count_blocks(tokens, block)
        per_sequence = int(self.counts(n).sum((1, 2)).max())
        if self.plan.eps is not None:
            per_sequence = chosen.shape[1] * visible_blocks(n)
        return BlockLayout.from_block_mask(
            chosen, q_tokens=tokens, kv_tokens=tokens, block_q=block, block_kv=block,
            mask=call.mask, capacity=chosen.shape[0] * per_sequence,
        )  # fmt: skip

    def chosen(
        self, q: Float[Array, "B T Hq D"], k: Float[Array, "B T Hk D"], call: LayerCall
    ) -> Bool[Array, "B Hq Nq Nk"]:
        """Return True for the blocks that one layer computes."""
        _, static = self._tables(count_blocks(q.shape[1], self.plan.block))
        if static is not None:
            grid = jnp.asarray(static)[call.layer]
            return jnp.broadcast_to(grid, (q.shape[0], *grid.shape))
        chosen = self.choice(self.masses(q, k, call), call)
        return (
            chosen
            if self.plan.eps is None
            else self._enforce_eps(q, k, chosen, call, self.plan.eps)
        )

    def chunk_layout(self, q, k, call: LayerCall) -> BlockLayout:
        """Return the block layout of a chunk of queries over the keys of a cache."""
        return BlockLayout.from_block_mask(
            self.chosen_in_chunk(q, k, call), q_tokens=q.shape[1], kv_tokens=k.shape[1],
            block_q=self.plan.block, block_kv=self.plan.block,
        )  # fmt: skip

    def chosen_in_chunk(
        self, q: Float[Array, "B T Hq D"], k: Float[Array, "B capacity Hk D"], call: LayerCall
    ) -> Bool[Array, "B Hq Nq Nk"]:
        """Return True for the blocks that one layer computes for a chunk of its queries."""
        state, block, positions = call.pages.prefill, self.plan.block, call.q_positions
        assert positions is not None
        first = positions[:, 0] // block
        # Padding repeats the last query, as in a whole prompt.
        last = state.num_tokens[:, None] - 1 - positions[:, :1]
        index = jnp.minimum(jnp.arange(q.shape[1])[None], last)
        q = jnp.take_along_axis(q, index[..., None, None], axis=1)
        # The correction of a row needs the estimates of the row before it.
        q = jnp.concatenate([state.queries.astype(q.dtype), q], axis=1)
        context = ScoringContext(
            block, call.scale, call.mask, call.softcap, chunk=Chunk(first - 1, state.num_tokens)
        )
        masses = self._estimate(q, k, context, call.layer)
        is_row = jnp.arange(masses.shape[2])[None] + first[:, None] > 0
        masses = jnp.where(is_row[:, None, :, None], masses, 0)
        rows = first[:, None] + jnp.arange(masses.shape[2] - 1)[None]
        masses = correct_later_rows(masses, self._weights(call.layer), rows)
        at = jnp.minimum(rows, state.counts.shape[-1] - 1)
        counts = jnp.take_along_axis(state.counts, at[:, None], axis=-1)
        return choose(masses, counts, forced=self.plan.forced, scope=BudgetScope.ROW, rows=rows)

    @property
    def _scope(self) -> BudgetScope:
        return self.plan.scope if self.scope is None else self.scope

    def _enforce_eps(self, q, k, chosen, call: LayerCall, eps: float) -> Bool[Array, "B Hq Nq Nk"]:
        """Add blocks until no query drops more than `eps` of its attention mass."""
        if call.segment_ids is not None or call.mask != Causal():
            raise UnsupportedError(
                "bounded-plan-mask",
                "a bounded plan supports plain causal attention only",
                got="segment ids" if call.segment_ids is not None else repr(call.mask),
                fix="use a plan of the policy `kl`, or audit the result",
            )
        return audited_choice(
            q, k, chosen, eps, block=self.plan.block, scale=call.scale, softcap=call.softcap
        )

    def choice(
        self, masses: Float[Array, "B Hq Nq Nk"], call: LayerCall
    ) -> Bool[Array, "B Hq Nq Nk"]:
        """Select the plan's number of blocks by their estimated masses."""
        counts = jnp.asarray(self.counts(masses.shape[-1]))[call.layer]
        return choose(masses, counts, forced=self.plan.forced, scope=self._scope)

    def counts(self, n: int) -> Int[np.ndarray, "L Hq Nq"]:
        """Return the blocks of each row of a sequence of `n` blocks."""
        return self._tables(n)[0]

    def masses(self, q, k, call: LayerCall) -> Float[Array, "B Hq Nq Nk"]:
        """Estimate block masses with the plan's selector and its per-head correction."""
        spec, block = self.plan.selector, self.plan.block
        if spec.name == "random":
            n = count_blocks(q.shape[1], block)
            key = jax.random.fold_in(jax.random.key(int(spec.settings["seed"])), call.layer)
            masses = jax.random.uniform(key, (q.shape[2], n, n), jnp.float32, 1e-6, 1.0)
            return jnp.broadcast_to(masses, (q.shape[0], *masses.shape))
        context = ScoringContext(block, call.scale, call.mask, call.softcap, call.segment_ids)
        return correct_masses(self._estimate(q, k, context, call.layer), self._weights(call.layer))

    def _estimate(self, q, k, context: ScoringContext, layer) -> Float[Array, "B Hq Nq Nk"]:
        components = jnp.asarray(self.plan.components_array)[layer]
        return from_spec(self.plan.selector).masses(q, k, context, components)

    def _weights(self, layer) -> Float[Array, "Hq weights"]:
        return jnp.asarray(self.plan.weights, jnp.float32)[layer]

    def _tables(self, n: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return counts and static grids [L, Hq, Nq, Nk] of sequences of `n` blocks, cached."""
        if n not in self._tables_by_length:
            counts, static = self.plan.row_counts(n).astype(np.int32), None
            if self.plan.selector.name == "none":
                heads = range(self.plan.model.q_heads)
                grids = [
                    [self.plan.static_grid(layer, head, n) for head in heads]
                    for layer in range(self.plan.model.layers)
                ]
                static = np.array(grids)
            self._tables_by_length[n] = counts, static
        return self._tables_by_length[n]

    @functools.cached_property
    def _tables_by_length(self) -> dict[int, tuple[np.ndarray, np.ndarray | None]]:
        return {}
