"""The statistics operation: one dense pass over what queries see, whichever backend computes it."""

import functools
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.errors import ArgumentError, UnsupportedError
from xsake.kernels.placed import Placing, each_part, placing_of
from xsake.kernels.statistics import reference, xla
from xsake.kernels.statistics.arguments import operands_of, problem_of
from xsake.kernels.statistics.problem import Operands, Problem, Statistics
from xsake.kernels.varying import vary_alike
from xsake.masks import AbstractMask, Causal

Integers = Int[Array | np.ndarray, "..."]


@runtime_checkable
class Backend(Protocol):
    """What a backend's module offers; each serves every call on every platform."""

    def statistics(self, operands: Operands, problem: Problem) -> Statistics:
        """The statistics of every query."""
        ...


# Best first.
BACKENDS: dict[str, Backend] = {"xla": xla, "reference": reference}


def block_statistics(
    q: Float[Array | np.ndarray, "B Tq Hq D"],
    k: Float[Array | np.ndarray, "B Tk Hk D"],
    *,
    block_kv: int,
    mask: AbstractMask = Causal(),  # noqa: B008 (frozen)
    scale: float | None = None,
    softcap: float | None = None,
    q_positions: Integers | None = None,
    kv_positions: Integers | None = None,
    q_segment_ids: Integers | None = None,
    kv_segment_ids: Integers | None = None,
    implementation: str | None = None,
) -> Statistics:
    """Entropy, denominator and block masses of attention, exactly, in one dense pass.

    For the keys j that query i may see, with `s = softcap(scale * q.k)` and `p = softmax(s)`:
    `lse = log sum_j exp(s_j)`, `entropy = lse - sum_j p_j s_j`, and `block_lse` is `lse` over the
    keys of one block alone. Memory is O(Tq Nk), not O(Tq Tk), and keys that the mask hides from a
    whole chunk of queries cost nothing. To stream a long sequence, give some queries at a time
    with their `q_positions`. It measures and trains nothing: no gradient flows into q and k.

    Args:
        q: queries [B, Tq, Hq, D].
        k: keys [B, Tk, Hk, D]; each kv head serves Hq / Hk query heads.
        block_kv: keys per block.
        mask: who may see whom, by position (`xsake.masks`).
        scale: factor on q.k; None is 1 / sqrt(D).
        softcap: logits become `softcap * tanh(logits / softcap)`.
        q_positions: positions the mask sees, [Tq] or [B, Tq]; None is 0, 1, 2, ...
        kv_positions: likewise for keys.
        q_segment_ids: [B, Tq]; only equal ids see each other, negative ids are padding.
        kv_segment_ids: [B, Tk]; None takes `q_segment_ids` when Tq == Tk.
        implementation: "xla" or "reference"; None picks "xla".

    Returns:
        The statistics, in float32 or, for float64 inputs, float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from xsake.kernels.statistics import block_statistics
        >>> q, k = jnp.zeros((1, 4, 1, 8)), jnp.ones((1, 4, 1, 8))
        >>> found = block_statistics(q, k, block_kv=2)
        >>> print(found.mass()[0, 3, 0].round(2))  # the last token sees both blocks alike
        [0.5 0.5]
    """
    q, k = jax.lax.stop_gradient((q, k))
    operands = operands_of(q, k, q_positions, kv_positions, q_segment_ids, kv_segment_ids)
    problem = problem_of(operands, mask, block_kv, scale, softcap)
    placing = placing_of(q=operands.q, k=operands.k)
    _check_rule(placing, problem)
    run = lambda operands: _run(_named(implementation), problem, vary_alike(operands))
    return each_part(placing, run, operands)


def _check_rule(placing: Placing | None, problem: Problem) -> None:
    if placing is not None and placing.parts[1] > 1 and problem.mask.heads is not None:
        raise UnsupportedError(
            "a mask that differs between heads cannot be split over devices",
            got=f"{problem.mask!r}, heads over {placing.heads!r}",
            expected="one rule for all heads",
            fix="jax.sharding.reshard the arrays so that every device has all heads",
        )


def _named(name: str | None) -> str:
    if name is not None and name not in BACKENDS:
        raise ArgumentError(
            "no such implementation",
            got=repr(name),
            expected=" or ".join(map(repr, BACKENDS)),
            fix="pass implementation=None to let xsake pick",
        )
    return next(iter(BACKENDS)) if name is None else name


# Jitted here so that calls outside `jit` compile once and not at every call.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(name: str, problem: Problem, operands: Operands) -> Statistics:
    return BACKENDS[name].statistics(operands, problem)
