"""Dropped mass of a choice of blocks, and the fewest blocks that reduce it to a limit."""

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.errors import ArgumentError, ShapeError
from xsake.layout.grid import count_blocks

_CHUNK_VALUES = 2**20  # values per chunk of rows; a chunk has at least one row


class BoundScope(enum.StrEnum):
    """Unit whose dropped mass is limited."""

    EVERY_QUERY = "every query"
    ROW_MEAN = "row mean"  # mean over the queries of a row


class RowChunk(NamedTuple):
    """A chunk of block rows. The last row is padded with copies of the last query."""

    q: Float[Array, "B S Hq D"]
    position: Int[Array, " S"]
    chosen: Bool[Array, "B R Hq Nk"]
    visible: Bool[Array, "1 R 1 Nk"]
    kept_lse: Float[Array, "B S Hq"]  # 0 by default

    @property
    def block(self) -> int:
        """Queries of a row."""
        return self.q.shape[1] // self.chosen.shape[1]

    def chosen_by_query(self) -> Bool[Array, "B S Hq Nk"]:
        """Return the choice of each query, equal to that of its row."""
        return jnp.repeat(self.chosen, self.block, axis=1)


def map_rows(
    visit: Callable[[RowChunk], Float[Array, "B S Hq"] | Bool[Array, "B R Hq Nk"]],
    q: Float[Array, "B T Hq D"],
    chosen: Bool[Array, "B Hq Nq Nk"],
    *,
    block: int,
    columns: int,
    kept_lse: Float[Array, "B T Hq"] | None = None,
) -> Array:
    """Apply `visit` to chunks of rows, so that memory does not grow with T^2.

    Args:
        visit: from a chunk of rows to an array with queries or rows along axis 1.
        q: queries.
        chosen: blocks of each row.
        block: queries of a row, keys of a block.
        columns: values per query inside `visit`, for the chunk size.
        kept_lse: of queries, passed to `visit`.
    """
    batch, tokens, heads, _ = q.shape
    rows = chosen.shape[2]
    rows_per_chunk = max(1, _CHUNK_VALUES // (batch * heads * block * columns))
    count = count_blocks(rows, rows_per_chunk)
    size = count_blocks(rows, count)
    kept_lse = jnp.zeros(q.shape[:3], jnp.float32) if kept_lse is None else kept_lse
    number = jnp.arange(count * size, dtype=jnp.int32).reshape(count, size)
    arrays = (q, size * block), (jnp.swapaxes(chosen, 1, 2), size), (kept_lse, size * block)
    chunks = (_split_chunks(x, each, count) for x, each in arrays)

    def visit_chunk(chunk):
        number, q, chosen, kept_lse = chunk
        token = number[:, None] * block + np.arange(block, dtype=np.int32)[None]
        visible = np.arange(rows)[None] <= number[:, None]
        position = jnp.minimum(token.reshape(-1), tokens - 1)
        return visit(RowChunk(q, position, chosen, visible[None, :, None], kept_lse))

    result = jnp.swapaxes(jax.lax.map(visit_chunk, (number, *chunks)), 0, 1)
    return result.reshape(batch, -1, *result.shape[3:])


def _split_chunks(x: Array, size: int, count: int) -> Array:
    """Split [B, T, ...] into [count, B, size, ...], padded with its last entry."""
    missing = count * size - x.shape[1]
    padded = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2), mode="edge")
    return jnp.swapaxes(padded.reshape(x.shape[0], count, size, *x.shape[2:]), 0, 1)


def log_sum(weights: Float[Array, "... Nk"], where: Bool[Array, "... Nk"]) -> Float[Array, "..."]:
    """Return the log-sum-exp over selected blocks; -inf if there are none."""
    return jax.nn.logsumexp(jnp.where(where, weights, -jnp.inf), axis=-1)


