"""Proved upper bounds on the attention mass of blocks that nobody computes, from runs of keys."""

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
from xsake.hads.dropped import Promise, Rows
from xsake.hads.selectors.selector import by_block, grouped
from xsake.layout import BlockLayout
from xsake.masks import Causal


class Kind(enum.StrEnum):
    """What a bound on the logits of a run of keys is made from."""

    BOX = "box"  # the least and the greatest of each component
    BALL = "ball"  # the mean key, and how far the others are from it
    BOTH = "both"  # the smaller of the two bounds


class BlockBounds(NamedTuple):
    """Where the keys of each run are, a run being some neighbours inside one block."""

    low: Float[Array, "B runs Hk D"]
    high: Float[Array, "B runs Hk D"]
    centre: Float[Array, "B runs Hk D"]
    radius: Float[Array, "B runs Hk"]  # of a ball around the centre that holds the keys

    @classmethod
    def of(cls, k: Float[Array, "B T Hk D"], run: int = 16) -> "BlockBounds":
        """The bounds of every `run` keys, in float32 at least; the last run may be shorter."""
        keys = by_block(k.astype(jnp.promote_types(k.dtype, jnp.float32)), run)
        # Any centre will do: the radius belongs to the one that was computed.
        centre = keys.mean(2)
        radius = dropped.length(keys - centre[:, :, None]).max(2)
        return cls(keys.min(2), keys.max(2), centre, radius)

    def upper(
        self, q: Float[Array, "B S Hq D"], kind: Kind = Kind.BOTH
    ) -> Float[Array, "B S Hq runs"]:
        """At least `q.k` for every key of each run, but for rounding (`dropped.rounding`).

        It is inf where a number on the way to it left the range of floats.

        Args:
            q: queries, times the scale of logits.
            kind: which bound.

        Example:
            >>> keys = jnp.array([[[[1.0, 0.0]], [[0.0, 1.0]]]])  # a run of two keys
            >>> bounds, q = BlockBounds.of(keys, run=2), jnp.array([[[[2.0, 1.0]]]])
            >>> [round(float(bounds.upper(q, kind)[0, 0, 0, 0]), 2) for kind in Kind]
            [3.0, 3.08, 3.0]
        """
        own = grouped(q, self.low.shape[2])
        product = functools.partial(jnp.einsum, "bshgd,bnhd->bshgn", precision="highest")
        found = []
        if kind != Kind.BALL:
            signs = jnp.concatenate([jnp.maximum(own, 0), jnp.minimum(own, 0)], -1)
            found.append(product(signs, jnp.concatenate([self.high, self.low], -1)))
        if kind != Kind.BOX:
            radius = jnp.moveaxis(self.radius, 1, 2)[:, None, :, None]
            found.append(product(own, self.centre) + dropped.length(own)[..., None] * radius)
        # inf - inf is nan, or inf of either sign if the sum was begun elsewhere: it proves nothing.
        proved = (jnp.where(jnp.isfinite(x), x, jnp.inf) for x in found)
        return functools.reduce(jnp.minimum, proved).reshape(*q.shape[:3], -1)


def dropped_bound(
    q: Float[Array | np.ndarray, "B T Hq D"],
    k: Float[Array | np.ndarray, "B T Hk D"],
    chosen: Bool[Array | np.ndarray, "B Hq Nq Nk"],
    *,
    block: int,
    scale: float,
    softcap: float | None = None,
    run: int = 16,
    kind: Kind = Kind.BOTH,
    kept_lse: Float[Array | np.ndarray, "B T Hq"] | None = None,
) -> Float[Array, "B T Hq"]:
    """At least the attention mass of the blocks that causality leaves a query and nobody chose.

    With R the sum of `keys * exp(bound)` over dropped runs it is `R / (exp(kept_lse) + R)`, rounded
    up; `kl_bound` of it bounds KL(sparse || dense). It costs 3 products per query and run, a share
    `1.5 / run` of dense attention's. It is close to the truth where the keys of a run are alike. In
    trained models they are not, and most bounds are close to 1: see `xsake.hads.audit`.

    Args:
        q: queries as they enter the scores, rotations included.
        k: keys, likewise.
        chosen: blocks that are computed.
        block: tokens of a query block and of a kv block.
        scale: factor on q.k.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        run: keys that are bounded together; divides the block.
        kind: which bound on logits.
        kept_lse: as `xsake.attention` returns it for the chosen blocks; None computes it. The bound
            also holds for masks that are stricter than causality if it was computed with them.

    Example:
        >>> q = k = jnp.ones((1, 8, 1, 4))
        >>> chosen = jnp.eye(4, dtype=bool)[None, None]  # in blocks of 2, own one only
        >>> bound = dropped_bound(q, k, chosen, block=2, scale=0.5, run=2)
        >>> f"{bound[0, -1, 0]:.3f}"
        '0.750'
    """
    q, k, chosen = map(jnp.asarray, jax.lax.stop_gradient((q, k, chosen)))
    dropped.require(q, k, chosen, block=block, softcap=softcap)
    setting = _setting(block, scale, softcap, run, kind)
    return _bound(q, k, chosen, _kept_lse(kept_lse, q, k, chosen, setting), setting)


