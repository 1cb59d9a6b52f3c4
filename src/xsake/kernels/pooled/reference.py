"""The dense, boring definition of pooled attention: truth at small sizes, O(Tq Nc) memory."""

import jax.numpy as jnp

from xsake.kernels import dense_pairs
from xsake.kernels.pooled import choose
from xsake.kernels.pooled.problem import Cotangents, Gradients, Operands, Problem


def forward(operands: Operands, problem: Problem):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq], blocks [B, Tq, Hk, Ns] or None)`."""
    seen = visible(operands, problem)
    out, lse, weight = dense_pairs.forward(*operands[:3], seen, problem.scale)
    if problem.choosing is None:
        return out, lse, None
    batch, queries, q_heads, _ = operands.q.shape
    heads = operands.k.shape[2]
    shared = weight.reshape(batch, heads, q_heads // heads, queries, -1).sum(2)
    scores = choose.block_scores(shared, problem, problem.choosing.number)
    position, start = (
        jnp.broadcast_to(x[:, None], (batch, heads, queries)) for x in operands.places
    )
    found = choose.chosen(scores, position, start, problem.choosing)
    return out, lse, jnp.moveaxis(found, 1, 2)


def backward(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents) -> Gradients:
    """Gradients by the formulas, over all pairs."""
    seen, arrays = visible(operands, problem), tuple(operands[:3])
    return Gradients(
        *dense_pairs.backward(arrays, seen, problem.scale, (out, lse), tuple(cotangents))
    )


def visible(operands: Operands, problem: Problem):
    """bool [B, Hk, Tq, Nc]: the summaries that each query sees."""
    batch, number, heads, _ = operands.k.shape
    position, start = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in operands.places)
    seen = choose.visible(position, start, number, problem)
    return jnp.broadcast_to(seen[:, None], (batch, heads, *seen.shape[1:]))
