"""The three passes of attention over a list, as GPU kernels compute them; launches nothing itself.

Tiles of logits are [own, met]: queries by keys, and for dK/dV keys by queries. Weights become
operands of the next product without leaving their registers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from xsake.kernels import mosaic_gpu_compat as gpu
from xsake.kernels.block_sparse import gpu_lists, tiles
from xsake.kernels.block_sparse.call import saved_rows
from xsake.kernels.block_sparse.folded import folded
from xsake.kernels.block_sparse.gpu_arrays import room_of
from xsake.kernels.block_sparse.gpu_call import Visitor, Walk
from xsake.kernels.block_sparse.problem import (
    Cotangents,
    Gradients,
    Operands,
    Problem,
    cleaned,
    quarantine,
)

# GPUs have a unit for 2^x.
UNIT = tiles.Unit(tiles.LOG2_E, jnp.exp2)
MOST_FEATURES = 256


def declined(operands: Operands, problem: Problem) -> str | None:
    """Why no GPU kernel serves a call, on whichever GPU; None if one may."""
    layout, dtype = operands.layout, operands.q.dtype
    if operands.bias is not None:
        return "it adds no bias to the logits"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"its tensor cores take bfloat16 and float16, not {dtype}"
    if problem.tiles is not None:
        return "its tiles follow from the head dimension"
    if max(operands.q.shape[-1], operands.v.shape[-1]) > MOST_FEATURES:
        return f"its registers hold heads of at most {MOST_FEATURES} features"
    rule = gpu_lists.rule_of(layout.mask)
    if not isinstance(rule, str):
        return None
    if not layout.is_static:
        return f"{rule}, and a traced layout has no room for element masks"
    if operands.q_positions is not None or operands.kv_positions is not None:
        return f"{rule}, and positions are not known before the call"
    return None


@dataclasses.dataclass(frozen=True)
class Passes:
    """What a backend for GPUs offers, over walks of its own kind.

    Args:
        walk_of: from a pass ("forward", "d_q" or "d_kv"), operands and how to interpret the kernel
            (None: not at all) to the walk.
    """

    walk_of: Callable[[str, Operands, Any], Walk]

    def forward(self, operands: Operands, problem: Problem, interpret: Any = None):
        """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
        return folded(
            lambda own: attend(self.walk_of("forward", own, interpret), problem), operands
        )

    def backward(
        self, operands: Operands, problem: Problem, out, lse, cotangents, interpret: Any = None
    ) -> Gradients:
        """Gradients for q, k and v, recomputing the weights of the listed blocks twice."""

        def gradients(operands, *saved):
            given = operands, problem, *saved, interpret
            return self.query_gradient(*given), *self.key_value_gradient(*given)

        d_q, d_k, d_v = folded(gradients, operands, out, lse, cotangents)
        return Gradients(d_q, d_k, d_v, None)

    def query_gradient(
        self, operands: Operands, problem: Problem, out, lse, cotangents, interpret: Any = None
    ):
        """dQ [B, Tq, Hq, D]."""
        walk = self.walk_of("d_q", operands, interpret)
        return query_gradient(walk, problem, out, lse, cotangents)

    def key_value_gradient(
        self, operands: Operands, problem: Problem, out, lse, cotangents, interpret: Any = None
    ):
        """dK [B, Tk, Hk, D] and dV [B, Tk, Hk, Dv]."""
        walk = self.walk_of("d_kv", operands, interpret)
        return key_value_gradient(walk, problem, out, lse, cotangents)


