"""Compressed attention in plain XLA loops: a chunk of queries against all summaries that it sees.

Summaries are few, so the softmax of a chunk needs no running maximum, and the probabilities that
select blocks are those of the output. Queries are divided into a few spans, each of which reads as
many summaries as its last query sees.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from xsake.kernels import blocking
from xsake.kernels import online_softmax as softmax
from xsake.kernels.block_selection import select_blocks
from xsake.kernels.block_sparse.types import Gradients
from xsake.kernels.compressed import summaries
from xsake.kernels.compressed.types import CompressedConfig, CompressedInputs
from xsake.kernels.online_softmax import isolate_nonfinite, zero_nonfinite
from xsake.kernels.sharding import axes_of, vary


class CompressedTuning(NamedTuple):
    """Tuning of a platform; it changes no result beyond rounding."""

    logits: int  # of a chunk
    queries: int  # fewest of a chunk
    spans: int  # programs of their own, each with its number of summaries


CPU = CompressedTuning(logits=9 * 2**16, queries=32, spans=6)
ACCELERATOR = CompressedTuning(logits=2**24, queries=128, spans=6)


class Span(NamedTuple):
    """Chunks that read the same summaries."""

    first: int  # chunk
    chunks: int
    summaries: int
    blocks: int  # that may be selected


class CompressedCall(NamedTuple):
    """The arrays of a call by kv head (batch times head), queries in chunks."""

    q: Any  # [heads, chunks, chunk * G, D]
    k: Any  # [heads, Nc, D], NaN where the value is not finite
    v: Any  # [heads, Nc, Dv], finite
    position: Any  # [heads or 1, chunks, chunk]; -1 sees nothing
    start: Any  # [heads or 1, chunks, chunk]
    group: int

    @property
    def chunk(self) -> int:
        """Queries of a chunk."""
        return self.q.shape[2] // self.group


def _tuning(platform: str) -> CompressedTuning:
    return CPU if platform == "cpu" else ACCELERATOR


def _cut_call(inputs: CompressedInputs, tuning: CompressedTuning) -> CompressedCall:
    batch, queries, q_heads, _ = inputs.q.shape
    number, heads = inputs.k.shape[1:3]
    chunk = max(tuning.queries, tuning.logits // (batch * q_heads * number))
    chunks = -(-queries // min(chunk, queries))
    chunk = -(-queries // chunks)
    k, v = isolate_nonfinite(*(x.astype(inputs.dtype) for x in inputs[1:3]))

    def by_chunk(x: Array, fill: int) -> Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * chunk - queries)), constant_values=fill)
        x = x if x.shape[0] == 1 else jnp.repeat(x, heads, axis=0)
        return x.reshape(x.shape[0], chunks, chunk)

    position, start = inputs.bounds
    q = _to_chunks(inputs.q.astype(inputs.dtype), heads, chunks, chunk)
    bounds = by_chunk(position, -1), by_chunk(start, 0)
    return CompressedCall(
        q, blocking.by_kv_head(k), blocking.by_kv_head(v), *bounds, q_heads // heads
    )


def _to_chunks(x: Array, heads: int, chunks: int, chunk: int) -> Array:
    """[B, Tq, Hq, dim] as [heads, chunks, chunk * G, dim], zeros after the end."""
    x = blocking.to_chunks(x, heads, chunks, chunk)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _from_chunks(x: Array, like: Array, width: int) -> Array:
    """[chunks, heads, chunk * n, ...] as [B, Tq, `width`, ...], the inverse of `to_chunks`."""
    batch, queries = like.shape[:2]
    chunks, rows, per_chunk, *rest = x.shape
    heads = rows // batch
    x = x.reshape(chunks, batch, heads, per_chunk * heads // width, width // heads, *rest)
    x = jnp.moveaxis(x, (1, 0, 3, 2, 4), (0, 1, 2, 3, 4))
    return x.reshape(batch, -1, width, *rest)[:, :queries]


def _spans(
    inputs: CompressedInputs,
    config: CompressedConfig,
    call: CompressedCall,
    tuning: CompressedTuning,
) -> list[Span]:
    chunks, number = call.q.shape[1], call.k.shape[1]
    blocks = 0 if config.selection is None else config.selection.number
    if inputs.q_positions is not None:
        return [Span(0, chunks, number, blocks)]
    spans, count = [], min(tuning.spans, chunks)
    for turn in range(count):
        first, end = turn * chunks // count, (turn + 1) * chunks // count
        tokens = end * call.chunk
        seen = max(1, (tokens - config.length) // config.stride + 1)
        known = -(-tokens // config.selection.block) if config.selection else 0
        spans.append(Span(first, end - first, min(seen, number), min(known, blocks)))
    return spans


def _scores(
    call: CompressedCall, config: CompressedConfig, span: Span, number: Array
) -> tuple[Array, Array, Array]:
    """Scores of a chunk in base 2, [heads, chunk * G, summaries], -inf for masked pairs."""
    at = lambda x: lax.dynamic_index_in_dim(x, number, 1, keepdims=False)
    factor = softmax.query_factor(config.scale, None)
    q, position, start = at(call.q), at(call.position), at(call.start)
    k = jnp.swapaxes(call.k[:, : span.summaries], 1, 2)
    s = softmax.matmul(q * jnp.asarray(factor, q.dtype), k)
    mask = summaries.visible(position, start, span.summaries, config)
    shape = (*s.shape[:1], call.chunk, call.group, span.summaries)
    mask = jnp.broadcast_to(mask[:, :, None], shape).reshape(s.shape)
    return jnp.where(mask, s, -jnp.inf), position, start


def forward(
    inputs: CompressedInputs, config: CompressedConfig, platform: str
) -> tuple[Array, Array, Array | None]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq], blocks [B, Tq, Hk, Ns] or None)`."""
    tuning = _tuning(platform)
    call, parts = _cut_call(inputs, tuning), []
    for span in _spans(inputs, config, call, tuning):

        def one(number: Array, span: Span = span):
            s, position, start = _scores(call, config, span, number)
            m = s.max(-1)
            p = softmax.probabilities(s, jnp.where(m == -jnp.inf, 0, m)[..., None])
            l = p.sum(-1)
            p = softmax.normalize(p, l[..., None])
            o = softmax.matmul(p, call.v[:, : span.summaries])
            blocks = _select(call, config, span, p, (position, start))
            return o, softmax.log_sum_exp(m, l), blocks

        parts.append(lax.map(one, span.first + jnp.arange(span.chunks)))
    o, lse, blocks = zip(*parts, strict=True)
    join = lambda x, heads: _from_chunks(jnp.concatenate(x), inputs.q, heads)
    q_heads, heads = inputs.q.shape[2], inputs.k.shape[2]
    blocks = None if config.selection is None else join(blocks, heads)
    return join(o, q_heads).astype(inputs.q.dtype), join(lse, q_heads), blocks


