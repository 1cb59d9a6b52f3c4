"""Attention statistics as an operation: one dense pass, several backends."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.errors import ArgumentError, UnsupportedError
from xsake.kernels.dispatch import BackendSpec, Implementation, Op, StaticCall
from xsake.kernels.lowering import by_platform
from xsake.kernels.sharding import Placing, each_part, placing_of, vary_alike
from xsake.kernels.statistics.types import Statistics, StatisticsConfig, StatisticsInputs
from xsake.kernels.validation import (
    check_arrays,
    check_heads,
    positive_softcap,
    scale_or_default,
    token_integers,
)
from xsake.masks import AbstractMask, Causal
from xsake.masks.base import require_mask

Integers = Int[Array | np.ndarray, "..."]


_PACKAGE = "xsake.kernels.statistics"
OP = Op(
    BackendSpec.of_native_library(_PACKAGE, "statistics"),
    BackendSpec("xla", f"{_PACKAGE}.xla"),
    BackendSpec("reference", f"{_PACKAGE}.reference", is_on_request=True, is_portable=True),
)


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
    implementation: Implementation = None,
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
        implementation: "native_cpu", "xla" or "reference"; None picks the first that can run.

    Returns:
        The statistics, in float32 or, for float64 inputs, float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from xsake.kernels.statistics import block_statistics
        >>> q, k = jnp.zeros((1, 4, 1, 8)), jnp.ones((1, 4, 1, 8))
        >>> statistics = block_statistics(q, k, block_kv=2)
        >>> print(statistics.mass()[0, 3, 0].round(2))  # the last token sees both blocks alike
        [0.5 0.5]
    """
    q, k = jax.lax.stop_gradient((q, k))
    integers = q_positions, kv_positions, q_segment_ids, kv_segment_ids
    inputs, config = canonicalize_args(q, k, integers, mask, block_kv, scale, softcap)
    placing = placing_of(q=inputs.q, k=inputs.k)
    _check_rule(placing, config)
    call = StaticCall(OP.names(implementation), config, StatisticsInputs)
    run = lambda inputs: _run(call, vary_alike(inputs))
    return each_part(placing, run, inputs)


def canonicalize_args(
    q: Any, k: Any, integers: tuple[Any, ...], mask: Any, block_kv: int, scale: Any, softcap: Any
) -> tuple[StatisticsInputs, StatisticsConfig]:
    """Checked inputs and config; `integers` are those of `token_integers`."""
    q, k = jnp.asarray(q), jnp.asarray(k)
    check_arrays(q, k)
    inputs = StatisticsInputs(q, k, *token_integers(q, k, *integers))
    require_mask(mask)
    check_heads(mask.heads, q, k)
    if block_kv < 1:
        raise ArgumentError(
            "statistics-block",
            "block_kv must be positive",
            got=block_kv,
            expected="64, say",
            fix="a size above the number of keys means one block",
        )
    numbers = scale_or_default(scale, q), positive_softcap(softcap)
    return inputs, StatisticsConfig(mask, min(block_kv, k.shape[1]), *numbers)


def _check_rule(placing: Placing | None, config: StatisticsConfig) -> None:
    if placing is not None and placing.parts[1] > 1 and config.mask.heads is not None:
        raise UnsupportedError(
            "statistics-per-head-mask",
            "a mask that differs between heads cannot be split over devices",
            got=f"{config.mask!r}, heads over {placing.heads!r}",
            expected="one rule for all heads",
            fix="jax.sharding.reshard the arrays so that every device has all heads",
        )


# Jitted here so that calls outside of `jit` compile once.
@functools.partial(jax.jit, static_argnums=0)
def _run(call: StaticCall, inputs: StatisticsInputs) -> Statistics:
    def compute(platform: str, *arrays: Any) -> Statistics:
        inputs = StatisticsInputs(*arrays)
        backend = OP.choose(inputs, call.config, platform, call.implementation).load()
        return backend.statistics(inputs, call.config, platform)

    return by_platform(*OP.branches(call, compute), *inputs)
