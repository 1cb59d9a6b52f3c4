"""Native sparse attention as a layer: projections of three branches, learned summaries, gates."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from xsake.attention import Blocks, Branches, Gates, attention, native_sparse_attention
from xsake.attention.native_blocks import Compress
from xsake.errors import UnsupportedError
from xsake.kernels.pooled import pooled
from xsake.kernels.pooled import problem as pooling
from xsake.kernels.pooled.compress import runs
from xsake.kernels.selected import problem as selecting
from xsake.kernels.selected import selected
from xsake.masks import Causal, Window
from xsake.model.attend import LayerCall
from xsake.model.config import DecoderConfig
from xsake.model.layers import Norm, named, parameter
from xsake.model.native_cache import NativeState


@dataclasses.dataclass(frozen=True, eq=False)
class Native:
    """What a layer of native sparse attention knows beside queries, keys and values.

    Args:
        blocks: the sizes.
        gates: of the tokens at hand.
        compress: how runs of keys and of values become summaries, rotation included.
    """

    blocks: Blocks
    gates: Gates
    compress: tuple[Compress, Compress]

    def __call__(self, q, k: Branches, v: Branches, call: LayerCall, mesh: Mesh | None = None):
        """Attention of a whole text that begins at position 0."""
        if call.segment_ids is not None or call.q_positions is not None:
            raise UnsupportedError(
                "a model with native sparse attention reads texts from their beginning",
                got="positions or segment_ids",
                expected="neither",
                fix="give every text its own row; packed ones: xsake.native_sparse_attention",
            )
        return native_sparse_attention(
            q, k, v, self.gates,
            blocks=self.blocks,
            compress=self.compress,
            scale=call.scale,
            mesh=mesh,
        )  # fmt: skip

    def kept(self, k: Branches, v: Branches, lengths: Int[Array, " B"], room: int) -> NativeState:
        """What decoding needs of a text that was read."""
        sizes = self.blocks.length, self.blocks.stride
        begins = lambda x: (jnp.arange(x.shape[1], dtype=jnp.int32) * self.blocks.stride)[None]
        summaries = []
        for x, compress in zip((k.compressed, v.compressed), self.compress, strict=True):
            cut = runs(x, *sizes)
            summaries.append(compress(cut, begins(cut)))
        return NativeState.holding(k, v, (summaries[0], summaries[1]), lengths, self.blocks, room)

    def step(
        self, q, k: Branches, v: Branches, state: NativeState, position: Int[Array, " B"], *,
        scale: float,
    ):  # fmt: skip
        """(what one more token of each row sees, the state with it)."""
        state = state.with_token(k, v, position, self.blocks, self.compress)
        blocks, at = self.blocks, position[:, None]
        number = -(-state.keys.shape[1] // blocks.size)
        choosing = pooling.Choosing(blocks.size, number, blocks.count, blocks.first, blocks.local)
        problem = pooling.Problem(blocks.length, blocks.stride, scale, choosing)
        summaries = state.summary_keys, state.summary_values
        compressed, _, chosen = pooled(pooling.Operands(q, *summaries, at), problem)
        assert chosen is not None
        operands = selecting.Operands(q, state.keys, state.values, chosen, at)
        found, _ = selected(operands, selecting.Problem(blocks.size, scale))
        window: Any = attention(
            q,
            state.window_keys,
            state.window_values,
            mask=Causal() & Window(left=blocks.window - 1, right=0),
            scale=scale,
            q_positions=at,
            kv_positions=state.window_positions(position),
        )
        gates = jnp.stack([gate for gate in self.gates if gate is not None])[..., None]
        return (gates * jnp.stack([compressed, found, window])).sum(0).astype(q.dtype), state


class Summary(nnx.Module):
    """phi: the mean of a run plus a small MLP of it, tokens marked by their place in the run."""

    def __init__(self, config: DecoderConfig, length: int, rngs: nnx.Rngs, dtype):
        dim = config.head_dim
        inner = 2 * dim
        self.places = named(jnp.zeros((length, dim), dtype), ("run", "head_dim"))
        shape, names = (length, dim, inner), ("run", "head_dim", "summary")
        self.up = parameter(rngs, names, shape, dtype, fan_in=length * dim)
        # It begins as the mean, which already tells where to look.
        self.down = named(jnp.zeros((inner, dim), dtype), ("summary", "head_dim"))

    def __call__(self, run: Float[Array, "B Nc length Hk D"]) -> Float[Array, "B Nc Hk D"]:
        places, up, down = (x[...].astype(run.dtype) for x in (self.places, self.up, self.down))
        marked = run + places[None, None, :, None]
        inner = jax.nn.gelu(jnp.einsum("bnlhd,ldi->bnhi", marked, up))
        return run.mean(2) + jnp.einsum("bnhi,id->bnhd", inner, down)


class NativeSparse(nnx.Module):
    """Attention projections with keys and values of their own for each branch, gates and phi.

    It stands in a decoder's layer where `Attention` stands. `config.native_sparse` has the sizes.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype):
        assert config.native_sparse is not None
        self.blocks = Blocks(**config.native_sparse.model_dump())
        width, dim, heads = config.width, config.head_dim, config.q_heads
        draw = functools.partial(parameter, rngs, dtype=dtype, fan_in=width)
        self.query = draw(("embed", "q_heads", "head_dim"), (width, heads, dim))
        names = ("embed", "branch", "kv_heads", "head_dim")
        self.key = draw(names, (width, 3, config.kv_heads, dim))
        self.value = draw(names, (width, 3, config.kv_heads, dim))
        self.gate = draw(("embed", "q_heads", "branch"), (width, heads, 3))
        self.gate_bias = named(jnp.zeros((heads, 3), dtype), ("q_heads", "branch"))
        out = ("q_heads", "head_dim", "embed")
        self.out = parameter(rngs, out, (heads, dim, width), dtype, fan_in=heads * dim)
        make = lambda: Summary(config, self.blocks.length, rngs, dtype)
        self.key_summary, self.value_summary = make(), make()
        norm = lambda: Norm(config, dim, "head_dim", dtype) if config.has_qk_norm else None
        self.query_norm, self.key_norm = norm(), norm()

    def __call__(self, x: Float[Array, "B T width"], look: Callable[..., tuple[Array, Any]]):
        """(what the layer adds, what `look(q, k, v, (this layer, gates))` handed on)."""
        q = jnp.einsum("bte,ehd->bthd", x, self.query[...].astype(x.dtype))
        k, v = (
            jnp.einsum("bte,echd->cbthd", x, weight[...].astype(x.dtype))
            for weight in (self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        logits = jnp.einsum("bte,ehc->bthc", x, self.gate[...].astype(x.dtype))
        logits = logits + self.gate_bias[...].astype(x.dtype)[None, None]
        seen, kept = look(q, Branches(*k), Branches(*v), (self, Gates.sigmoid(logits)))
        return jnp.einsum("bthd,hde->bte", seen, self.out[...].astype(x.dtype)), kept

    def native(self, gates: Gates, turn: Callable[[Array, Array], Array]) -> Native:
        """What attention has to know; `turn(x, positions)` rotates the summaries of keys."""

        def keys(run, positions):
            return turn(self.key_summary(run), positions)

        def values(run, positions):
            return self.value_summary(run)

        return Native(self.blocks, gates, (keys, values))
