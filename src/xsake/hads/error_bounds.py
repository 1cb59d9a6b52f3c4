"""Dropped attention mass of a choice of blocks: exact, proved bounds, choices within a limit."""

import enum
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.attention import attention
from xsake.errors import ArgumentError, ShapeError
from xsake.hads.selectors.base import group_heads, split_blocks
from xsake.kernels.statistics import block_statistics
from xsake.layout import BlockLayout
from xsake.layout.grid import count_blocks
from xsake.masks import Causal

Queries = Float[Array | np.ndarray, "B T Hq D"]
Keys = Float[Array | np.ndarray, "B T Hk D"]
Choice = Bool[Array | np.ndarray, "B Hq Nq Nk"]

CHUNK_VALUES = 2**20  # values per chunk of rows; a chunk has at least one row


class BoundScope(enum.StrEnum):
    """Unit whose dropped mass is limited."""

    EVERY_QUERY = "every query"
    ROW_MEAN = "row mean"  # mean over the queries of a row


class BoundKind(enum.StrEnum):
    """Bound on the logits of a run of keys."""

    BOX = "box"  # componentwise minimum and maximum
    BALL = "ball"  # mean key and radius
    BOTH = "both"  # the smaller of the two bounds


# Exact dropped mass


class Audit(NamedTuple):
    """Dropped mass of every query; `odds` is log(dropped / kept), -inf if nothing is dropped."""

    odds: Float[Array, "B T Hq"]

    @property
    def mass(self) -> Float[Array, "B T Hq"]:
        """Dropped share of the dense attention."""
        return _share(self.odds)

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
    q: Queries, k: Keys, chosen: Choice, *, block: int, scale: float, softcap: float | None = None
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
    config = _Config(block, float(scale), softcap, run=block)
    return Audit(_audit(*_validate(q, k, chosen, config), config))


