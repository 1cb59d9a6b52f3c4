"""Hooks that measure the attention of each layer, and observers of models that run them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.attention import BlockSparseAttention
from xsake.attention.layer_call import LayerCall
from xsake.errors import ArgumentError
from xsake.hads.selectors import ScoringContext, Selector
from xsake.kernels.statistics import block_statistics
from xsake.layout.grid import count_blocks
from xsake.masks import AbstractMask, Causal

ForwardHook = Callable[[Float[Array, "B T Hq D"], Float[Array, "B T Hk D"], Any, LayerCall], Any]
"""Called with the queries, keys, values and the call of a layer; returns arrays to collect."""

ObserveFn = Callable[[Int[Array, "B T"], ForwardHook], Any]
"""Run a model on tokens and return the outputs of a hook, stacked over the layers."""

BackwardHook = Callable[[Array, Array, Array, Array, LayerCall, Any], Array]
"""`hook(out, q, k, v, call, perturbation)`: identity on `out` with a custom gradient.

The hook defines the gradient with respect to `perturbation`, zero arrays of [layers, ...]."""

GradsFn = Callable[[Int[Array, "B T"], Int[Array, " B"], BackwardHook, Any], Any]
"""`grads(tokens, seeds, hook, perturbation)`: gradient with respect to `perturbation` of the
log-probability of sampled tokens, one per position; one seed per document."""


class ComponentMoments(NamedTuple):
    """Second moments of the components of queries and keys."""

    queries: Float[Array, "B Hk D"]  # mean square, over the query heads of a kv head
    keys: Float[Array, "B Hk D"]  # variance: a constant key component does not change a softmax


class LayerMasses(NamedTuple):
    """Attention statistics of one layer."""

    entropy: Float[Array, "B Hq"]  # mean over queries of the attention entropy over tokens, nats
    true: Float[Array, "B Hq Nq Nk"]  # attention mass of each block, mean over the queries of a row
    estimates: dict[str, Float[Array, "B Hq Nq Nk"]]  # by selector


def moments_hook(q, k, v, call: LayerCall) -> ComponentMoments:
    """Measure which components of q and k contribute most to scores; a `ForwardHook`."""
    batch, tokens, kv_heads, dim = k.shape
    squares = jnp.square(q.astype(jnp.float32)).reshape(batch, tokens, kv_heads, -1, dim)
    return ComponentMoments(squares.mean((1, 3)), k.astype(jnp.float32).var(1))


def make_mass_hook(
    block: int, selectors: Sequence[Selector], components: Int[Array | np.ndarray, "L Hk D"]
) -> ForwardHook:
    """Build a `ForwardHook` that measures true block masses and the estimates of selectors."""
    components = jnp.asarray(components)

    def hook(q, k, v, call: LayerCall) -> LayerMasses:
        context = ScoringContext(block, call.scale, call.mask, call.softcap)
        statistics = block_statistics(
            q, k, block_kv=block, mask=call.mask, scale=call.scale, softcap=call.softcap
        )
        ordered = components[call.layer]
        return LayerMasses(
            statistics.entropy.mean(1),
            _row_means(statistics.mass(), block),
            {selector.name: selector.masses(q, k, context, ordered) for selector in selectors},
        )

    return hook


def _row_means(masses: Float[Array, "B T Hq Nk"], block: int) -> Float[Array, "B Hq Nq Nk"]:
    """Return means over the queries of each row; the last row may have fewer."""
    batch, tokens, heads, columns = masses.shape
    rows = count_blocks(tokens, block)
    padded = jnp.pad(masses, ((0, 0), (0, rows * block - tokens), (0, 0), (0, 0)))
    sums = padded.reshape(batch, rows, block, heads, columns).sum(2)
    size = np.minimum(block, tokens - np.arange(rows) * block).astype(np.float32)
    return jnp.moveaxis(sums / size[None, :, None, None], 1, 2)


class AttentionRecorder:
    """Attention function that passes every call to a hook.

    Call it as `recorder(q, k, v)` with [B, T, H, D] arrays after rotary embedding. Calls are
    numbered as layers, in order.

    Args:
        hook: called with every layer's inputs; its results are collected in `outputs`.
        mask: of the attention.
        operator: computes the attention output.
        backward_hook: applied to the attention output; see `BackwardHook`.
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
        def apply(params, tokens):
            recorder = AttentionRecorder(hook)
            self._run(params, tokens, recorder)
            return jax.tree.map(lambda *x: jnp.stack(x), *recorder.outputs)

        compiled = self._compiled.setdefault(hook, jax.jit(apply))
        return compiled(self._params, tokens)

    def grads(self, tokens, seeds, hook: BackwardHook, perturbation):
        """See `GradsFn`."""

        def score(perturbation, params, tokens, seeds):
            hooks = {"backward_hook": hook, "perturbation": perturbation}
            recorder = AttentionRecorder(lambda *_: None, **hooks)
            return _sampled_log_prob(self._run(params, tokens, recorder), seeds)

        compiled = self._compiled.setdefault(hook, jax.jit(jax.grad(score)))
        return compiled(perturbation, self._params, tokens, seeds)


def _sampled_log_prob(logits, seeds):
    """Return the log-probability of tokens sampled from the logits."""
    if logits is None:
        raise ArgumentError(
            "effects-logits",
            "measuring effects requires logits",
            got="run(params, tokens, attention) returned None",
            expected="logits [B, T, vocabulary]",
            fix="return the logits, or calibrate with CalibrationSettings(effect_documents=0)",
        )
    sample = lambda seed, logits: jax.random.categorical(jax.random.key(seed), logits)
    tokens = jax.vmap(sample)(seeds, jax.lax.stop_gradient(logits))
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1).sum()
