"""Calibrates models that are not ours: their attention goes through a function that watches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xsake.attention import BlockSparseAttention
from xsake.hads.measure import Observe, Watch
from xsake.masks import AbstractMask, Causal


@dataclasses.dataclass(frozen=True)
class WatchedCall:
    """What is known of one call of the recorder."""

    layer: int
    scale: float
    mask: AbstractMask
    softcap: float | None = None
    segment_ids: None = None


class Recorder:
    """Stands where a model computes its attention, and lets somebody watch every call.

    Call it as `recorder(q, k, v)` on [B, T, H, D] arrays, rotations applied; calls are counted as
    layers, in order.

    Args:
        watch: told about every call.
        mask: who may see whom.
        operator: computes the attention that the model goes on with.
    """

    def __init__(
        self,
        watch: Watch,
        mask: AbstractMask = Causal(),  # noqa: B008 (masks are immutable)
        operator: BlockSparseAttention = BlockSparseAttention(),  # noqa: B008 (frozen)
    ):
        self._watch, self._mask, self._operator = watch, mask, operator
        self.seen: list[Any] = []

    def __call__(self, q, k, v, *, scale: float | None = None, softcap: float | None = None):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        call = WatchedCall(len(self.seen), scale, self._mask, softcap)
        self.seen.append(self._watch(q, k, v, call))
        operator = dataclasses.replace(self._operator, scale=scale)
        return operator(q, k, v, mask=self._mask, softcap=softcap).out


def observer(run: Callable[[Any, Any, Recorder], Any], params: Any) -> Observe:
    """An `Observe` for any model that lets its attention be replaced.

    Args:
        run: `run(params, tokens, attention)` lets the model read tokens [B, T], with
            `attention(q, k, v)` in place of its own in every layer; what it returns is dropped.
        params: a pytree, passed to the compiled program rather than baked into it.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from xsake import hads
        >>> def run(params, tokens, attention):
        ...     x = params["embedding"][tokens][:, :, None, :]
        ...     for _ in range(2):
        ...         x = x + attention(x, x, x)
        >>> params = {"embedding": jax.random.normal(jax.random.key(0), (64, 16))}
        >>> readings = [hads.Reading("one", np.arange(128, dtype=np.int32) % 50)]
        >>> model = hads.CalibratedModel(
        ...     name="mine", digest="v1", layers=2, q_heads=1, kv_heads=1, head_dim=16)
        >>> profile = hads.calibrate(
        ...     hads.observer(run, params), model, readings, hads.Settings(block=16))
        >>> profile.entropy.shape
        (2, 1)
    """
    compiled: dict[Watch, Callable] = {}

    def observe(tokens, watch: Watch):
        if watch not in compiled:
            compiled[watch] = jax.jit(lambda params, tokens: _read(run, params, tokens, watch))
        return compiled[watch](params, tokens)

    return observe


def _read(run, params, tokens, watch: Watch):
    recorder = Recorder(watch)
    run(params, tokens, recorder)
    return jax.tree.map(lambda *x: jnp.stack(x), *recorder.seen)
