"""Provable upper bounds on the attention mass of dropped blocks, from bounds on runs of keys."""

import enum
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from xsake.attention import attention
from xsake.errors import ArgumentError
from xsake.hads import dropped
from xsake.hads.dropped import BoundScope, RowChunk
from xsake.hads.selectors.selector import group_heads, split_blocks
from xsake.layout import BlockLayout
from xsake.masks import Causal


class BoundKind(enum.StrEnum):
    """Bound on the logits of a run of keys."""

    BOX = "box"  # componentwise minimum and maximum
    BALL = "ball"  # mean key and radius
    BOTH = "both"  # the smaller of the two bounds


class BlockBounds(NamedTuple):
    """Bounding box and ball of each run of keys; a run is a part of one block."""

    low: Float[Array, "B runs Hk D"]
    high: Float[Array, "B runs Hk D"]
    centre: Float[Array, "B runs Hk D"]
    radius: Float[Array, "B runs Hk"]  # of the ball around the centre

    @classmethod
    def of(cls, k: Float[Array, "B T Hk D"], run: int = 16) -> "BlockBounds":
        """Compute the bounds of every `run` keys, in float32 or wider; the last may be shorter."""
        keys = split_blocks(k.astype(jnp.promote_types(k.dtype, jnp.float32)), run)
        # Rounding of the centre is harmless: the radius is that of the computed centre.
        centre = keys.mean(2)
        radius = dropped.length(keys - centre[:, :, None]).max(2)
        return cls(keys.min(2), keys.max(2), centre, radius)

    def upper(
        self, q: Float[Array, "B S Hq D"], kind: BoundKind = BoundKind.BOTH
    ) -> Float[Array, "B S Hq runs"]:
        """Return an upper bound on `q.k` for the keys of each run, up to `dropped.rounding`.

        It is inf where an intermediate result overflows.

        Args:
            q: queries, times the scale of logits.
            kind: which bound.

        Example:
            >>> keys = jnp.array([[[[1.0, 0.0]], [[0.0, 1.0]]]])  # a run of two keys
            >>> bounds, q = BlockBounds.of(keys, run=2), jnp.array([[[[2.0, 1.0]]]])
            >>> [round(float(bounds.upper(q, kind)[0, 0, 0, 0]), 2) for kind in BoundKind]
            [3.0, 3.08, 3.0]
        """
        by_group = group_heads(q, self.low.shape[2])
        product = functools.partial(jnp.einsum, "bshgd,bnhd->bshgn", precision="highest")
        bounds = []
        if kind != BoundKind.BALL:
            signs = jnp.concatenate([jnp.maximum(by_group, 0), jnp.minimum(by_group, 0)], -1)
            bounds.append(product(signs, jnp.concatenate([self.high, self.low], -1)))
        if kind != BoundKind.BOX:
            radius = jnp.moveaxis(self.radius, 1, 2)[:, None, :, None]
            norm = dropped.length(by_group)[..., None]
            bounds.append(product(by_group, self.centre) + norm * radius)
        # Overflow gives nan, or inf of either sign, depending on the order of the sum.
        valid = (jnp.where(jnp.isfinite(x), x, jnp.inf) for x in bounds)
        return functools.reduce(jnp.minimum, valid).reshape(*q.shape[:3], -1)


