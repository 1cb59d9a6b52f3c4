"""Calibrates models that are not ours: their attention goes through a function that watches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xsake.attention import BlockSparseAttention
from xsake.errors import ArgumentError
from xsake.hads.effect import Tap
from xsake.hads.measure import Watch
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
        tap: what the attention's output goes through; see `effect.Tap`.
        zeros: of the tap.
    """

    def __init__(
        self,
        watch: Watch,
        mask: AbstractMask = Causal(),  # noqa: B008 (masks are immutable)
        operator: BlockSparseAttention = BlockSparseAttention(),  # noqa: B008 (frozen)
        tap: Tap | None = None,
        zeros: Any = None,
    ):
        self._watch, self._mask, self._operator = watch, mask, operator
        self._tap, self._zeros = tap, zeros
        self.seen: list[Any] = []

    def __call__(self, q, k, v, *, scale: float | None = None, softcap: float | None = None):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        call = WatchedCall(len(self.seen), scale, self._mask, softcap)
        self.seen.append(self._watch(q, k, v, call))
        operator = dataclasses.replace(self._operator, scale=scale)
        out = operator(q, k, v, mask=self._mask, softcap=softcap).out
        return out if self._tap is None else self._tap(out, q, k, v, call, self._zeros)


def observer(run: Callable[[Any, Any, Recorder], Any], params: Any) -> "Reader":
    """An `Observe`, with `slopes`, for any model that lets its attention be replaced.

    Args:
        run: `run(params, tokens, attention)` lets the model read tokens [B, T], with
            `attention(q, k, v)` in place of its own in every layer, and returns logits
            [B, T, vocabulary]; None will do where no effect on predictions is measured.
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
    return Reader(run, params)


class Reader:
    """What `observer` makes: lets a model read, each way to watch compiled once."""

    def __init__(self, run: Callable[[Any, Any, Recorder], Any], params: Any):
        self._run, self._params = run, params
        self._compiled: dict[Callable, Callable] = {}

    def __call__(self, tokens, watch: Watch):
        if watch not in self._compiled:
            read = lambda params, tokens: _read(self._run, params, tokens, watch)
            self._compiled[watch] = jax.jit(read)
        return self._compiled[watch](self._params, tokens)

    def slopes(self, tokens, seeds, tap: Tap, zeros):
        """See `effect.Slopes`."""
        if tap not in self._compiled:
            score = lambda zeros, params, tokens, seeds: _drawn(
                self._run(params, tokens, Recorder(_blind, tap=tap, zeros=zeros)), seeds
            )
            self._compiled[tap] = jax.jit(jax.grad(score))
        return self._compiled[tap](zeros, self._params, tokens, seeds)


def _read(run, params, tokens, watch: Watch):
    recorder = Recorder(watch)
    run(params, tokens, recorder)
    return jax.tree.map(lambda *x: jnp.stack(x), *recorder.seen)


def _blind(q, k, v, call) -> None:
    """Watches nothing."""


def _drawn(logits, seeds):
    """Log-probability of tokens that are drawn by the logits of a model."""
    if logits is None:
        raise ArgumentError(
            "effects on predictions need predictions",
            got="run(params, tokens, attention) returned None",
            expected="logits [B, T, vocabulary]",
            fix="return the logits, or calibrate with Settings(effect_documents=0)",
        )
    draw = lambda seed, logits: jax.random.categorical(jax.random.key(seed), logits)
    drawn = jax.vmap(draw)(seeds, jax.lax.stop_gradient(logits))
    return jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[..., None], axis=-1).sum()