def share(odds: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `e^x / (1 + e^x)`, accurate for small shares."""
    small = jnp.exp(-jnp.abs(odds))
    return jnp.where(odds > 0, 1, small) / (1 + small)


def round_up(shares: Float[Array, "..."], dropped: Float[Array, "..."]) -> Float[Array, "..."]:
    """Round shares up so that they stay valid upper bounds.

    Args:
        shares: nan after an overflow, which becomes 1.
        dropped: log of the dropped weights; -inf without any, which gives 0.
    """
    info = jnp.finfo(shares.dtype)
    up = jnp.clip(shares * (1 + 8 * float(info.eps)), float(info.tiny), 1)
    return jnp.where(dropped == -jnp.inf, 0, jnp.where(jnp.isnan(up), 1, up))


def rounding(
    q: Float[Array, "B S Hq D"], reach: Float[Array, "B Hk"], *, block: int, tokens: int
) -> Float[Array, "B S Hq"]:
    """Return an upper bound on the rounding error of computed log-odds of dropped and kept mass.

    Args:
        q: queries times the scale.
        reach: upper bound on the norm of keys and of vectors of their components' extremes.
        block: keys of a block.
        tokens: keys of the sequence.
    """
    # With u the unit roundoff, X = |q| reach and any order of summation (Higham's gamma_n):
    # - The error of a kernel's logit is at most (D + 8) u X: the scale, D products and D sums, the
    #   distance to the running max, and all rescaling steps, as the max never falls.
    # - The error of a bound on logits is at most (3 D + 40) u X: a product of D or 2 D components,
    #   or one of norms, each a root of D squares.
    # - tanh of a softcap, and log-sum-exp over runs and blocks, add less than 40 u X.
    # - The error factor of a sum of positive terms is at most (1 + u)^n, with n additions and
    #   rescalings per term: those of its block, and a few for each block.
    # - exp and log are within 2^8 u on all supported devices.
    dim, dtype = q.shape[-1], q.dtype
    unit = float(jnp.finfo(dtype).eps) / 2
    sums = block + 16 * count_blocks(tokens, block) + 2**10
    reach = jnp.repeat(reach, q.shape[2] // reach.shape[1], axis=1)
    return unit * (8 * (dim + 16) * length(q) * reach[:, None] + sums)


def length(x: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Return the Euclidean norm without overflow of the squares."""
    largest = jnp.abs(x).max(-1, keepdims=True)
    safe = jnp.where(largest > 0, largest, 1)
    # XLA may divide by multiplying with a reciprocal, which underflows for huge numbers.
    factor = jnp.where(safe > 1, 1 / 16, 1).astype(x.dtype)
    return safe[..., 0] * jnp.sqrt(jnp.square(x * factor / (safe * factor)).sum(-1))


def key_reach(k: Float[Array, "B T Hk D"]) -> Float[Array, "B Hk"]:
    """Return the argument `reach` of `rounding`."""
    return length(jnp.abs(k).max(1))


def extend_choice(
    rows: RowChunk,
    weights: Float[Array, "B S Hq Nk"],
    share: Callable[[Float[Array, "B S Hq Nk"]], Float[Array, "B S Hq Nk"]],
    eps: float | Float[Array, ""],
    *,
    scope: BoundScope,
    tokens: int,
) -> Bool[Array, "B R Hq Nk"]:
    """Add the fewest blocks, heaviest first, after which the dropped share is at most `eps`.

    Args:
        rows: with the blocks that are chosen already.
        weights: log-weights of blocks, or upper bounds on them, relative to the kept weight.
        share: from the log of the dropped weight to the dropped share.
        eps: maximum dropped share.
        scope: unit whose dropped mass is limited.
        tokens: number of queries; further ones are padding.
    """
    loose = rows.visible & ~rows.chosen
    weights = weights.reshape(weights.shape[0], -1, rows.block, *weights.shape[2:])  # B R b Hq Nk
    # -inf marks blocks that are not dropped.
    weights = jnp.maximum(weights, jnp.finfo(weights.dtype).min)
    weights = jnp.where(loose[:, :, None], weights, -jnp.inf)
    if scope == BoundScope.EVERY_QUERY:
        heaviest = weights.max(2)
    else:
        heaviest = jax.nn.logsumexp(weights, axis=2)
    order = jnp.argsort(jnp.where(loose, heaviest, -jnp.inf), axis=-1, descending=True)
    ordered = jnp.take_along_axis(weights, order[:, :, None], axis=-1)
    # At n: log of the dropped weight after adding the n heaviest blocks.
    rest = jax.lax.cumlogsumexp(ordered, axis=4, reverse=True)
    shares = share(rest.reshape(rows.q.shape[0], -1, *rest.shape[3:])).reshape(rest.shape)
    shares = round_up(shares, rest)
    is_within = _is_within(shares, eps, scope, rows.position, tokens)
    count = jnp.where(is_within.any(-1), is_within.argmax(-1), is_within.shape[-1])
    rank = jnp.argsort(order, axis=-1)
    return rows.chosen | (loose & (rank < count[..., None]))


def _is_within(
    shares: Float[Array, "B R b Hq Nk"],
    eps: float | Float[Array, ""],
    scope: BoundScope,
    position: Int[Array, " S"],
    tokens: int,
) -> Bool[Array, "B R Hq Nk"]:
    """Return whether the limit holds in a row, with sums rounded up."""
    block, unit = shares.shape[2], float(jnp.finfo(shares.dtype).eps)
    if scope == BoundScope.EVERY_QUERY:
        return (jnp.minimum(shares * (1 + unit), 1) <= eps).all(2)
    offset = np.arange(block, dtype=np.int32)[None]
    is_token = position.reshape(-1, block)[:, :1] + offset < tokens
    count = is_token.sum(1)[None, :, None, None]
    total = jnp.where(is_token[None, :, :, None, None], shares, 0).sum(2)
    return jnp.minimum(total * (1 + (block + 8) * unit), count) <= eps * count


def validate_choice(
    q, k, chosen, *, block: int, softcap: float | None = None, eps: float | None = None
) -> None:
    """Raise unless the shapes are those of a block choice for causal self-attention."""
    n = count_blocks(q.shape[1], block)
    if q.shape[1] != k.shape[1] or chosen.shape != (q.shape[0], q.shape[2], n, n):
        raise ShapeError(
            "shapes of chosen, q and k do not match",
            got=f"chosen {chosen.shape}, q {q.shape}, k {k.shape}, {block=}",
            expected=f"equal numbers of queries and keys, chosen {(q.shape[0], q.shape[2], n, n)}",
        )
    if softcap is not None and not softcap > 0:
        raise ArgumentError(
            "softcap must be positive", got=softcap, expected="a number above 0 or None"
        )
    if eps is not None and not 0 < eps <= 1:
        raise ArgumentError("eps is out of range", got=repr(eps), expected="0 < .. <= 1")
