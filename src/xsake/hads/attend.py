"""A plan as attention: chooses the blocks of each input by the plan and computes nothing else."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.attention import BlockSparseAttention
from xsake.errors import ArgumentError, UnsupportedError
from xsake.hads.audit import audited_choice
from xsake.hads.budget import visible_blocks
from xsake.hads.choose import Scope, choose
from xsake.hads.measure import read
from xsake.hads.plan import SparsityPlan
from xsake.hads.selectors import SELECTORS, Look, Selector, mixed
from xsake.layout import BlockLayout
from xsake.layout.grid import blocks_of
from xsake.masks import Causal


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """Attention by a plan, for `xsake.model.Decoder` and whoever calls like it.

    Self-attention over a whole sequence is sparse, at any length: the lists of blocks are data of
    a fixed capacity, so a new input never compiles anew. Steps that extend a cache are dense.

    Args:
        plan: how many blocks heads get, and how they are chosen.
        scope: what shares a budget at run time; None: as the plan says. With `ROW` a row's choice
            depends on nothing that comes after it; wider scopes look at the whole sequence, as
            prefill may.
        operator: implementation, mesh; its block sizes serve dense steps.
    """

    plan: SparsityPlan
    scope: Scope | None = None
    operator: BlockSparseAttention = BlockSparseAttention()

    def __call__(self, q, k, v, call: Any):
        """The attention of one layer; `call` as in `xsake.model.LayerCall`."""
        known = self.plan.model
        if (q.shape[2], k.shape[2], k.shape[3]) != (known.q_heads, known.kv_heads, known.head_dim):
            raise ArgumentError(
                "the plan was made for another model",
                got=f"{q.shape[2]} query heads, {k.shape[2]} kv heads of {k.shape[3]}",
                expected=f"{known.q_heads}, {known.kv_heads} of {known.head_dim} ({known.name})",
                fix="calibrate this model",
            )
        if q.shape[1] != k.shape[1] or call.q_positions is not None:
            return call.through(self.operator, q, k, v)
        return call.through(self.operator, q, k, v, self.layout(q, k, call))

    def layout(self, q, k, call: Any) -> BlockLayout:
        """The blocks that one layer computes for this input."""
        tokens, block = q.shape[1], self.plan.block
        chosen = self.chosen(q, k, call)
        n = blocks_of(tokens, block)
        most = self._tables(n).layer_totals.max()
        if self._eps is not None:
            most = chosen.shape[1] * visible_blocks(n)
        capacity = chosen.shape[0] * int(most)
        return BlockLayout.from_block_mask(
            chosen, q_tokens=tokens, kv_tokens=tokens, block_q=block, block_kv=block,
            mask=call.mask, capacity=capacity,
        )  # fmt: skip

    def chosen(
        self, q: Float[Array, "B T Hq D"], k: Float[Array, "B T Hk D"], call: Any
    ) -> Bool[Array, "B Hq Nq Nk"]:
        """Which blocks those are."""
        tables = self._tables(blocks_of(q.shape[1], self.plan.block))
        if tables.static is not None:
            grid = jnp.asarray(tables.static)[call.layer]
            return jnp.broadcast_to(grid, (q.shape[0], *grid.shape))
        found = self.choice(self.masses(q, k, call), call)
        eps = self._eps
        return found if eps is None else self._audited(q, k, found, call, eps)

    @property
    def _eps(self) -> float | None:
        """The mass that a query may lose at most; None if nobody promised anything."""
        policy = self.plan.policy
        return float(policy.settings["eps"]) if policy.name == "bounded" else None

    def _audited(self, q, k, chosen, call: Any, eps: float) -> Bool[Array, "B Hq Nq Nk"]:
        """The choice, and more blocks until no query loses more than the plan promises."""
        if call.segment_ids is not None or call.mask != Causal():
            raise UnsupportedError(
                "a bounded plan serves plain causal attention",
                got="segment ids" if call.segment_ids is not None else repr(call.mask),
                fix="use a plan of the policy `kl`, or audit the result",
            )
        return audited_choice(
            q, k, chosen, eps, block=self.plan.block, scale=call.scale, softcap=call.softcap
        )

    def choice(self, masses: Float[Array, "B Hq Nq Nk"], call: Any) -> Bool[Array, "B Hq Nq Nk"]:
        """The blocks that the plan buys, given what they are thought to weigh."""
        counts = jnp.asarray(self.counts(masses.shape[-1]))[call.layer]
        scope = self.plan.scope if self.scope is None else self.scope
        return choose(masses, counts, always=self.plan.always, scope=scope)

    def counts(self, n: int) -> Int[np.ndarray, "L Hq Nq"]:
        """The blocks that each row of a sequence of `n` blocks is given."""
        return self._tables(n).counts

    def masses(self, q, k, call: Any) -> Float[Array, "B Hq Nq Nk"]:
        """What blocks are thought to weigh, by the plan's selector and its corrections."""
        choice, tables = self.plan.selector, self._tables(blocks_of(q.shape[1], self.plan.block))
        if choice.name == "random":
            n = tables.counts.shape[-1]
            key = jax.random.fold_in(jax.random.key(int(choice.settings["seed"])), call.layer)
            drawn = jax.random.uniform(key, (q.shape[2], n, n), jnp.float32, 1e-6, 1.0)
            return jnp.broadcast_to(drawn, (q.shape[0], *drawn.shape))
        ids = call.segment_ids
        look = Look(self.plan.block, call.scale, call.mask, call.softcap, ids)
        selector = selector_of(self.plan)
        dims = read(selector, jnp.asarray(self.plan.components_array)[call.layer])
        weights = jnp.asarray(self.plan.weights, jnp.float32)[call.layer]
        return mixed(selector.masses(q, k, look, dims), weights)

    def _tables(self, n: int) -> "_Tables":
        """What the plan says about sequences of `n` blocks; worked out once."""
        if n not in self._known:
            self._known[n] = _Tables.of(self.plan, n)
        return self._known[n]

    @functools.cached_property
    def _known(self) -> "dict[int, _Tables]":
        return {}


@dataclasses.dataclass(frozen=True, eq=False)
class _Tables:
    """What a plan says about sequences of one length."""

    counts: np.ndarray  # [L, Hq, Nq]
    layer_totals: np.ndarray  # [L]
    static: np.ndarray | None  # [L, Hq, Nq, Nk]

    @classmethod
    def of(cls, plan: SparsityPlan, n: int) -> "_Tables":
        counts = plan.row_counts(n).astype(np.int32)
        static = None
        if plan.selector.name == "none":
            layers, heads = counts.shape[:2]
            grids = [[plan.static_grid(i, h, n) for h in range(heads)] for i in range(layers)]
            static = np.array(grids)
        return cls(counts, counts.sum((1, 2)), static)


def selector_of(plan: SparsityPlan) -> Selector:
    """The selector that a plan names, with its settings."""
    return SELECTORS[plan.selector.name](**plan.selector.settings)
