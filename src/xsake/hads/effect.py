"""What a head's skipped blocks do to a model's predictions, to second order, by its own slopes.

Skipping changes the output of a head for query i by `e_i`. With `g_i` the slope of the
log-probability of tokens that the model itself draws, KL(dense || sparse) of its predictions is
`1/2 sum_i E[(g_i . e_i)^2]` to second order, other heads and cross terms aside. Both products need
one number per query and block, `g . sum_j p_j v_j`: no choice of blocks has to be run.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.hads.budget import AlwaysOn
from xsake.hads.fit import LEAST_MASS
from xsake.hads.measure import Call, read
from xsake.hads.selectors import Look, Selector, mixed
from xsake.layout.grid import blocks_of

QUERIES = 64  # whose weights exist at once; more would not stay in the cache
STRETCHES = 4  # of a document: queries of one look at equally many keys
HIDDEN = -1e30  # the score of a key that is not seen

Tap = Callable[[Array, Array, Array, Array, Call, Any], Array]
"""`tap(out, q, k, v, call, zeros)`: the output of a layer's attention that the model goes on with.

The gradient by `zeros`, [layers, ...] arrays, is whatever the tap makes it."""

Slopes = Callable[[Int[Array, "B T"], Int[Array, " B"], Tap, Any], Any]
"""`slopes(tokens, seeds, tap, zeros)`: gradient by `zeros` of the log-probability of tokens that
the model draws, one after each token, by the seed of each document."""


def tap_effects(
    selectors: Mapping[str, Selector],
    weights: Mapping[str, Float[np.ndarray, "L Hq 3"]],
    components: Int[np.ndarray, "L Hk D"],
    block: int,
    always: AlwaysOn,
) -> Tap:
    """A `Tap` whose gradient is the effect of each head, by selector and blocks per row.

    Args:
        selectors: choose the blocks, by name.
        weights: corrections of their estimates.
        components: of queries and keys, those first that move scores most.
        block: tokens of a query block and of a kv block.
        always: kept in any case.
    """
    corrections = {name: jnp.asarray(each, jnp.float32) for name, each in weights.items()}
    ordered = jnp.asarray(components)

    def effects(q, k, v, layer, slope, look: Look):
        found = {}
        for name, selector in selectors.items():
            estimate = selector.masses(q, k, look, read(selector, ordered[layer]))
            order = _order(mixed(estimate, corrections[name][layer]), always)
            found[name] = head_effects(q, k, v, slope, order, look, always)
        return found

    def tap(out, q, k, v, call: Call, zeros):
        look = Look(block, call.scale, call.mask, call.softcap)

        @jax.custom_vjp
        def through(out, q, k, v, layer, zeros):
            return out

        def forward(out, q, k, v, layer, zeros):
            return out, (q, k, v, layer)

        def backward(kept, slope):
            q, k, v, layer = kept
            nothing = (jnp.zeros_like(x) for x in (q, k, v))
            return slope, *nothing, None, effects(q, k, v, layer, slope, look)

        through.defvjp(forward, backward)
        own = {name: each[call.layer] for name, each in zeros.items()}
        return through(out, q, k, v, jnp.asarray(call.layer), own)

    return tap


def head_effects(
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hk D"],
    v: Float[Array, "B T Hk D"],
    slope: Float[Array, "B T Hq D"],
    order: Int[Array, "B Hq Nq Nk"],
    look: Look,
    always: AlwaysOn,
) -> Float[Array, "B Hq levels"]:
    """Nats per token of KL that heads cause alone which keep max(always-on, k) blocks, k in 0..n.

    Args:
        q: queries as they enter the scores.
        k: keys, likewise.
        v: values.
        slope: of the predictions, by the attention's output.
        order: of each row's blocks, those first that are kept first.
        look: how queries see keys.
        always: kept in any case.
    """
    tokens, n = q.shape[1], order.shape[-1]
    rows = max(QUERIES // look.block, 1)
    size = rows * look.block
    chunks = blocks_of(tokens, size)
    cut = lambda x: jnp.moveaxis(_padded(x, chunks * size).reshape(
        x.shape[0], chunks, size, *x.shape[2:]), 1, 0)  # fmt: skip
    order = jnp.pad(order, ((0, 0), (0, 0), (0, chunks * rows - n), (0, 0)))
    order = jnp.moveaxis(order.reshape(*order.shape[:2], chunks, rows, n), 2, 0)
    parts = jnp.arange(chunks), cut(q), cut(slope), order
    keys, values = (_padded(x, chunks * size) for x in (k, v))

    def changes(part, blocks: int):
        number, q, slope, order = part
        seen = keys[:, : blocks * look.block], values[:, : blocks * look.block]
        masses, moves = _by_block(q, *seen, slope, number * size, tokens, look)
        spare = ((0, 0),) * 4 + ((0, max(n - blocks, 0)),)
        picked = jnp.broadcast_to(order[:, :, :, None], (*masses.shape[:4], n))
        kept, moved = (
            jnp.cumsum(jnp.take_along_axis(jnp.pad(x, spare), picked, axis=-1), axis=-1)
            for x in (masses, moves)
        )
        change = moved / jnp.maximum(kept, LEAST_MASS) - moved[..., -1:]
        return jnp.square(change).sum(3)  # [B, Hq, rows, blocks kept - 1]

    found = []
    for first, last in _stretches(chunks):  # no query sees a block after its own
        of_these = jax.tree.map(lambda x, a=first, b=last: x[a:b], parts)
        found.append(jax.lax.map(lambda part, b=last * rows: changes(part, b), of_these))
    joined = jnp.moveaxis(jnp.concatenate(found), 0, 2)
    joined = joined.reshape(*joined.shape[:2], chunks * rows, n)[:, :, :n]
    levels = np.maximum(np.arange(n + 1)[None], always.counts(n)[:, None]) - 1
    levels = np.broadcast_to(levels, (*joined.shape[:2], *levels.shape))
    return jnp.take_along_axis(joined, levels, axis=-1).sum(2) / (2 * tokens)


def _stretches(chunks: int) -> list[tuple[int, int]]:
    """Runs of chunks that look at equally many keys: each is a program of its own, so few."""
    bounds = sorted({chunks * part // STRETCHES for part in range(STRETCHES + 1)})
    return list(itertools.pairwise(bounds))


def _by_block(q, k, v, slope, start, tokens: int, look: Look):
    """Masses of blocks, and how far each moves the predictions: [B, Hq, rows, block, Nk] each."""
    batch, queries, heads, dim = q.shape
    group = heads // k.shape[2]
    grouped = lambda x: x.reshape(batch, queries, -1, group, dim).astype(jnp.float32)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped(q) * look.scale, k.astype(jnp.float32))
    if look.softcap is not None:
        scores = look.softcap * jnp.tanh(scores / look.softcap)
    scores = scores.reshape(batch, heads, queries, -1)
    q_pos = start + jnp.arange(queries, dtype=jnp.int32)[None, :, None]
    kv_pos = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None]
    which = None
    if look.mask.heads is not None:
        which = (np.arange(heads, dtype=np.int32) * look.mask.heads // heads)[:, None, None]
    seen = look.mask.allows(q_pos, kv_pos, which) & (kv_pos < tokens) & (q_pos < tokens)
    scores = jnp.where(seen[None], scores, HIDDEN)
    peak = jnp.maximum(scores.max(-1, keepdims=True), HIDDEN / 2)
    weights = jnp.exp(scores - peak)
    pull = jnp.einsum("bqhgd,bkhd->bhgqk", grouped(slope), v.astype(jnp.float32))
    cut = lambda x: x.reshape(batch, heads, -1, look.block, k.shape[1] // look.block, look.block)
    masses, moves = cut(weights).sum(-1), cut(weights * pull.reshape(weights.shape)).sum(-1)
    share = 1 / jnp.maximum(masses.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return masses * share, moves * share


def _order(masses: Float[Array, "B Hq Nq Nk"], always: AlwaysOn) -> Int[Array, "B Hq Nq Nk"]:
    """Blocks of each row, always-on ones first, then the heaviest, hidden ones last."""
    n = masses.shape[-1]
    ranked = jnp.where(np.tri(n, dtype=bool), jnp.maximum(masses, 0), -1)
    return jnp.argsort(-jnp.where(always.grid(n), jnp.inf, ranked), axis=-1, stable=True)


def _padded(x: Float[Array, "B T *rest"], tokens: int) -> Float[Array, "B padded *rest"]:
    return jnp.pad(x, ((0, 0), (0, tokens - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
