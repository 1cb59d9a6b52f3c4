"""Hooks for calibrating third-party models through a replaceable attention function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xsake.attention import BlockSparseAttention
from xsake.attention.layer_call import LayerCall
from xsake.errors import ArgumentError
from xsake.hads.effect import BackwardHook
from xsake.hads.measure import ForwardHook
from xsake.masks import AbstractMask, Causal


class AttentionRecorder:
    """Attention function that passes every call to a hook.

    Call it as `recorder(q, k, v)` with [B, T, H, D] arrays after rotary embedding. Calls are
    numbered as layers, in order.

    Args:
        hook: called with every layer's inputs; its results are collected in `outputs`.
        mask: of the attention.
        operator: computes the attention output.
        backward_hook: applied to the attention output; see `effect.BackwardHook`.
        perturbation: argument of the backward hook.
    """

    def __init__(
        self,
        hook: ForwardHook,
        mask: AbstractMask = Causal(),  # noqa: B008 (masks are immutable)
        operator: BlockSparseAttention = BlockSparseAttention(),  # noqa: B008 (frozen)
        backward_hook: BackwardHook | None = None,
        perturbation: Any = None,
    ):
        self._hook, self._mask, self._operator = hook, mask, operator
        self._backward_hook, self._perturbation = backward_hook, perturbation
        self.outputs: list[Any] = []

    def __call__(self, q, k, v, *, scale: float | None = None, softcap: float | None = None):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        call = LayerCall(len(self.outputs), self._mask, scale, softcap)
        self.outputs.append(self._hook(q, k, v, call))
        operator = dataclasses.replace(self._operator, scale=scale)
        out = operator(q, k, v, mask=self._mask, softcap=softcap)
        if self._backward_hook is None:
            return out
        return self._backward_hook(out, q, k, v, call, self._perturbation)


def observer(run: Callable[[Any, Any, AttentionRecorder], Any], params: Any) -> "HookedModel":
    """Return an `ObserveFn` with `grads` for any model with a replaceable attention function.

    Args:
        run: `run(params, tokens, attention)` runs the model on tokens [B, T] with
            `attention(q, k, v)` in every layer and returns logits [B, T, vocabulary]. It may
            return None if no effects are measured.
        params: a pytree, an argument of the compiled program.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from xsake import hads
        >>> def run(params, tokens, attention):
        ...     x = params["embedding"][tokens][:, :, None, :]
        ...     for _ in range(2):
        ...         x = x + attention(x, x, x)
        >>> params = {"embedding": jax.random.normal(jax.random.key(0), (64, 16))}
        >>> documents = [hads.CalibrationDocument("one", np.arange(128, dtype=np.int32) % 50)]
        >>> model = hads.CalibratedModel(
        ...     name="mine", digest="v1", layers=2, q_heads=1, kv_heads=1, head_dim=16)
        >>> profile = hads.calibrate(
        ...     hads.observer(run, params), model, documents, hads.CalibrationSettings(block=16))
        >>> profile.entropy.shape
        (2, 1)
    """
    return HookedModel(run, params)


class HookedModel:
    """Model with hooks, as `observer` returns it; compiles once per hook."""

    def __init__(self, run: Callable[[Any, Any, AttentionRecorder], Any], params: Any):
        self._run, self._params = run, params
        self._compiled: dict[Callable, Callable] = {}

    def __call__(self, tokens, hook: ForwardHook):
        if hook not in self._compiled:
            apply = lambda params, tokens: _apply_hook(self._run, params, tokens, hook)
            self._compiled[hook] = jax.jit(apply)
        return self._compiled[hook](self._params, tokens)

    def grads(self, tokens, seeds, hook: BackwardHook, perturbation):
        """See `effect.GradsFn`."""
        if hook not in self._compiled:
            score = lambda perturbation, params, tokens, seeds: _sampled_log_prob(
                self._run(
                    params,
                    tokens,
                    AttentionRecorder(_no_hook, backward_hook=hook, perturbation=perturbation),
                ),
                seeds,
            )
            self._compiled[hook] = jax.jit(jax.grad(score))
        return self._compiled[hook](perturbation, self._params, tokens, seeds)


def _apply_hook(run, params, tokens, hook: ForwardHook):
    recorder = AttentionRecorder(hook)
    run(params, tokens, recorder)
    return jax.tree.map(lambda *x: jnp.stack(x), *recorder.outputs)


def _no_hook(q, k, v, call) -> None:
    """Collect nothing."""


def _sampled_log_prob(logits, seeds):
    """Return the log-probability of tokens sampled from the logits."""
    if logits is None:
        raise ArgumentError(
            "measuring effects requires logits",
            got="run(params, tokens, attention) returned None",
            expected="logits [B, T, vocabulary]",
            fix="return the logits, or calibrate with CalibrationSettings(effect_documents=0)",
        )
    sample = lambda seed, logits: jax.random.categorical(jax.random.key(seed), logits)
    tokens = jax.vmap(sample)(seeds, jax.lax.stop_gradient(logits))
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1).sum()
