"""Exact dropped attention mass of a choice of blocks, and choices with a limit on it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from xsake.hads import dropped
from xsake.hads.dropped import BoundScope, RowChunk
from xsake.kernels.statistics import block_statistics
from xsake.masks import Causal


class Audit(NamedTuple):
    """Dropped mass of every query; `odds` is log(dropped / kept), -inf if nothing is dropped."""

    odds: Float[Array, "B T Hq"]

    @property
    def mass(self) -> Float[Array, "B T Hq"]:
        """Dropped share of the dense attention."""
        return dropped.share(self.odds)

    @property
    def kl(self) -> Float[Array, "B T Hq"]:
        """KL(sparse || dense) = `-log(1 - mass)` in nats; infinite if nothing is kept."""
        return jnp.logaddexp(self.odds, 0)

    @property
    def mean_mass(self) -> Float[Array, ""]:
        return self.mass.mean()

    @property
    def worst_mass(self) -> Float[Array, ""]:
        return self.mass.max()

    @property
    def mean_kl(self) -> Float[Array, ""]:
        return self.kl.mean()

    @property
    def worst_kl(self) -> Float[Array, ""]:
        return self.kl.max()


def audit(
    q: Float[Array | np.ndarray, "B T Hq D"],
    k: Float[Array | np.ndarray, "B T Hk D"],
    chosen: Bool[Array | np.ndarray, "B Hq Nq Nk"],
    *,
    block: int,
    scale: float,
    softcap: float | None = None,
) -> Audit:
    """Measure the exact dropped mass of causal attention over chosen blocks (dense in q and k).

    Args:
        q, k, chosen, block, scale, softcap: as for `dropped_bound`.

    Example:
        >>> q = k = jnp.ones((1, 8, 1, 4))
        >>> chosen = jnp.eye(4, dtype=bool)[None, None]  # diagonal blocks of 2 tokens
        >>> result = audit(q, k, chosen, block=2, scale=0.5)
        >>> f"{result.mass[0, -1, 0]:.3f} {result.kl[0, -1, 0]:.3f}"
        '0.750 1.386'
    """
    q, k, chosen = map(jnp.asarray, jax.lax.stop_gradient((q, k, chosen)))
    dropped.validate_choice(q, k, chosen, block=block, softcap=softcap)
    return Audit(_odds(q, k, chosen, _AuditConfig(block, float(scale), softcap)))


def audited_choice(
    q: Float[Array | np.ndarray, "B T Hq D"],
    k: Float[Array | np.ndarray, "B T Hk D"],
    chosen: Bool[Array | np.ndarray, "B Hq Nq Nk"],
    eps: float,
    *,
    block: int,
    scale: float,
    softcap: float | None = None,
    scope: BoundScope = BoundScope.EVERY_QUERY,
) -> Bool[Array, "B Hq Nq Nk"]:
    """Add the fewest blocks to each row, heaviest first, until the dropped mass is below `eps`.

    Like `bounded_choice` with exact masses, at half the cost of dense attention: all products of
    queries and keys, none of weights and values. No block is removed, and the limit includes
    rounding.

    Args:
        q, k, chosen, block, scale, softcap: as for `audit`.
        eps: maximum dropped mass.
        scope: of every query, or of the mean over the queries of a row.
    """
    q, k, chosen = map(jnp.asarray, jax.lax.stop_gradient((q, k, chosen)))
    dropped.validate_choice(q, k, chosen, block=block, softcap=softcap, eps=eps)
    return _choice(q, k, chosen, eps, _AuditConfig(block, float(scale), softcap), scope)


class _AuditConfig(NamedTuple):
    block: int
    scale: float
    softcap: float | None


@functools.partial(jax.jit, static_argnames="config")
def _odds(q, k, chosen, config: _AuditConfig) -> Float[Array, "B T Hq"]:
    def visit(rows: RowChunk):
        weights, kept = _statistics(rows, k, config).block_lse, rows.chosen_by_query()
        return dropped.log_sum(weights, ~kept) - dropped.log_sum(weights, kept)

    sizes = {"block": config.block, "columns": chosen.shape[-1]}
    return dropped.map_rows(visit, q, chosen, **sizes)[:, : q.shape[1]]


@functools.partial(jax.jit, static_argnames=("config", "scope"))
def _choice(
    q, k, chosen, eps, config: _AuditConfig, scope: BoundScope
) -> Bool[Array, "B Hq Nq Nk"]:
    tokens = q.shape[1]

    def visit(rows: RowChunk):
        statistics = _statistics(rows, k, config)
        wide = statistics.lse.dtype
        scaled = rows.q.astype(wide) * jnp.asarray(config.scale, wide)
        reach = dropped.key_reach(k.astype(wide))
        slack = dropped.rounding(scaled, reach, block=config.block, tokens=tokens)[..., None]
        weights = statistics.block_lse - statistics.lse[..., None]
        share = lambda logs: jnp.exp(logs + slack)
        return dropped.extend_choice(rows, weights, share, eps, scope=scope, tokens=tokens)

    sizes = {"block": config.block, "columns": chosen.shape[-1]}
    extended = dropped.map_rows(visit, q, chosen, **sizes)
    return jnp.swapaxes(extended[:, : chosen.shape[2]], 1, 2)


def _statistics(rows: RowChunk, k, config: _AuditConfig):
    return block_statistics(
        rows.q, k, block_kv=config.block, mask=Causal(), scale=config.scale,
        softcap=config.softcap, q_positions=rows.position,
    )  # fmt: skip