def dropped_bound(
    q: Float[Array | np.ndarray, "B T Hq D"],
    k: Float[Array | np.ndarray, "B T Hk D"],
    chosen: Bool[Array | np.ndarray, "B Hq Nq Nk"],
    *,
    block: int,
    scale: float,
    softcap: float | None = None,
    run: int = 16,
    kind: BoundKind = BoundKind.BOTH,
    kept_lse: Float[Array | np.ndarray, "B T Hq"] | None = None,
) -> Float[Array, "B T Hq"]:
    """Return an upper bound on the attention mass of visible blocks that are not chosen.

    With R the sum of `keys * exp(bound)` over dropped runs the bound is `R / (exp(kept_lse) + R)`,
    rounded up; `kl_bound` of it bounds KL(sparse || dense). It costs 3 products per query and run,
    `1.5 / run` of dense attention. It is tight if the keys of a run are similar. In trained models
    they are not, and most bounds are close to 1: see `xsake.hads.audit`.

    Args:
        q: queries after rotary embedding.
        k: keys after rotary embedding.
        chosen: computed blocks.
        block: tokens of a query block and of a kv block.
        scale: factor on q.k.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        run: keys that are bounded together; divides the block.
        kind: bound on logits.
        kept_lse: of `xsake.attention` over the chosen blocks; None: computed here. With the lse of
            a mask stricter than causality, the bound holds for that mask.

    Example:
        >>> q = k = jnp.ones((1, 8, 1, 4))
        >>> chosen = jnp.eye(4, dtype=bool)[None, None]  # diagonal blocks of 2 tokens
        >>> bound = dropped_bound(q, k, chosen, block=2, scale=0.5, run=2)
        >>> f"{bound[0, -1, 0]:.3f}"
        '0.750'
    """
    q, k, chosen = map(jnp.asarray, jax.lax.stop_gradient((q, k, chosen)))
    dropped.validate_choice(q, k, chosen, block=block, softcap=softcap)
    config = _bound_config(block, scale, softcap, run, kind)
    return _bound(q, k, chosen, _kept_lse(kept_lse, q, k, chosen, config), config)


