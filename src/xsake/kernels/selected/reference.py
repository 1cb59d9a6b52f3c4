"""The dense, boring definition of selected attention: truth at small sizes, O(Tq Tk) memory."""

import jax
import jax.numpy as jnp

from xsake.kernels import dense_pairs
from xsake.kernels.selected.problem import Cotangents, Gradients, Operands, Problem


def platforms() -> tuple[str, ...] | None:
    """Where this backend runs: None is everywhere."""
    return None


def unsupported(operands: Operands) -> str | None:
    """Why this backend cannot serve the call; None if it can: it serves every call."""
    return None


def forward(operands: Operands, problem: Problem):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    seen = visible(operands, problem)
    return dense_pairs.forward(*operands[:3], seen, problem.scale)[:2]


def backward(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents) -> Gradients:
    """Gradients by the formulas, over all pairs."""
    seen = visible(operands, problem)
    arrays = tuple(operands[:3])
    return Gradients(
        *dense_pairs.backward(arrays, seen, problem.scale, (out, lse), tuple(cotangents))
    )


def visible(operands: Operands, problem: Problem):
    """bool [B, Hk, Tq, Tk]: the key's block is among the query's, and the key is not later."""
    tokens = operands.k.shape[1]
    number = -(-tokens // problem.block)
    named = jax.nn.one_hot(operands.blocks, number, dtype=jnp.bool_).any(3)  # [B, Tq, Hk, Nk]
    listed = jnp.repeat(jnp.moveaxis(named, 2, 1), problem.block, axis=3)[..., :tokens]
    causal = jnp.arange(tokens)[None, None, None] <= operands.positions[:, None, :, None]
    return listed & causal
