"""What a choice of blocks drops, and the fewest more that suffice; knows weights and no keys."""

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.errors import ArgumentError, ShapeError
from xsake.layout.grid import blocks_of

_ROOM = 2**20  # numbers that are made at once of rows, where a row is not larger than that


class Promise(enum.StrEnum):
    """Whose dropped mass is kept small."""

    EVERY_QUERY = "every query"
    ROW_MEAN = "row mean"  # of the queries of a row


class Rows(NamedTuple):
    """A few rows of a call. Queries that fill up the last row are copies of the last query."""

    q: Float[Array, "B S Hq D"]
    position: Int[Array, " S"]
    chosen: Bool[Array, "B R Hq Nk"]
    visible: Bool[Array, "1 R 1 Nk"]
    kept_lse: Float[Array, "B S Hq"]  # 0 if `by_rows` was given none

    @property
    def block(self) -> int:
        """Queries of a row."""
        return self.q.shape[1] // self.chosen.shape[1]

    def chosen_by_query(self) -> Bool[Array, "B S Hq Nk"]:
        """The choice of each query, which is that of its row."""
        return jnp.repeat(self.chosen, self.block, axis=1)


def by_rows(
    visit: Callable[[Rows], Float[Array, "B S Hq"] | Bool[Array, "B R Hq Nk"]],
    q: Float[Array, "B T Hq D"],
    chosen: Bool[Array, "B Hq Nq Nk"],
    *,
    block: int,
    columns: int,
    kept_lse: Float[Array, "B T Hq"] | None = None,
) -> Array:
    """What `visit` makes of all rows, a few at a time, so that memory does not grow with T^2.

    Args:
        visit: from some rows to an array of their queries or rows along axis 1.
        q: queries.
        chosen: blocks of each row.
        block: queries of a row, keys of a block.
        columns: numbers that `visit` makes per query.
        kept_lse: of queries, for `visit`.
    """
    batch, tokens, heads, _ = q.shape
    rows = chosen.shape[2]
    fitting = max(1, _ROOM // (batch * heads * block * columns))
    count = blocks_of(rows, fitting)
    size = blocks_of(rows, count)
    kept_lse = jnp.zeros(q.shape[:3], jnp.float32) if kept_lse is None else kept_lse
    place = jnp.arange(count * size, dtype=jnp.int32).reshape(count, size)
    whole = (q, size * block), (jnp.swapaxes(chosen, 1, 2), size), (kept_lse, size * block)
    pieces = (_pieces(x, each, count) for x, each in whole)

    def some(chunk):
        place, q, chosen, kept_lse = chunk
        token = place[:, None] * block + np.arange(block, dtype=np.int32)[None]
        visible = np.arange(rows)[None] <= place[:, None]
        position = jnp.minimum(token.reshape(-1), tokens - 1)
        return visit(Rows(q, position, chosen, visible[None, :, None], kept_lse))

    found = jnp.swapaxes(jax.lax.map(some, (place, *pieces)), 0, 1)
    return found.reshape(batch, -1, *found.shape[3:])


def _pieces(x: Array, size: int, count: int) -> Array:
    """[B, T, ...] -> [count, B, size, ...], filled up with the last of it."""
    short = count * size - x.shape[1]
    filled = jnp.pad(x, ((0, 0), (0, short)) + ((0, 0),) * (x.ndim - 2), mode="edge")
    return jnp.swapaxes(filled.reshape(x.shape[0], count, size, *x.shape[2:]), 0, 1)


def log_sum(weights: Float[Array, "... Nk"], where: Bool[Array, "... Nk"]) -> Float[Array, "..."]:
    """Of log-weights; -inf where there are none."""
    return jax.nn.logsumexp(jnp.where(where, weights, -jnp.inf), axis=-1)


def share(odds: Float[Array, "..."]) -> Float[Array, "..."]:
    """`e^x / (1 + e^x)`, with all digits of small shares."""
    small = jnp.exp(-jnp.abs(odds))
    return jnp.where(odds > 0, 1, small) / (1 + small)


def rounded_up(shares: Float[Array, "..."], dropped: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computed shares as upper bounds that are such after their own rounding.

    Args:
        shares: nan where a logit left the range of floats; nothing is proved there, hence 1.
        dropped: log of the dropped weights, -inf where there are none, hence 0.
    """
    kind = jnp.finfo(shares.dtype)
    up = jnp.clip(shares * (1 + 8 * float(kind.eps)), float(kind.tiny), 1)
    return jnp.where(dropped == -jnp.inf, 0, jnp.where(jnp.isnan(up), 1, up))


def rounding(
    q: Float[Array, "B S Hq D"], reach: Float[Array, "B Hk"], *, block: int, tokens: int
) -> Float[Array, "B S Hq"]:
    """How much computed log-odds of dropped and kept mass may be too small, at most.

    Args:
        q: queries times the scale.
        reach: at least the length of any key, and of any vector of their components' extremes.
        block: keys of a block.
        tokens: keys of the sequence.
    """
    # With u the unit roundoff, X = |q| reach and any order of summation (Higham's gamma_n):
    # - A logit of a kernel is off by at most (D + 8) u X: the scale, D products and D sums, the
    #   distance to a peak, and what rescaling to higher peaks adds up to, as peaks only rise.
    # - A bound on logits is off by at most (3 D + 40) u X: a product of D or 2 D components, or
    #   one of lengths, each of which is a root of D squares.
    # - tanh of a softcap, and log-sum-exp over runs and blocks, add less than 40 u X.
    # - A sum of positive terms is off by a factor (1 + u)^n at most, n being how many additions
    #   and rescalings a term goes through: those of its block, and a few for each block.
    # - exp and log are within 2^8 u on every device that we know of.
    dim, dtype = q.shape[-1], q.dtype
    unit = float(jnp.finfo(dtype).eps) / 2
    sums = block + 16 * blocks_of(tokens, block) + 2**10
    reach = jnp.repeat(reach, q.shape[2] // reach.shape[1], axis=1)
    return unit * (8 * (dim + 16) * length(q) * reach[:, None] + sums)


def length(x: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Euclidean, without squares that leave the range of floats."""
    largest = jnp.abs(x).max(-1, keepdims=True)
    safe = jnp.where(largest > 0, largest, 1)
    # A division may be done by a reciprocal, and that of a huge number is flushed to zero.
    less = jnp.where(safe > 1, 1 / 16, 1).astype(x.dtype)
    return safe[..., 0] * jnp.sqrt(jnp.square(x * less / (safe * less)).sum(-1))


def reach_of(k: Float[Array, "B T Hk D"]) -> Float[Array, "B Hk"]:
    """See `rounding`."""
    return length(jnp.abs(k).max(1))


def extended(
    rows: Rows,
    weights: Float[Array, "B S Hq Nk"],
    share_of: Callable[[Float[Array, "B S Hq Nk"]], Float[Array, "B S Hq Nk"]],
    eps: float | Float[Array, ""],
    *,
    promise: Promise,
    tokens: int,
) -> Bool[Array, "B R Hq Nk"]:
    """The chosen blocks and the fewest others, heaviest first, after which the promise holds.

    Args:
        rows: with the blocks that are chosen already.
        weights: log-weights of blocks, or upper bounds on them, relative to what is kept.
        share_of: the share that is dropped, from the log of the weights that are.
        eps: largest share that may be dropped.
        promise: by whom.
        tokens: queries that there are; others are copies.
    """
    loose = rows.visible & ~rows.chosen
    weights = weights.reshape(weights.shape[0], -1, rows.block, *weights.shape[2:])  # B R b Hq Nk
    # -inf is for blocks that are not dropped; every query of a row sees something of the others.
    weights = jnp.maximum(weights, jnp.finfo(weights.dtype).min)
    weights = jnp.where(loose[:, :, None], weights, -jnp.inf)
    if promise == Promise.EVERY_QUERY:
        heaviness = weights.max(2)
    else:
        heaviness = jax.nn.logsumexp(weights, axis=2)
    order = jnp.argsort(jnp.where(loose, heaviness, -jnp.inf), axis=-1, descending=True)
    ordered = jnp.take_along_axis(weights, order[:, :, None], axis=-1)
    # At n: what is dropped once the n heaviest blocks are added; nothing is once all are.
    left = jax.lax.cumlogsumexp(ordered, axis=4, reverse=True)
    shares = share_of(left.reshape(rows.q.shape[0], -1, *left.shape[3:])).reshape(left.shape)
    shares = rounded_up(shares, left)
    suffices = _suffices(shares, eps, promise, rows.position, tokens)
    count = jnp.where(suffices.any(-1), suffices.argmax(-1), suffices.shape[-1])
    rank = jnp.argsort(order, axis=-1)
    return rows.chosen | (loose & (rank < count[..., None]))


def _suffices(
    shares: Float[Array, "B R b Hq Nk"],
    eps: float | Float[Array, ""],
    promise: Promise,
    position: Int[Array, " S"],
    tokens: int,
) -> Bool[Array, "B R Hq Nk"]:
    """Whether the promise holds in a row; sums and `eps` itself are rounded to the safe side."""
    block, unit = shares.shape[2], float(jnp.finfo(shares.dtype).eps)
    if promise == Promise.EVERY_QUERY:
        return (jnp.minimum(shares * (1 + unit), 1) <= eps).all(2)
    real = position.reshape(-1, block)[:, :1] + np.arange(block, dtype=np.int32)[None] < tokens
    count = real.sum(1)[None, :, None, None]
    total = jnp.where(real[None, :, :, None, None], shares, 0).sum(2)
    return jnp.minimum(total * (1 + (block + 8) * unit), count) <= eps * count


def require(
    q, k, chosen, *, block: int, softcap: float | None = None, eps: float | None = None
) -> None:
    """Raise unless the arguments describe a choice of blocks of causal self-attention."""
    n = blocks_of(q.shape[1], block)
    if q.shape[1] != k.shape[1] or chosen.shape != (q.shape[0], q.shape[2], n, n):
        raise ShapeError(
            "the choice does not fit the queries and keys",
            got=f"chosen {chosen.shape}, q {q.shape}, k {k.shape}, {block=}",
            expected=f"as many keys as queries, and chosen {(q.shape[0], q.shape[2], n, n)}",
        )
    if softcap is not None and not softcap > 0:
        raise ArgumentError(
            "softcap must be positive", got=softcap, expected="a number above 0 or None"
        )
    if eps is not None and not 0 < eps <= 1:
        raise ArgumentError("eps is no share", got=repr(eps), expected="0 < .. <= 1")