def kl_bound(mass: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """The KL(sparse || dense) that a query has at most if it drops at most that mass."""
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
    promise: Promise = Promise.EVERY_QUERY,
    kept_lse: Float[Array | np.ndarray, "B T Hq"] | None = None,
) -> Bool[Array, "B Hq Nq Nk"]:
    """The choice, and in each row the fewest other blocks, largest bound first, that prove `eps`.

    No block is taken away. The proof counts what the given choice keeps and not what the added
    blocks do, so `dropped_bound` of the result is smaller still.

    Args:
        q, k, chosen, block, scale, softcap, run, kept_lse: as for `dropped_bound`.
        eps: mass that may be dropped at most.
        promise: by every query, or by the queries of a row on average.
    """
    q, k, chosen = map(jnp.asarray, jax.lax.stop_gradient((q, k, chosen)))
    dropped.require(q, k, chosen, block=block, softcap=softcap, eps=eps)
    setting = _setting(block, scale, softcap, run, Kind.BOTH)
    kept_lse = _kept_lse(kept_lse, q, k, chosen, setting)
    return _choice(q, k, chosen, kept_lse, eps, setting, promise)


class _Setting(NamedTuple):
    block: int
    scale: float
    softcap: float | None
    run: int
    kind: Kind


def _setting(block: int, scale: float, softcap: float | None, run: int, kind: Kind) -> _Setting:
    if run < 1 or block % run:
        raise ArgumentError(
            "a run of keys lies in one block", got=f"{run=}", expected=f"a divisor of {block=}"
        )
    return _Setting(block, float(scale), softcap, run, kind)


@functools.partial(jax.jit, static_argnames="setting")
def _bound(q, k, chosen, kept_lse, setting: _Setting) -> Float[Array, "B T Hq"]:
    scene = _Scene.of(q, k, kept_lse, setting)

    def visit(rows: Rows):
        log_dropped = dropped.log_sum(scene.log_weights(rows), ~rows.chosen_by_query())
        odds = log_dropped - rows.kept_lse + scene.rounding(rows)
        return dropped.rounded_up(dropped.share(odds), log_dropped)

    return scene.by_rows(visit, chosen)[:, : q.shape[1]]


@functools.partial(jax.jit, static_argnames=("setting", "promise"))
def _choice(
    q, k, chosen, kept_lse, eps, setting: _Setting, promise: Promise
) -> Bool[Array, "B Hq Nq Nk"]:
    scene = _Scene.of(q, k, kept_lse, setting)

    def visit(rows: Rows):
        weights = scene.log_weights(rows) - rows.kept_lse[..., None]
        slack = scene.rounding(rows)[..., None]
        share_of = lambda odds: dropped.share(odds + slack)
        return dropped.extended(
            rows, weights, share_of, eps, promise=promise, tokens=scene.q.shape[1]
        )

    return jnp.swapaxes(scene.by_rows(visit, chosen)[:, : chosen.shape[2]], 1, 2)


class _Scene(NamedTuple):
    """A call with what is known of its keys."""

    q: Float[Array, "B T Hq D"]  # times the scale
    bounds: BlockBounds
    reach: Float[Array, "B Hk"]
    kept_lse: Float[Array, "B T Hq"]
    setting: _Setting

    @classmethod
    def of(cls, q, k, kept_lse, setting: _Setting) -> "_Scene":
        wide = jnp.promote_types(q.dtype, jnp.float32)
        scaled = q.astype(wide) * jnp.asarray(setting.scale, wide)
        bounds, reach = BlockBounds.of(k, setting.run), dropped.reach_of(k.astype(wide))
        return cls(scaled, bounds, reach, kept_lse, setting)

    def by_rows(self, visit, chosen) -> Array:
        columns = self.bounds.low.shape[1]
        return dropped.by_rows(
            visit, self.q, chosen, block=self.setting.block, columns=columns, kept_lse=self.kept_lse
        )

    def rounding(self, rows: Rows) -> Float[Array, "B S Hq"]:
        tokens = self.q.shape[1]
        return dropped.rounding(rows.q, self.reach, block=self.setting.block, tokens=tokens)

    def log_weights(self, rows: Rows) -> Float[Array, "B S Hq Nk"]:
        """Upper bounds on what blocks add to the softmax denominator; -inf for hidden ones."""
        block, _, softcap, run, kind = self.setting
        upper = self.bounds.upper(rows.q, kind)
        if softcap is not None:  # monotone: a bound stays a bound
            upper = softcap * jnp.tanh(upper / softcap)
        start = np.arange(upper.shape[-1], dtype=np.int32) * run
        seen = jnp.clip(rows.position[:, None] + 1 - start[None], 0, run)
        weights = upper + jnp.log(seen.astype(upper.dtype))[None, :, None]
        weights = jnp.where((seen > 0)[None, :, None], weights, -jnp.inf)
        missing = -weights.shape[-1] % (block // run)
        weights = jnp.pad(weights, ((0, 0),) * 3 + ((0, missing),), constant_values=-jnp.inf)
        of_block = weights.reshape(*weights.shape[:3], -1, block // run)
        return jax.nn.logsumexp(of_block, axis=-1)


def _kept_lse(given, q, k, chosen, setting: _Setting) -> Float[Array, "B T Hq"]:
    """What attention over the chosen blocks divides by; its output is not asked for."""
    if given is not None:
        return jnp.asarray(given, jnp.promote_types(q.dtype, jnp.float32))
    return _computed_lse(q, k, chosen, setting)


@functools.partial(jax.jit, static_argnames="setting")
def _computed_lse(q, k, chosen, setting: _Setting) -> Float[Array, "B T Hq"]:
    tokens, block = q.shape[1], setting.block
    layout = BlockLayout.from_block_mask(
        chosen, q_tokens=tokens, kv_tokens=tokens, block_q=block, block_kv=block, mask=Causal()
    )
    return attention(
        q, k, k[..., :1], mask=Causal(), layout=layout,
        scale=setting.scale, softcap=setting.softcap, return_lse=True,
    )[1]  # fmt: skip