def _select(
    call: CompressedCall,
    config: CompressedConfig,
    span: Span,
    p: Array,
    bounds: tuple[Array, Array],
) -> Array | None:
    """The selected blocks of a chunk, [heads, chunk, slots]; None without a selection."""
    if config.selection is None:
        return None
    shared = p.reshape(p.shape[0], call.chunk, call.group, -1).sum(2)
    scores = summaries.block_scores(shared, config, span.blocks)
    position, start = (jnp.broadcast_to(x, scores.shape[:2]) for x in bounds)
    return select_blocks(scores, position, start, config.selection)


def backward(
    inputs: CompressedInputs, config: CompressedConfig, platform: str, *residuals: Array
) -> Gradients:
    """Gradients for q, k and v from (o, lse, do, dlse); the probabilities are recomputed once."""
    o, lse, do, dlse = residuals
    tuning, dtype = _tuning(platform), inputs.dtype
    call = _cut_call(inputs, tuning)
    heads, chunks = inputs.k.shape[2], call.q.shape[1]
    do = do.astype(dtype)
    delta = (do * o.astype(dtype)).sum(-1) - dlse.astype(dtype)
    cut = lambda x: _to_chunks(x, heads, chunks, call.chunk)
    rows = cut(do), cut(softmax.lse_to_base(lse)[..., None]), cut(delta[..., None])
    dk, dv, dq = jnp.zeros_like(call.k), jnp.zeros_like(call.v), []
    over_rows = lambda x, y: jnp.einsum("rmn,rmd->rnd", x, y, precision="highest")
    for span in _spans(inputs, config, call, tuning):
        k, v = call.k[:, : span.summaries], call.v[:, : span.summaries]

        def one(
            sums: tuple[Array, ...], number: Array, span: Span = span, k: Array = k, v: Array = v
        ):
            at = lambda x: lax.dynamic_index_in_dim(x, number, 1, keepdims=False)
            s, _, _ = _scores(call, config, span, number)
            do, lse, delta = map(at, rows)
            p = jnp.where(s == -jnp.inf, 0, softmax.probabilities(s, lse))
            dp = softmax.matmul(do, jnp.swapaxes(v, 1, 2))
            ds = jnp.where(s == -jnp.inf, 0, softmax.score_grad(p, dp, delta, None))
            new = over_rows(ds, zero_nonfinite(at(call.q))), over_rows(p, zero_nonfinite(do))
            sums = tuple(x + y for x, y in zip(sums, new, strict=True))
            return sums, softmax.matmul(ds, zero_nonfinite(k))

        start = vary((jnp.zeros_like(k), jnp.zeros_like(v)), axes_of(inputs.q))
        (dk_span, dv_span), dq_span = lax.scan(one, start, span.first + jnp.arange(span.chunks))
        dk = dk.at[:, : span.summaries].add(dk_span)
        dv = dv.at[:, : span.summaries].add(dv_span)
        dq.append(dq_span)
    dq = _from_chunks(jnp.concatenate(dq), inputs.q, inputs.q.shape[2]) * config.scale
    return Gradients(
        dq.astype(inputs.q.dtype),
        blocking.from_kv_heads(dk * config.scale, inputs.k),
        blocking.from_kv_heads(dv, inputs.v),
    )
