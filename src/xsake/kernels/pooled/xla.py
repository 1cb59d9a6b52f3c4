"""Pooled attention in plain XLA loops: a chunk of queries meets every summary that it may see.

The summaries are few, so a chunk's softmax is whole at once: no running maximum, and the weights
that choose blocks are those of the output. Queries are cut into a few spans, each of which looks
at as many summaries as its last query sees.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xsake.kernels.block_sparse import tiles as softmax
from xsake.kernels.block_sparse.problem import cleaned, quarantine
from xsake.kernels.platforms import by_platform
from xsake.kernels.pooled import choose
from xsake.kernels.pooled.problem import Cotangents, Gradients, Operands, Problem
from xsake.kernels.varying import axes_of, vary


class Tuning(NamedTuple):
    """What suits a platform; it changes no result beyond rounding."""

    logits: int  # of a chunk
    queries: int  # fewest of a chunk
    spans: int  # programs of their own, each with its number of summaries


CPU = Tuning(logits=9 * 2**16, queries=32, spans=6)
ACCELERATOR = Tuning(logits=2**24, queries=128, spans=6)


class Span(NamedTuple):
    """Chunks that look at the same summaries."""

    first: int  # chunk
    chunks: int
    summaries: int
    blocks: int  # that may be chosen


class Call(NamedTuple):
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


def forward(operands: Operands, problem: Problem):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq], blocks [B, Tq, Hk, Ns] or None)`."""
    return _by_platform(_forward, operands, problem)


def backward(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents) -> Gradients:
    """Gradients for q, k and v, recomputing the weights once."""
    return _by_platform(_backward, operands, problem, out, lse, tuple(cotangents))


def _by_platform(run, operands: Operands, problem: Problem, *rest):
    def on(tuning: Tuning):
        return lambda operands, *rest: run(Operands(*operands), problem, tuning, *rest)

    return by_platform({"cpu": on(CPU)}, on(ACCELERATOR), tuple(operands), *rest)