def kl_bound(mass: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Return the upper bound on KL(sparse || dense) for an upper bound on the dropped mass."""
    return -jnp.log1p(-mass)


def bounded_choice(
    q: Float[Array | np.ndarray, "B T Hq D"],
    k: Float[Array | np.ndarray, "B T Hk D"],
    chosen: Bool[Array | np.ndarray, "B Hq Nq Nk"],
    eps: float,
    *,
    block: int,
    scale: float,
    softcap: float | None = None,
    run: int = 16,
    scope: BoundScope = BoundScope.EVERY_QUERY,
    kept_lse: Float[Array | np.ndarray, "B T Hq"] | None = None,
) -> Bool[Array, "B Hq Nq Nk"]:
    """Add the fewest blocks to each row, largest bound first, until the bound is below `eps`.

    No block is removed. The bound ignores the mass of added blocks, so `dropped_bound` of the
    result is smaller still.

    Args:
        q, k, chosen, block, scale, softcap, run, kept_lse: as for `dropped_bound`.
        eps: maximum dropped mass.
        scope: of every query, or of the mean over the queries of a row.
    """
    q, k, chosen = map(jnp.asarray, jax.lax.stop_gradient((q, k, chosen)))
    dropped.validate_choice(q, k, chosen, block=block, softcap=softcap, eps=eps)
    config = _bound_config(block, scale, softcap, run, BoundKind.BOTH)
    kept_lse = _kept_lse(kept_lse, q, k, chosen, config)
    return _choice(q, k, chosen, kept_lse, eps, config, scope)


class _BoundConfig(NamedTuple):
    block: int
    scale: float
    softcap: float | None
    run: int
    kind: BoundKind


def _bound_config(
    block: int, scale: float, softcap: float | None, run: int, kind: BoundKind
) -> _BoundConfig:
    if run < 1 or block % run:
        raise ArgumentError(
            "a run of keys must divide the block", got=f"{run=}", expected=f"a divisor of {block=}"
        )
    return _BoundConfig(block, float(scale), softcap, run, kind)


@functools.partial(jax.jit, static_argnames="config")
def _bound(q, k, chosen, kept_lse, config: _BoundConfig) -> Float[Array, "B T Hq"]:
    bound_inputs = _BoundInputs.of(q, k, kept_lse, config)

    def visit(rows: RowChunk):
        log_dropped = dropped.log_sum(bound_inputs.log_weights(rows), ~rows.chosen_by_query())
        odds = log_dropped - rows.kept_lse + bound_inputs.rounding(rows)
        return dropped.round_up(dropped.share(odds), log_dropped)

    return bound_inputs.by_rows(visit, chosen)[:, : q.shape[1]]


@functools.partial(jax.jit, static_argnames=("config", "scope"))
def _choice(
    q, k, chosen, kept_lse, eps, config: _BoundConfig, scope: BoundScope
) -> Bool[Array, "B Hq Nq Nk"]:
    bound_inputs = _BoundInputs.of(q, k, kept_lse, config)

    def visit(rows: RowChunk):
        weights = bound_inputs.log_weights(rows) - rows.kept_lse[..., None]
        slack = bound_inputs.rounding(rows)[..., None]
        share = lambda odds: dropped.share(odds + slack)
        return dropped.extend_choice(
            rows, weights, share, eps, scope=scope, tokens=bound_inputs.q.shape[1]
        )

    return jnp.swapaxes(bound_inputs.by_rows(visit, chosen)[:, : chosen.shape[2]], 1, 2)


class _BoundInputs(NamedTuple):
    """Scaled queries, bounds on the keys and the kept log-sum-exp of a call."""

    q: Float[Array, "B T Hq D"]  # times the scale
    bounds: BlockBounds
    reach: Float[Array, "B Hk"]
    kept_lse: Float[Array, "B T Hq"]
    config: _BoundConfig

    @classmethod
    def of(cls, q, k, kept_lse, config: _BoundConfig) -> "_BoundInputs":
        wide = jnp.promote_types(q.dtype, jnp.float32)
        scaled = q.astype(wide) * jnp.asarray(config.scale, wide)
        bounds, reach = BlockBounds.of(k, config.run), dropped.key_reach(k.astype(wide))
        return cls(scaled, bounds, reach, kept_lse, config)

    def by_rows(self, visit, chosen) -> Array:
        columns = self.bounds.low.shape[1]
        return dropped.map_rows(
            visit, self.q, chosen, block=self.config.block, columns=columns, kept_lse=self.kept_lse
        )

    def rounding(self, rows: RowChunk) -> Float[Array, "B S Hq"]:
        tokens = self.q.shape[1]
        return dropped.rounding(rows.q, self.reach, block=self.config.block, tokens=tokens)

    def log_weights(self, rows: RowChunk) -> Float[Array, "B S Hq Nk"]:
        """Return upper bounds on the log softmax weights of blocks; -inf for masked ones."""
        block, _, softcap, run, kind = self.config
        upper = self.bounds.upper(rows.q, kind)
        if softcap is not None:  # monotone, so bounds remain valid
            upper = softcap * jnp.tanh(upper / softcap)
        start = np.arange(upper.shape[-1], dtype=np.int32) * run
        visible = jnp.clip(rows.position[:, None] + 1 - start[None], 0, run)
        weights = upper + jnp.log(visible.astype(upper.dtype))[None, :, None]
        weights = jnp.where((visible > 0)[None, :, None], weights, -jnp.inf)
        missing = -weights.shape[-1] % (block // run)
        weights = jnp.pad(weights, ((0, 0),) * 3 + ((0, missing),), constant_values=-jnp.inf)
        by_block = weights.reshape(*weights.shape[:3], -1, block // run)
        return jax.nn.logsumexp(by_block, axis=-1)


def _kept_lse(given, q, k, chosen, config: _BoundConfig) -> Float[Array, "B T Hq"]:
    """Return the log-sum-exp of attention over the chosen blocks."""
    if given is not None:
        return jnp.asarray(given, jnp.promote_types(q.dtype, jnp.float32))
    return _compute_lse(q, k, chosen, config)


@functools.partial(jax.jit, static_argnames="config")
def _compute_lse(q, k, chosen, config: _BoundConfig) -> Float[Array, "B T Hq"]:
    tokens, block = q.shape[1], config.block
    layout = BlockLayout.from_block_mask(
        chosen, q_tokens=tokens, kv_tokens=tokens, block_q=block, block_kv=block, mask=Causal()
    )
    return attention(
        q, k, k[..., :1], mask=Causal(), layout=layout,
        scale=config.scale, softcap=config.softcap, return_lse=True,
    )[1]  # fmt: skip
