"""Block-sparse attention for TPUs: forward, dQ and dK/dV, each on one flat ragged grid.

A grid step is a row: one query block, or one kv block for dK/dV. It walks the blocks that it lists
in groups of a few, and nothing else; the next group is copied in while this one is computed. Logits
are [keys, queries] wherever statistics are taken over keys: these then lie along lanes, and
reductions never cross lanes.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xsake.kernels.block_sparse import cost, tiles, tpu_lists
from xsake.kernels.block_sparse.call import saved_rows
from xsake.kernels.block_sparse.folded import folded
from xsake.kernels.block_sparse.problem import (
    Cotangents,
    Gradients,
    Operands,
    Problem,
    cleaned,
    quarantine,
)
from xsake.kernels.block_sparse.split import split_rule
from xsake.kernels.block_sparse.tpu_call import Visitor, Walk
from xsake.kernels.block_sparse.tpu_step import column

LANES = 128
# TPUs have a unit for e^x: a polynomial, as on CPUs, would take 1.8 times the bundles per block.
UNIT = tiles.NATS


def platforms() -> tuple[str, ...]:
    """The only platform that these kernels compile for."""
    return ("tpu",)


def unsupported(operands: Operands, problem: Problem, platform: str) -> str | None:
    """Why this backend cannot serve the call on a TPU; None if it can."""
    layout, dtype = operands.layout, operands.q.dtype
    if operands.bias is not None:
        return "it adds no bias to the logits"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"TPUs compute in float32 and bfloat16, not in {dtype}"
    if tpu_lists.too_many_blocks(operands):
        return "there are more blocks than a word can tell apart; use larger blocks"
    rule = None if layout.mask is None else split_rule(layout.mask)
    if not isinstance(rule, str):
        return None
    if not layout.is_static:
        return f"{rule}, and a traced layout has no room for element masks"
    if operands.q_positions is not None or operands.kv_positions is not None:
        return f"{rule}, and positions are not known before the call"
    return None


def passes(operands: Operands, problem: Problem, platform: str) -> tuple[cost.Pass, ...]:
    """What forward and backward will compute."""
    return cost.blockwise(operands, *tpu_lists.walked(operands, problem), widens=False)


def _walk(number: int, operands: Operands, problem: Problem, interpret: Any) -> Walk:
    """The walk of one of the `passes`."""
    layout, counted = operands.layout, passes(operands, problem, "tpu")[number]
    launches = counted.launches or 1
    estimate = pl.CostEstimate(
        flops=counted.flops // launches,
        transcendentals=counted.listed * layout.block_q * layout.block_kv // launches,
        bytes_accessed=(counted.bytes_read + counted.bytes_written) // launches,
    )
    make = tpu_lists.by_key if number == 2 else tpu_lists.by_query
    return Walk(operands, make(operands, problem), interpret, estimate)


def forward(operands: Operands, problem: Problem, interpret: Any = False):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    return folded(lambda operands: _attend(operands, problem, interpret), operands)


def _attend(operands: Operands, problem: Problem, interpret: Any):
    walk = _walk(0, operands, problem, interpret)
    k, v = quarantine(operands.k, operands.v)
    block_q, value_dim = operands.layout.block_q, v.shape[-1]
    statistics = (1, block_q)
    out, lse = walk.run(
        _forward(problem),
        walk.queries(_ready(operands.q, problem)),
        walk.keys(k, v, transposed_values=True),
        results=[((value_dim, block_q), operands.q.dtype), (statistics, jnp.float32)],
        sums=[(value_dim, block_q), statistics, statistics],
        keys_first=True,
    )
    return walk.query_tokens(out.swapaxes(1, 2)), walk.query_tokens(lse[:, 0])


def backward(
    operands: Operands, problem: Problem, out, lse, cotangents: Cotangents, interpret: Any = False
) -> Gradients:
    """Gradients for q, k and v, recomputing the weights of the listed blocks twice."""

    def gradients(operands, *saved):
        given = operands, problem, *saved, interpret
        return query_gradient(*given), *key_value_gradient(*given)

    d_q, d_k, d_v = folded(gradients, operands, out, lse, cotangents)
    return Gradients(d_q, d_k, d_v, None)


def query_gradient(
    operands: Operands, problem: Problem, out, lse, cotangents: Cotangents, interpret: Any = False
):
    """dQ [B, Tq, Hq, D]."""
    walk = _walk(1, operands, problem, interpret)
    block = operands.layout.block_q, operands.q.shape[-1]
    statistics = block[0], LANES
    saved = saved_rows(jnp.float32, out, lse, cotangents, UNIT)
    (d_q,) = walk.run(
        _query_gradient(problem),
        walk.queries(_ready(operands.q, problem), *saved),
        walk.keys(*quarantine(operands.k, operands.v)),
        results=[(block, operands.q.dtype)],
        sums=[block, statistics, statistics],
        keys_first=False,
    )
    return walk.query_tokens(d_q)


def key_value_gradient(
    operands: Operands, problem: Problem, out, lse, cotangents: Cotangents, interpret: Any = False
):
    """dK [B, Tk, Hk, D] and dV [B, Tk, Hk, Dv]."""
    walk = _walk(2, operands, problem, interpret)
    blocks = [(operands.layout.block_kv, x.shape[-1]) for x in (operands.k, operands.v)]
    saved = saved_rows(jnp.float32, out, lse, cotangents, UNIT)
    d_k, d_v = walk.run(
        _key_value_gradient(problem),
        walk.keys(*quarantine(operands.k, operands.v)),
        walk.queries(_ready(operands.q, problem), *saved),
        results=[(block, operands.k.dtype) for block in blocks],
        sums=blocks,
        keys_first=True,
    )
    return walk.key_tokens(d_k), walk.key_tokens(d_v)


def _forward(problem: Problem) -> Visitor:
    """Online softmax; logits [keys, queries], sums of values [Dv, queries]."""

    def open_row(own, sums):
        total, peak, mass = sums
        total[...] = jnp.zeros_like(total)
        peak[...] = jnp.full_like(peak, -jnp.inf)
        mass[...] = jnp.zeros_like(mass)

    def visit(group, own, met, sums, careful):
        total, peak, mass = sums
        q, found = own.q[...], []
        for slot, keys in enumerate(met):
            logits = _logits(keys.k[...], q, problem)
            if careful:
                logits = jnp.where(group.visible(slot, own, keys), logits, -jnp.inf)
            found.append(logits)
        highest = jnp.max(found[0], 0, keepdims=True)
        for logits in found[1:]:
            highest = jnp.maximum(highest, jnp.max(logits, 0, keepdims=True))
        peak[...], origin, decay = tiles.raised(peak[...], highest, UNIT)
        seen, summed = mass[...] * decay, total[...] * decay
        for logits, keys in zip(found, met, strict=True):
            weight = tiles.weights(logits, origin, unit=UNIT)
            seen = seen + jnp.sum(weight, 0, keepdims=True)
            summed = summed + _matmul(keys.v[...], weight)
        mass[...], total[...] = seen, summed

    def close_row(results, sums):
        (out, lse), (total, peak, mass) = results, sums
        out[...] = tiles.normalised(total[...], mass[...]).astype(out.dtype)
        lse[...] = tiles.log_sum_exp(peak[...], mass[...], UNIT)

    return Visitor("forward", open_row, visit, close_row)


def _query_gradient(problem: Problem) -> Visitor:
    """Logits [queries, keys]: no statistics are taken, and dQ needs no tile transposed.

    Here and for dK/dV all products of a group come first, then what is done by element, then the
    sums: slot after slot would take a third more bundles.
    """

    def open_row(own, sums):
        total, lse, delta = sums
        total[...] = jnp.zeros_like(total)
        lse[...] = column(own.lse[...], LANES)
        delta[...] = column(own.delta[...], LANES)

    def visit(group, own, met, sums, careful):
        total, lse, delta = sums
        q, d_out = own.q[...], own.d_out[...]
        logits = [_logits(q, keys.k[...], problem) for keys in met]
        d_weights = [_products(d_out, keys.v[...]) for keys in met]
        lse, delta = (_widened(x[...], logits[0].shape[1]) for x in (lse, delta))
        gradients = [
            _gradient(x, lse, d_weight, delta, problem)[1]
            for x, d_weight in zip(logits, d_weights, strict=True)
        ]
        summed = total[...]
        for slot, (keys, gradient) in enumerate(zip(met, gradients, strict=True)):
            k = keys.k[...]
            if careful:
                gradient = jnp.where(group.visible(slot, own, keys), gradient, 0)
                k = _cleaned(k)
            summed = summed + _matmul(gradient, k)
        total[...] = summed

    def close_row(results, sums):
        (d_q,), (total, _, _) = results, sums
        d_q[...] = (total[...] * problem.scale).astype(d_q.dtype)

    return Visitor("d_q", open_row, visit, close_row)


def _key_value_gradient(problem: Problem) -> Visitor:
    """Rows are kv blocks; logits [keys, queries]."""

    def open_row(own, sums):
        for total in sums:
            total[...] = jnp.zeros_like(total)

    def visit(group, own, met, sums, careful):
        k, v = own.k[...], own.v[...]
        logits = [_logits(k, queries.q[...], problem) for queries in met]
        d_weights = [_products(v, queries.d_out[...]) for queries in met]
        found = [
            _gradient(x, queries.lse[...], d_weight, queries.delta[...], problem)
            for x, d_weight, queries in zip(logits, d_weights, met, strict=True)
        ]
        d_k, d_v = (total[...] for total in sums)
        for slot, (queries, (weight, gradient)) in enumerate(zip(met, found, strict=True)):
            q = queries.q[...]
            if careful:
                visible = group.visible(slot, queries, own)
                weight, gradient = (jnp.where(visible, x, 0) for x in (weight, gradient))
                q = _cleaned(q)
            d_k, d_v = d_k + _matmul(gradient, q), d_v + _matmul(weight, queries.d_out[...])
        for total, sum_ in zip(sums, (d_k, d_v), strict=True):
            total[...] = sum_

    def close_row(results, sums):
        (d_k, d_v), (keys, values) = results, sums
        d_k[...] = (keys[...] * _late_scale(d_k.dtype, problem)).astype(d_k.dtype)
        d_v[...] = values[...].astype(d_v.dtype)

    return Visitor("d_kv", open_row, visit, close_row)


def _gradient(logits, lse, d_weight, delta, problem: Problem):
    """`(weights, gradient of the logits)` of a tile."""
    weight = tiles.weights(logits, lse, unit=UNIT)
    slope = tiles.softcap_slope(logits, problem.softcap, unit=UNIT)
    return weight, tiles.logit_gradient(weight, d_weight, delta, slope)


def _widened(x, width: int):
    """[n, LANES], equal along lanes -> what broadcasts to [n, width] without crossing lanes."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * (width // LANES), 1) if width % LANES == 0 else x[:, :1]


def _ready(q, problem: Problem):
    """Queries as the kernels take them: scaled, unless that would round them to bfloat16 again."""
    return q * problem.scale if q.dtype == jnp.float32 else q


def _late_scale(dtype, problem: Problem) -> float:
    """What is left of the scale after `_ready`."""
    return 1.0 if dtype == jnp.float32 else problem.scale


def _logits(a, b, problem: Problem):
    """Logits of two lists of vectors."""
    scaled = _products(a, b) * _late_scale(a.dtype, problem)
    return tiles.logits(scaled, None, problem.softcap, UNIT)


def _products(a, b):
    """[m, D] x [n, D] -> [m, n]."""
    return _dot(a, b, ((1,), (1,)))


def _matmul(a, b):
    """[m, n] x [n, D] -> [m, D], in the dtype of the operands that came from memory."""
    narrow = a.dtype if a.dtype != jnp.float32 else b.dtype
    return _dot(a.astype(narrow), b.astype(narrow), ((1,), (0,)))


def _cleaned(x):
    """`cleaned` by way of float32, the only dtype that TPUs ask for being finite."""
    return cleaned(x.astype(jnp.float32)).astype(x.dtype)


def _dot(a, b, contracted):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