def _prepared(operands: Operands, tuning: Tuning) -> Call:
    batch, queries, q_heads, _ = operands.q.shape
    number, heads = operands.k.shape[1:3]
    chunk = max(tuning.queries, tuning.logits // (batch * q_heads * number))
    chunks = -(-queries // min(chunk, queries))
    chunk = -(-queries // chunks)
    k, v = quarantine(*(x.astype(operands.dtype) for x in operands[1:3]))
    by_head = lambda x: jnp.moveaxis(x, 2, 1).reshape(batch * heads, number, -1)

    def placed(x, fill):
        x = jnp.pad(x, ((0, 0), (0, chunks * chunk - queries)), constant_values=fill)
        x = x if x.shape[0] == 1 else jnp.repeat(x, heads, axis=0)
        return x.reshape(x.shape[0], chunks, chunk)

    position, start = operands.places
    q = in_chunks(operands.q.astype(operands.dtype), heads, chunks, chunk)
    places = placed(position, -1), placed(start, 0)
    return Call(q, by_head(k), by_head(v), *places, q_heads // heads)


def in_chunks(x, heads: int, chunks: int, chunk: int):
    """[B, Tq, Hq, dim] as [heads, chunks, chunk * G, dim], zeros after the end."""
    batch, queries, q_heads, dim = x.shape
    x = jnp.pad(x, ((0, 0), (0, chunks * chunk - queries), (0, 0), (0, 0)))
    x = jnp.moveaxis(x.reshape(batch, chunks * chunk, heads, -1), 2, 1)
    return x.reshape(batch * heads, chunks, chunk * (q_heads // heads), dim)


def _in_order(x, like, width: int):
    """[chunks, heads, chunk * n, ...] as [B, Tq, `width`, ...]: the way back."""
    batch, queries = like.shape[:2]
    chunks, rows, per_chunk, *rest = x.shape
    heads = rows // batch
    x = x.reshape(chunks, batch, heads, per_chunk * heads // width, width // heads, *rest)
    x = jnp.moveaxis(x, (1, 0, 3, 2, 4), (0, 1, 2, 3, 4))
    return x.reshape(batch, -1, width, *rest)[:, :queries]


def _spans(operands: Operands, problem: Problem, call: Call, tuning: Tuning) -> list[Span]:
    chunks, number = call.q.shape[1], call.k.shape[1]
    blocks = 0 if problem.choosing is None else problem.choosing.number
    if operands.q_positions is not None:
        return [Span(0, chunks, number, blocks)]
    spans, count = [], min(tuning.spans, chunks)
    for turn in range(count):
        first, end = turn * chunks // count, (turn + 1) * chunks // count
        tokens = end * call.chunk
        seen = max(1, (tokens - problem.length) // problem.stride + 1)
        known = -(-tokens // problem.choosing.block) if problem.choosing else 0
        spans.append(Span(first, end - first, min(seen, number), min(known, blocks)))
    return spans


def _logits(call: Call, problem: Problem, span: Span, turn):
    """Logits of a chunk in bits, [heads, chunk * G, summaries], -inf where there is no pair."""
    at = lambda x: lax.dynamic_index_in_dim(x, turn, 1, keepdims=False)
    factor = softmax.query_factor(problem.scale, None)
    q, position, start = at(call.q), at(call.position), at(call.start)
    k = jnp.swapaxes(call.k[:, : span.summaries], 1, 2)
    logits = softmax.matmul(q * jnp.asarray(factor, q.dtype), k)
    seen = choose.visible(position, start, span.summaries, problem)
    shape = (*logits.shape[:1], call.chunk, call.group, span.summaries)
    seen = jnp.broadcast_to(seen[:, :, None], shape).reshape(logits.shape)
    return jnp.where(seen, logits, -jnp.inf), position, start


def _forward(operands: Operands, problem: Problem, tuning: Tuning):
    call, found = _prepared(operands, tuning), []
    for span in _spans(operands, problem, call, tuning):

        def one(turn, span=span):
            logits, position, start = _logits(call, problem, span, turn)
            peak = logits.max(-1)
            weight = softmax.weights(logits, jnp.where(peak == -jnp.inf, 0, peak)[..., None])
            mass = weight.sum(-1)
            weight = softmax.normalised(weight, mass[..., None])
            out = softmax.matmul(weight, call.v[:, : span.summaries])
            lse = softmax.log_sum_exp(peak, mass)
            return out, lse, _blocks(call, problem, span, weight, (position, start))

        found.append(lax.map(one, span.first + jnp.arange(span.chunks)))
    joined = [None if x[0] is None else jnp.concatenate(x) for x in zip(*found, strict=True)]
    q_heads, heads = operands.q.shape[2], operands.k.shape[2]
    out, lse = (_in_order(x, operands.q, q_heads) for x in joined[:2])
    blocks = None if joined[2] is None else _in_order(joined[2], operands.q, heads)
    return out.astype(operands.q.dtype), lse, blocks


def _blocks(call: Call, problem: Problem, span: Span, weight, places):
    """The chosen blocks of a chunk, [heads, chunk, slots]; None if none are asked for."""
    if problem.choosing is None:
        return None
    shared = weight.reshape(weight.shape[0], call.chunk, call.group, -1).sum(2)
    scores = choose.block_scores(shared, problem, span.blocks)
    position, start = (jnp.broadcast_to(x, scores.shape[:2]) for x in places)
    return choose.chosen(scores, position, start, problem.choosing)


def _backward(operands, problem: Problem, tuning: Tuning, out, lse, cotangents) -> Gradients:
    call, dtype = _prepared(operands, tuning), operands.dtype
    heads, chunks = operands.k.shape[2], call.q.shape[1]
    d_out = cotangents[0].astype(dtype)
    delta = (d_out * out.astype(dtype)).sum(-1) - cotangents[1].astype(dtype)
    cut = lambda x: in_chunks(x, heads, chunks, call.chunk)
    known = cut(d_out), cut(softmax.lse_in_unit(lse)[..., None]), cut(delta[..., None])
    d_k, d_v, d_q = jnp.zeros_like(call.k), jnp.zeros_like(call.v), []
    of_keys = lambda x, y: jnp.einsum("rmn,rmd->rnd", x, y, precision="highest")
    for span in _spans(operands, problem, call, tuning):
        k, v = call.k[:, : span.summaries], call.v[:, : span.summaries]

        def one(totals, turn, span=span, k=k, v=v):
            at = lambda x: lax.dynamic_index_in_dim(x, turn, 1, keepdims=False)
            logits, _, _ = _logits(call, problem, span, turn)
            own_out, own_lse, own_delta = map(at, known)
            weight = jnp.where(logits == -jnp.inf, 0, softmax.weights(logits, own_lse))
            products = softmax.matmul(own_out, jnp.swapaxes(v, 1, 2))
            slope = softmax.logit_gradient(weight, products, own_delta, None)
            slope = jnp.where(logits == -jnp.inf, 0, slope)
            added = of_keys(slope, cleaned(at(call.q))), of_keys(weight, cleaned(own_out))
            totals = tuple(x + y for x, y in zip(totals, added, strict=True))
            return totals, softmax.matmul(slope, cleaned(k))

        start = vary((jnp.zeros_like(k), jnp.zeros_like(v)), axes_of(operands.q))
        (of_k, of_v), of_q = lax.scan(one, start, span.first + jnp.arange(span.chunks))
        d_k, d_v = d_k.at[:, : span.summaries].add(of_k), d_v.at[:, : span.summaries].add(of_v)
        d_q.append(of_q)
    d_q = _in_order(jnp.concatenate(d_q), operands.q, operands.q.shape[2]) * problem.scale
    return Gradients(
        d_q.astype(operands.q.dtype),
        _of_heads(d_k * problem.scale, operands.k),
        _of_heads(d_v, operands.v),
    )


def _of_heads(x, like):
    """[heads, Nc, dim] as [B, Nc, Hk, dim]."""
    batch, number, heads, dim = like.shape
    return jnp.moveaxis(x.reshape(batch, heads, number, dim), 1, 2).astype(like.dtype)