def audited_choice(
    q: Queries,
    k: Keys,
    chosen: Choice,
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
    config = _Config(block, float(scale), softcap, run=block)
    return _choice(*_validate(q, k, chosen, config, eps), None, eps, config, scope)


# Proved bounds


class BlockBounds(NamedTuple):
    """Bounding box and ball of each run of keys; a run is a part of one block."""

    low: Float[Array, "B runs Hk D"]
    high: Float[Array, "B runs Hk D"]
    centre: Float[Array, "B runs Hk D"]
    radius: Float[Array, "B runs Hk"]  # of the ball around the centre

    @classmethod
    def of(cls, k: Float[Array, "B T Hk D"], run: int = 16) -> "BlockBounds":
        """Compute the bounds of every `run` keys, in float32 or wider; the last may be shorter."""
        keys = split_blocks(_widen(k), run)
        # Rounding of the centre is harmless: the radius is that of the computed centre.
        centre = keys.mean(2)
        return cls(keys.min(2), keys.max(2), centre, norm(keys - centre[:, :, None]).max(2))

    def upper(
        self, q: Float[Array, "B S Hq D"], kind: BoundKind = BoundKind.BOTH
    ) -> Float[Array, "B S Hq runs"]:
        """Return an upper bound on `q.k` for the keys of each run, up to `rounding`.

        It is inf where an intermediate result overflows. `q` are queries times the scale.

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
            bounds.append(product(by_group, self.centre) + norm(by_group)[..., None] * radius)
        # Overflow gives nan, or inf of either sign, depending on the order of the sum.
        valid = (jnp.where(jnp.isfinite(x), x, jnp.inf) for x in bounds)
        return functools.reduce(jnp.minimum, valid).reshape(*q.shape[:3], -1)


def dropped_bound(
    q: Queries,
    k: Keys,
    chosen: Choice,
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
    they are not, and most bounds are close to 1: see `audit`.

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
    config = _Config(block, float(scale), softcap, run, kind)
    arrays = _validate(q, k, chosen, config)
    return _bound(*arrays, _kept_lse(kept_lse, *arrays, config), config)


def kl_bound(mass: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Return the upper bound on KL(sparse || dense) for an upper bound on the dropped mass."""
    return -jnp.log1p(-mass)


def bounded_choice(
    q: Queries,
    k: Keys,
    chosen: Choice,
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
    config = _Config(block, float(scale), softcap, run)
    arrays = _validate(q, k, chosen, config, eps)
    return _choice(*arrays, _kept_lse(kept_lse, *arrays, config), eps, config, scope)


# Compiled functions


class _Config(NamedTuple):
    block: int
    scale: float
    softcap: float | None
    run: int
    kind: BoundKind = BoundKind.BOTH


def _validate(
    q, k, chosen, config: _Config, eps: float | None = None
) -> tuple[Array, Array, Array]:
    """Return the arrays without gradients; raise unless they fit causal self-attention."""
    q, k, chosen = map(jnp.asarray, jax.lax.stop_gradient((q, k, chosen)))
    block, softcap, run = config.block, config.softcap, config.run
    n = count_blocks(q.shape[1], block)
    if q.shape[1] != k.shape[1] or chosen.shape != (q.shape[0], q.shape[2], n, n):
        raise ShapeError(
            "bound-shapes",
            "shapes of chosen, q and k do not match",
            got=f"chosen {chosen.shape}, q {q.shape}, k {k.shape}, {block=}",
            expected=f"equal numbers of queries and keys, chosen {(q.shape[0], q.shape[2], n, n)}",
        )
    if softcap is not None and not softcap > 0:
        expected = "a number above 0 or None"
        raise ArgumentError(
            "bound-softcap", "softcap must be positive", got=softcap, expected=expected
        )
    if eps is not None and not 0 < eps <= 1:
        raise ArgumentError(
            "bound-eps", "eps is out of range", got=repr(eps), expected="0 < .. <= 1"
        )
    if run < 1 or block % run:
        expected = f"a divisor of {block=}"
        raise ArgumentError(
            "bound-run", "a run of keys must divide the block", got=f"{run=}", expected=expected
        )
    return q, k, chosen


@functools.partial(jax.jit, static_argnames="config")
def _audit(q, k, chosen, config: _Config) -> Float[Array, "B T Hq"]:
    def visit(rows: RowChunk):
        weights, kept = _statistics(rows, k, config).block_lse, rows.chosen_by_query()
        return _log_sum(weights, ~kept) - _log_sum(weights, kept)

    return map_rows(visit, q, chosen, config.block, chosen.shape[-1])[:, : q.shape[1]]


@functools.partial(jax.jit, static_argnames="config")
def _bound(q, k, chosen, kept_lse, config: _Config) -> Float[Array, "B T Hq"]:
    bounds, reach = BlockBounds.of(k, config.run), key_reach(_widen(k))

    def visit(rows: RowChunk):
        log_dropped = _log_sum(_bound_weights(rows, bounds, config), ~rows.chosen_by_query())
        slack = rounding(_scale(rows.q, config), reach, block=config.block, tokens=q.shape[1])
        return _round_up(_share(log_dropped - rows.kept_lse + slack), log_dropped)

    columns = bounds.low.shape[1]
    return map_rows(visit, q, chosen, config.block, columns, kept_lse)[:, : q.shape[1]]


@functools.partial(jax.jit, static_argnames=("config", "scope"))
def _choice(q, k, chosen, kept_lse, eps, config: _Config, scope: BoundScope) -> Array:
    """Return the extended choice, by bounds relative to `kept_lse`, or exact if that is None."""
    is_exact, reach = kept_lse is None, key_reach(_widen(k))
    bounds = None if is_exact else BlockBounds.of(k, config.run)

    def visit(rows: RowChunk):
        slack = rounding(_scale(rows.q, config), reach, block=config.block, tokens=q.shape[1])
        if bounds is None:
            statistics = _statistics(rows, k, config)
            weights = statistics.block_lse - statistics.lse[..., None]
        else:
            weights = _bound_weights(rows, bounds, config) - rows.kept_lse[..., None]
        to_share = lambda logs: (jnp.exp if is_exact else _share)(logs + slack[..., None])
        return _extend_choice(rows, weights, to_share, eps, scope=scope, tokens=q.shape[1])

    columns = chosen.shape[-1] if bounds is None else bounds.low.shape[1]
    extended = map_rows(visit, q, chosen, config.block, columns, kept_lse)
    return jnp.swapaxes(extended[:, : chosen.shape[2]], 1, 2)


def _statistics(rows: "RowChunk", k, config: _Config):
    return block_statistics(
        rows.q, k, block_kv=config.block, mask=Causal(), scale=config.scale,
        softcap=config.softcap, q_positions=rows.position,
    )  # fmt: skip


def _bound_weights(rows: "RowChunk", bounds: BlockBounds, config: _Config) -> Array:
    """Return upper bounds on the log softmax weights of blocks, [B, S, Hq, Nk]; masked: -inf."""
    block, _, softcap, run, kind = config
    upper = bounds.upper(_scale(rows.q, config), kind)
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


def _kept_lse(given, q, k, chosen, config: _Config) -> Float[Array, "B T Hq"]:
    if given is None:
        return _compute_lse(q, k, chosen, config)
    return jnp.asarray(given, jnp.promote_types(q.dtype, jnp.float32))


@functools.partial(jax.jit, static_argnames="config")
def _compute_lse(q, k, chosen, config: _Config) -> Float[Array, "B T Hq"]:
    """Return the log-sum-exp of attention over the chosen blocks."""
    tokens, block = q.shape[1], config.block
    layout = BlockLayout.from_block_mask(
        chosen, q_tokens=tokens, kv_tokens=tokens, block_q=block, block_kv=block, mask=Causal()
    )
    return attention(
        q, k, k[..., :1], mask=Causal(), layout=layout,
        scale=config.scale, softcap=config.softcap, return_lse=True,
    )[1]  # fmt: skip


# Rows of blocks


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
    block: int,
    columns: int,
    kept_lse: Float[Array, "B T Hq"] | None = None,
) -> Array:
    """Apply `visit` to chunks of rows, so that memory does not grow with T^2.

    `visit` has `columns` values per query; its result has queries or rows along axis 1.
    """
    batch, tokens, heads, _ = q.shape
    rows = chosen.shape[2]
    count = count_blocks(rows, max(1, CHUNK_VALUES // (batch * heads * block * columns)))
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


def _extend_choice(
    rows: RowChunk, weights, to_share: Callable, eps, *, scope: BoundScope, tokens: int
) -> Bool[Array, "B R Hq Nk"]:
    """Add the fewest blocks, heaviest first, after which the dropped share is at most `eps`.

    `weights` [B, S, Hq, Nk] are log-weights of blocks relative to the kept weight, or upper bounds
    on them; `to_share` maps the log of the dropped weight to the dropped share. Queries from
    `tokens` on are padding.
    """
    loose = rows.visible & ~rows.chosen
    weights = weights.reshape(weights.shape[0], -1, rows.block, *weights.shape[2:])  # B R b Hq Nk
    # -inf marks blocks that are not dropped.
    weights = jnp.maximum(weights, jnp.finfo(weights.dtype).min)
    weights = jnp.where(loose[:, :, None], weights, -jnp.inf)
    is_every = scope == BoundScope.EVERY_QUERY
    heaviest = weights.max(2) if is_every else jax.nn.logsumexp(weights, axis=2)
    order = jnp.argsort(jnp.where(loose, heaviest, -jnp.inf), axis=-1, descending=True)
    ordered = jnp.take_along_axis(weights, order[:, :, None], axis=-1)
    # At n: log of the dropped weight after adding the n heaviest blocks.
    rest = jax.lax.cumlogsumexp(ordered, axis=4, reverse=True)
    shares = to_share(rest.reshape(rows.q.shape[0], -1, *rest.shape[3:])).reshape(rest.shape)
    shares = _round_up(shares, rest)
    is_within = _is_within(shares, eps, scope, rows.position, tokens)
    count = jnp.where(is_within.any(-1), is_within.argmax(-1), is_within.shape[-1])
    rank = jnp.argsort(order, axis=-1)
    return rows.chosen | (loose & (rank < count[..., None]))


def _is_within(shares, eps, scope: BoundScope, position, tokens: int) -> Bool[Array, "B R Hq Nk"]:
    """Return whether the limit holds in a row, with sums rounded up; `shares`: [B R b Hq Nk]."""
    block, unit = shares.shape[2], float(jnp.finfo(shares.dtype).eps)
    if scope == BoundScope.EVERY_QUERY:
        return (jnp.minimum(shares * (1 + unit), 1) <= eps).all(2)
    offset = np.arange(block, dtype=np.int32)[None]
    is_token = position.reshape(-1, block)[:, :1] + offset < tokens
    count = is_token.sum(1)[None, :, None, None]
    total = jnp.where(is_token[None, :, :, None, None], shares, 0).sum(2)
    return jnp.minimum(total * (1 + (block + 8) * unit), count) <= eps * count


# Rounding


def rounding(
    q: Float[Array, "B S Hq D"], reach: Float[Array, "B Hk"], *, block: int, tokens: int
) -> Float[Array, "B S Hq"]:
    """Return an upper bound on the rounding error of computed log-odds of dropped and kept mass.

    `q` are queries times the scale, `reach` is an upper bound on the norm of keys and of vectors of
    their components' extremes.
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
    unit = float(jnp.finfo(q.dtype).eps) / 2
    sums = block + 16 * count_blocks(tokens, block) + 2**10
    reach = jnp.repeat(reach, q.shape[2] // reach.shape[1], axis=1)
    return unit * (8 * (q.shape[-1] + 16) * norm(q) * reach[:, None] + sums)


def key_reach(k: Float[Array, "B T Hk D"]) -> Float[Array, "B Hk"]:
    """Return the argument `reach` of `rounding`."""
    return norm(jnp.abs(k).max(1))


def norm(x: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Return the Euclidean norm without overflow of the squares."""
    largest = jnp.abs(x).max(-1, keepdims=True)
    safe = jnp.where(largest > 0, largest, 1)
    # XLA may divide by multiplying with a reciprocal, which underflows for huge numbers.
    factor = jnp.where(safe > 1, 1 / 16, 1).astype(x.dtype)
    return safe[..., 0] * jnp.sqrt(jnp.square(x * factor / (safe * factor)).sum(-1))


def _round_up(shares: Float[Array, "..."], log_dropped: Float[Array, "..."]) -> Float[Array, "..."]:
    """Round shares up so that they stay valid upper bounds: nan becomes 1, nothing dropped 0."""
    info = jnp.finfo(shares.dtype)
    up = jnp.clip(shares * (1 + 8 * float(info.eps)), float(info.tiny), 1)
    return jnp.where(log_dropped == -jnp.inf, 0, jnp.where(jnp.isnan(up), 1, up))


def _share(odds: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `e^x / (1 + e^x)`, accurate for small shares."""
    small = jnp.exp(-jnp.abs(odds))
    return jnp.where(odds > 0, 1, small) / (1 + small)


def _log_sum(weights: Float[Array, "... Nk"], where: Bool[Array, "... Nk"]) -> Float[Array, "..."]:
    """Return the log-sum-exp over selected blocks; -inf if there are none."""
    return jax.nn.logsumexp(jnp.where(where, weights, -jnp.inf), axis=-1)


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _scale(q: Array, config: _Config) -> Array:
    wide = _widen(q)
    return wide * jnp.asarray(config.scale, wide.dtype)
