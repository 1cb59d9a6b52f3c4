"""What a choice of blocks drops of every query's attention, exactly, and choices that obey it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from xsake.hads import dropped
from xsake.hads.dropped import Promise, Rows
from xsake.kernels.statistics import block_statistics
from xsake.masks import Causal


class Audit(NamedTuple):
    """What every query drops: `odds` is the log of dropped / kept, -inf for nothing dropped."""

    odds: Float[Array, "B T Hq"]

    @property
    def mass(self) -> Float[Array, "B T Hq"]:
        """The share of dense attention that is dropped."""
        return dropped.share(self.odds)

    @property
    def kl(self) -> Float[Array, "B T Hq"]:
        """KL(sparse || dense) in nats, which is `-log(1 - mass)`; infinite if nothing is kept."""
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
    """What causal attention over the chosen blocks drops, exactly: a dense pass over q and k.

    Args:
        q: queries as they enter the scores, rotations included.
        k: keys, likewise.
        chosen: blocks that are computed.
        block: tokens of a query block and of a kv block.
        scale: factor on q.k.
        softcap: logits become `softcap * tanh(logits / softcap)`.

    Example:
        >>> q = k = jnp.ones((1, 8, 1, 4))
        >>> chosen = jnp.eye(4, dtype=bool)[None, None]  # in blocks of 2, own one only
        >>> found = audit(q, k, chosen, block=2, scale=0.5)
        >>> f"{found.mass[0, -1, 0]:.3f} {found.kl[0, -1, 0]:.3f}"
        '0.750 1.386'
    """
    q, k, chosen = map(jnp.asarray, jax.lax.stop_gradient((q, k, chosen)))
    dropped.require(q, k, chosen, block=block, softcap=softcap)
    return Audit(_odds(q, k, chosen, _Setting(block, float(scale), softcap)))


def audited_choice(
    q: Float[Array | np.ndarray, "B T Hq D"],
    k: Float[Array | np.ndarray, "B T Hk D"],
    chosen: Bool[Array | np.ndarray, "B Hq Nq Nk"],
    eps: float,
    *,
    block: int,
    scale: float,
    softcap: float | None = None,
    promise: Promise = Promise.EVERY_QUERY,
) -> Bool[Array, "B Hq Nq Nk"]:
    """The choice, and in each row the fewest other blocks, heaviest first, until `eps` is true.

    It is what `bounded_choice` would be if its bounds were exact, at half the price of dense
    attention: every product of queries and keys, none of weights and values. No block is taken
    away, and the promise includes rounding.

    Args:
        q, k, chosen, block, scale, softcap: as for `audit`.
        eps: mass that may be dropped at most.
        promise: by every query, or by the queries of a row on average.
    """
    q, k, chosen = map(jnp.asarray, jax.lax.stop_gradient((q, k, chosen)))
    dropped.require(q, k, chosen, block=block, softcap=softcap, eps=eps)
    return _choice(q, k, chosen, eps, _Setting(block, float(scale), softcap), promise)


class _Setting(NamedTuple):
    block: int
    scale: float
    softcap: float | None


@functools.partial(jax.jit, static_argnames="setting")
def _odds(q, k, chosen, setting: _Setting) -> Float[Array, "B T Hq"]:
    def visit(rows: Rows):
        weights, kept = _statistics(rows, k, setting).block_lse, rows.chosen_by_query()
        return dropped.log_sum(weights, ~kept) - dropped.log_sum(weights, kept)

    sizes = {"block": setting.block, "columns": chosen.shape[-1]}
    return dropped.by_rows(visit, q, chosen, **sizes)[:, : q.shape[1]]


@functools.partial(jax.jit, static_argnames=("setting", "promise"))
def _choice(q, k, chosen, eps, setting: _Setting, promise: Promise) -> Bool[Array, "B Hq Nq Nk"]:
    tokens = q.shape[1]

    def visit(rows: Rows):
        found = _statistics(rows, k, setting)
        wide = found.lse.dtype
        scaled = rows.q.astype(wide) * jnp.asarray(setting.scale, wide)
        reach = dropped.reach_of(k.astype(wide))
        slack = dropped.rounding(scaled, reach, block=setting.block, tokens=tokens)[..., None]
        weights = found.block_lse - found.lse[..., None]
        share_of = lambda logs: jnp.exp(logs + slack)
        return dropped.extended(rows, weights, share_of, eps, promise=promise, tokens=tokens)

    sizes = {"block": setting.block, "columns": chosen.shape[-1]}
    found = dropped.by_rows(visit, q, chosen, **sizes)
    return jnp.swapaxes(found[:, : chosen.shape[2]], 1, 2)


def _statistics(rows: Rows, k, setting: _Setting):
    return block_statistics(
        rows.q, k, block_kv=setting.block, mask=Causal(), scale=setting.scale,
        softcap=setting.softcap, q_positions=rows.position,
    )  # fmt: skip
