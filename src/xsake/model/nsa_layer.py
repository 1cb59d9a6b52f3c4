"""Native sparse attention layer: projections of three branches, learned compression, gates."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from xsake import nsa
from xsake.attention import attention
from xsake.attention.layer_call import LayerCall
from xsake.errors import UnsupportedError
from xsake.kernels.block_selection import BlockSelection
from xsake.kernels.compressed import compressed_attention
from xsake.kernels.compressed import types as pooling
from xsake.kernels.compressed.summaries import runs
from xsake.kernels.selected import selected_attention
from xsake.kernels.selected import types as selecting
from xsake.masks import Causal, Window
from xsake.model.cache import KVPair, NativeState
from xsake.model.config import DecoderConfig
from xsake.model.layers import Norm, init_param, named_param


@dataclasses.dataclass(frozen=True, eq=False)
class NativeSparseCall:
    """Native sparse attention of one layer call."""

    config: nsa.Config
    gates: nsa.Gates
    compress: tuple[nsa.Compress, nsa.Compress]  # of runs of keys and of values, with rotation

    def __call__(self, q, k: nsa.KV, v: nsa.KV, call: LayerCall, mesh: Mesh | None = None):
        """Compute attention for sequences that start at position 0."""
        if call.segment_ids is not None or call.q_positions is not None:
            raise UnsupportedError(
                "native-sparse-position",
                "native sparse attention in a model requires sequences from position 0",
                got="positions or segment_ids", expected="neither",
                fix="use one row per sequence; for packed ones: xsake.nsa.attention",
            )  # fmt: skip
        return nsa.attention(
            q, k, v, self.gates, config=self.config, compress=self.compress, scale=call.scale,
            mesh=mesh,
        )  # fmt: skip

    def make_state(
        self, k: nsa.KV, v: nsa.KV, lengths: Int[Array, " B"], capacity: int
    ) -> NativeState:
        """Return the decoding state after a prefill."""

        def summarize(x, compress):
            cut = runs(x, self.config.length, self.config.stride)
            return compress(
                cut, (jnp.arange(cut.shape[1], dtype=jnp.int32) * self.config.stride)[None]
            )

        summaries = KVPair(*map(summarize, (k.compressed, v.compressed), self.compress))
        return NativeState.from_prefill(k, v, summaries, lengths, self.config, capacity)

    def step(
        self, q, k: nsa.KV, v: nsa.KV, state: NativeState, position: Int[Array, " B"], *,
        scale: float,
    ):  # fmt: skip
        """Append a token to each row; return (attention output, state)."""
        state = state.append(k, v, position, self.config, self.compress)
        config, at = self.config, position[:, None]
        blocks = -(-state.selected.k.shape[1] // config.size)
        selection = BlockSelection(config.size, blocks, config.count, config.first, config.local)
        compressed, _, selected = compressed_attention(
            pooling.CompressedInputs(q, *state.summaries, at),
            pooling.CompressedConfig(config.length, config.stride, scale, selection),
        )
        assert selected is not None
        selected_out, _ = selected_attention(
            selecting.SelectedInputs(q, *state.selected, selected, at),
            selecting.SelectedConfig(config.size, scale),
        )
        window: Any = attention(
            q, *state.window, mask=Causal() & Window(left=config.window - 1, right=0), scale=scale,
            q_positions=at, kv_positions=state.window_positions(position),
        )  # fmt: skip
        gates = jnp.stack([gate for gate in self.gates if gate is not None])[..., None]
        return (gates * jnp.stack([compressed, selected_out, window])).sum(0).astype(q.dtype), state


class RunCompressor(nnx.Module):
    """Compression phi: mean of a run plus a small MLP with position embeddings."""

    def __init__(self, config: DecoderConfig, length: int, rngs: nnx.Rngs, dtype):
        dim = config.head_dim
        inner = 2 * dim
        self.places = named_param(jnp.zeros((length, dim), dtype), ("run", "head_dim"))
        shape, names = (length, dim, inner), ("run", "head_dim", "summary")
        self.up = init_param(rngs, names, shape, dtype, fan_in=length * dim)
        # Initialized as the mean.
        self.down = named_param(jnp.zeros((inner, dim), dtype), ("summary", "head_dim"))

    def __call__(self, run: Float[Array, "B Nc length Hk D"]) -> Float[Array, "B Nc Hk D"]:
        places, up, down = (x[...].astype(run.dtype) for x in (self.places, self.up, self.down))
        marked = run + places[None, None, :, None]
        inner = jax.nn.gelu(jnp.einsum("bnlhd,ldi->bnhi", marked, up))
        return run.mean(2) + jnp.einsum("bnhi,id->bnhd", inner, down)


class NativeSparse(nnx.Module):
    """Attention projections with separate keys and values per branch, gates and compression.

    Replaces `Attention` in a decoder layer. `config.native_sparse` has the sizes.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype):
        assert config.native_sparse is not None
        self.nsa_config = config.native_sparse
        width, dim, heads = config.width, config.head_dim, config.q_heads
        draw = functools.partial(init_param, rngs, dtype=dtype, fan_in=width)
        self.query = draw(("embed", "q_heads", "head_dim"), (width, heads, dim))
        names = ("embed", "branch", "kv_heads", "head_dim")
        self.key = draw(names, (width, 3, config.kv_heads, dim))
        self.value = draw(names, (width, 3, config.kv_heads, dim))
        self.gate = draw(("embed", "q_heads", "branch"), (width, heads, 3))
        self.gate_bias = named_param(jnp.zeros((heads, 3), dtype), ("q_heads", "branch"))
        out = ("q_heads", "head_dim", "embed")
        self.out = init_param(rngs, out, (heads, dim, width), dtype, fan_in=heads * dim)
        make = lambda: RunCompressor(config, self.nsa_config.length, rngs, dtype)
        self.key_summary, self.value_summary = make(), make()
        norm = lambda: Norm(config, dim, "head_dim", dtype) if config.has_qk_norm else None
        self.query_norm, self.key_norm = norm(), norm()

    def __call__(
        self, x: Float[Array, "B T width"], attention_fn: Callable[..., tuple[Array, Any]]
    ):
        """Return (output, auxiliary output of `attention_fn(q, k, v, (this layer, gates))`)."""
        q = jnp.einsum("bte,ehd->bthd", x, self.query[...].astype(x.dtype))
        k, v = (
            jnp.einsum("bte,echd->cbthd", x, weight[...].astype(x.dtype))
            for weight in (self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        logits = jnp.einsum("bte,ehc->bthc", x, self.gate[...].astype(x.dtype))
        logits = logits + self.gate_bias[...].astype(x.dtype)[None, None]
        out, aux = attention_fn(q, nsa.KV(*k), nsa.KV(*v), (self, nsa.Gates.sigmoid(logits)))
        return jnp.einsum("bthd,hde->bte", out, self.out[...].astype(x.dtype)), aux

    def make_call(
        self, gates: nsa.Gates, rotate: Callable[[Array, Array], Array]
    ) -> NativeSparseCall:
        """Return the attention of a call; `rotate(x, positions)` rotates compressed keys."""

        def keys(run, positions):
            return rotate(self.key_summary(run), positions)

        def values(run, positions):
            return self.value_summary(run)

        return NativeSparseCall(self.nsa_config, gates, (keys, values))