def attend(walk: Walk, problem: Problem, dtype=None):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`; out in `dtype`, or in that of the queries."""
    operands = walk.operands
    k, v = quarantine(operands.k, operands.v)
    out, lse = walk.run(
        _forward(problem, walk),
        walk.queries(operands.q),
        walk.keys(k, v),
        [(v.shape[-1], dtype or operands.q.dtype), (None, jnp.float32)],
    )
    return out, lse


def query_gradient(walk: Walk, problem: Problem, out, lse, cotangents: Cotangents, dtype=None):
    """dQ [B, Tq, Hq, D], in `dtype`, or in that of the queries."""
    operands, poison = walk.operands, None
    k, v = quarantine(operands.k, operands.v)
    if walk.machine.uses_wgmma:
        # Keys are also multiplied with gradients, from where they cannot be cleaned any more.
        poison = jnp.where(jnp.isfinite(k).all(-1), 0.0, jnp.nan).astype(jnp.float32)
        k = cleaned(k)
    (d_q,) = walk.run(
        _query_gradient(problem, walk),
        walk.queries(operands.q, *saved_rows(jnp.float32, out, lse, cotangents, UNIT)),
        walk.keys(k, v, poison),
        [(operands.q.shape[-1], dtype or operands.q.dtype)],
    )
    return d_q


def key_value_gradient(walk: Walk, problem: Problem, out, lse, cotangents: Cotangents, dtype=None):
    """dK [B, Tk, Hk, D] and dV [B, Tk, Hk, Dv], in `dtype`, or in that of keys and values."""
    operands = walk.operands
    d_out, lse, delta = saved_rows(jnp.float32, out, lse, cotangents, UNIT)
    # A query that is not finite spoils what it sees, and only that.
    lse = jnp.where(jnp.isfinite(operands.q).all(-1), lse, jnp.nan)
    d_k, d_v = walk.run(
        _key_value_gradient(problem, walk),
        walk.keys(*quarantine(operands.k, operands.v)),
        walk.queries(cleaned(operands.q), d_out, lse, delta),
        [(x.shape[-1], dtype or x.dtype) for x in (operands.k, operands.v)],
    )
    return d_k, d_v


def _forward(problem: Problem, walk: Walk) -> Visitor:
    """Online softmax; logits [queries, keys]."""
    machine, rows = walk.machine, walk.listing.own.tile

    def open_row(own):
        features = room_of(walk.operands.v.shape[-1])
        zeros = gpu.filled((rows, features), 0.0)
        return zeros, gpu.filled((rows,), -jnp.inf), gpu.filled((rows,), 0.0)

    def visit(pairs, own, met, state, careful):
        total, peak, mass = state
        logits = _logits(machine, own.q, met.k, problem)
        visible = pairs.visible() if careful else None
        if visible is not None:
            logits = jnp.where(visible, logits, -jnp.inf)
        peak, origin, decay = tiles.raised(peak, jnp.max(logits, 1), UNIT)
        weight = jnp.exp2(logits - gpu.along(origin, pairs.shape, 0))
        mass = mass * decay + jnp.sum(weight, 1)
        total = total * gpu.along(decay, total.shape, 0)
        total = machine.added(total, weight, met.v)
        machine.done_reading()
        return total, peak, mass

    def close_row(state):
        total, peak, mass = state
        weight = 1 / jnp.where(mass != 0, mass, 1.0)
        out = total * gpu.along(weight, total.shape, 0)
        return out, tiles.log_sum_exp(peak, mass, UNIT)

    return Visitor("forward", open_row, visit, close_row)


def _query_gradient(problem: Problem, walk: Walk) -> Visitor:
    """Logits [queries, keys]; their gradient is the left operand of dQ's product."""
    machine, rows = walk.machine, walk.listing.own.tile

    def open_row(own):
        total = gpu.filled((rows, room_of(walk.operands.q.shape[-1])), 0.0)
        return total, gpu.vector(own.lse, 0), gpu.vector(own.delta, 0)

    def visit(pairs, own, met, state, careful):
        total, lse, delta = state
        shape = pairs.shape
        logits = _logits(machine, own.q, met.k, problem)
        if met.poison is not None:
            logits = logits + gpu.along(gpu.vector(met.poison, 1), shape, 1)
        weight = jnp.exp2(logits - gpu.along(lse, shape, 0))
        d_weight = machine.products(own.d_out, met.v)
        gradient = _gradient(weight, d_weight, gpu.along(delta, shape, 0), logits, problem)
        visible = pairs.visible() if careful else None
        if visible is not None:
            gradient = jnp.where(visible, gradient, 0.0)
        clean = visible is not None and met.poison is None
        total = machine.added(total, gradient, met.k, clean)
        machine.done_reading()
        return total, lse, delta

    def close_row(state):
        return (state[0] * problem.scale,)

    return Visitor("d_q", open_row, visit, close_row)


def _key_value_gradient(problem: Problem, walk: Walk) -> Visitor:
    """Rows are kv blocks; logits [keys, queries]."""
    machine, rows = walk.machine, walk.listing.own.tile

    def open_row(own):
        operands = walk.operands
        return tuple(
            gpu.filled((rows, room_of(x.shape[-1])), 0.0) for x in (operands.k, operands.v)
        )

    def visit(pairs, own, met, state, careful):
        d_k, d_v = state
        shape = pairs.shape
        logits = _logits(machine, own.k, met.q, problem)
        weight = jnp.exp2(logits - gpu.along(gpu.vector(met.lse, 1), shape, 1))
        visible = pairs.visible() if careful else None
        if visible is not None:
            weight = jnp.where(visible, weight, 0.0)
        d_v = machine.added(d_v, weight, met.d_out)
        d_weight = machine.products(own.v, met.d_out)
        delta = gpu.along(gpu.vector(met.delta, 1), shape, 1)
        gradient = _gradient(weight, d_weight, delta, logits, problem)
        if visible is not None:
            gradient = jnp.where(visible, gradient, 0.0)
        d_k = machine.added(d_k, gradient, met.q)
        machine.done_reading()
        return d_k, d_v

    def close_row(state):
        return state[0] * problem.scale, state[1]

    return Visitor("d_kv", open_row, visit, close_row)


def _logits(machine: gpu.Machine, own, met, problem: Problem):
    """Logits in bits."""
    found = machine.products(own, met)
    if problem.softcap is None:
        return found * (problem.scale * UNIT.per_nat)
    return _tanh(found * (problem.scale / problem.softcap)) * (problem.softcap * UNIT.per_nat)


def _tanh(x):
    """The hardware's own tanh is wrong by 2^-11 of its result; this is not."""
    return 1 - 2 / (jnp.exp2(x * (2 * tiles.LOG2_E)) + 1)


def _gradient(weight, d_weight, delta, logits, problem: Problem):
    slope = tiles.softcap_slope(logits, problem.softcap, unit=UNIT)
    return tiles.logit_gradient(weight, d_weight, delta, slope)
