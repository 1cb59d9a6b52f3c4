"""Configuration of a decoder: sizes, norms, positions and layer kinds."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from xsake import indexed, nsa
from xsake._schema import Frozen
from xsake.masks import AbstractMask, Causal, Window

Size = Annotated[int, Field(ge=1, le=2**24)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LinearScaling(Frozen):
    """Linear RoPE scaling: all frequencies divided by `factor`."""

    kind: Literal["linear"] = "linear"
    factor: Above0


class Llama3Scaling(Frozen):
    """Llama 3.1 RoPE scaling: long wavelengths scaled by `factor`, short ones kept."""

    kind: Literal["llama3"] = "llama3"
    factor: Above0
    low_factor: Above0 = Field(description="wavelengths above original_context / this are scaled")
    high_factor: Above0 = Field(description="wavelengths below original_context / this are kept")
    original_context: Size

    @model_validator(mode="after")
    def _check_order(self) -> "Llama3Scaling":
        if self.low_factor >= self.high_factor:
            raise ValueError(f"{self.low_factor=} must be below {self.high_factor=}")
        return self


class YarnScaling(Frozen):
    """YaRN RoPE scaling: high frequencies are kept, low ones scaled."""

    kind: Literal["yarn"] = "yarn"
    factor: Above0
    original_context: Size
    beta_fast: Above0 = Field(default=32.0, description="rotations above which a dimension is kept")
    beta_slow: Above0 = Field(
        default=1.0, description="rotations below which a dimension is scaled"
    )
    attention_factor: Above0 = Field(description="multiplies rotated queries and keys")
    is_truncated: bool = Field(
        default=True, description="round the ends of the ramp to whole dimensions"
    )


SCALINGS: dict[str, Any] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


class Rope(Frozen):
    """Rotary position embedding, half-split: dimension i is paired with dimension i + D/2."""

    base: Above0 = 10000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = Field(
        default=None, discriminator="kind"
    )


class LayerKind(Frozen):
    """Properties that may differ between the layers of a model."""

    window: Size | None = Field(
        default=None,
        description="sliding window in tokens, including the query itself; None: full attention",
    )
    rope: Rope | None = None

    @property
    def mask(self) -> AbstractMask:
        """Mask of such a layer."""
        if self.window is None:
            return Causal()
        return Causal() & Window(left=self.window - 1, right=0)


NativeSparseSizes = nsa.Config
"""Earlier name of `xsake.nsa.Config`."""


class IndexerConfig(Frozen):
    """Attention to blocks that an indexer selects: MSA; without a dimension MoBA."""

    blocks: indexed.Config = indexed.Config()
    dim: Size | None = Field(
        default=64, description="of index queries and keys; None: those of the attention (MoBA)"
    )

    @model_validator(mode="after")
    def _check_index(self) -> "IndexerConfig":
        if self.dim is None and (self.blocks.is_shared or self.blocks.has_relu):
            raise ValueError("without an index dimension, every kv head has its own index")
        if self.dim is not None and self.dim % 2:
            raise ValueError(f"rotary positions require an even {self.dim=}")
        return self


class DecoderConfig(Frozen):
    """A decoder-only transformer of the Llama or the GPT-2 family; no weights, no dtype.

    Example:
        >>> from xsake.model import DecoderConfig
        >>> DecoderConfig.tiny().head_dim
        8
    """

    vocab_size: Size
    width: Size = Field(description="of the residual stream")
    mlp_width: Size
    layers: Annotated[int, Field(ge=1, le=1024)]
    q_heads: Size
    kv_heads: Size
    head_dim: Size
    context: Size = Field(description="maximum number of positions")
    kinds: tuple[LayerKind, ...] = (LayerKind(rope=Rope()),)
    kind_of_layer: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        description="index into `kinds` per layer; None: all layers have the first kind",
    )
    has_learned_positions: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: Above0 = 1e-5
    norm_offset: float = Field(default=0.0, description="added to norm weights (Gemma: 1)")
    has_qk_norm: bool = False
    has_post_norms: bool = Field(default=False, description="norms after attention and MLP as well")
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    is_gated: bool = True
    is_tied: bool = True
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    embedding_scale: Above0 = 1.0
    query_scale: Above0 | None = Field(default=None, description="None: 1 / sqrt(head_dim)")
    attention_softcap: Above0 | None = None
    logit_softcap: Above0 | None = None
    indexer: IndexerConfig | None = Field(
        default=None, description="attention to blocks that an indexer selects"
    )
    native_sparse: nsa.Config | None = Field(
        default=None, description="compressed, selected and sliding-window branches"
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> "DecoderConfig":
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads=} must be a multiple of {self.kv_heads=}")
        if not self.kinds:
            raise ValueError("kinds must not be empty")
        if self.kind_of_layer is not None and len(self.kind_of_layer) != self.layers:
            raise ValueError(f"{len(self.kind_of_layer)=} must be {self.layers=}")
        if any(kind >= len(self.kinds) for kind in self.layer_kinds):
            raise ValueError(f"kind_of_layer has an index beyond the {len(self.kinds)} kinds")
        if self.head_dim % 2 and any(kind.rope for kind in self.kinds):
            raise ValueError(f"rotary positions require an even {self.head_dim=}")
        if self.native_sparse is not None or self.indexer is not None:
            self._check_native()
        return self

    def _check_native(self) -> None:
        if self.native_sparse is not None and self.indexer is not None:
            raise ValueError("native sparse attention and an indexer exclude each other")
        others = self.attention_softcap, *(kind.window for kind in self.kinds)
        has_bias = self.native_sparse is not None and (self.has_qkv_bias or self.has_out_bias)
        if any(x is not None for x in others) or has_bias:
            raise ValueError(
                "native sparse attention does not support windows of layers, softcap or biases, "
                "an indexer neither windows nor softcap"
            )

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Index into `kinds` of every layer."""
        return (0,) * self.layers if self.kind_of_layer is None else self.kind_of_layer

    @property
    def scale(self) -> float:
        """Scale of the attention scores."""
        return 1 / math.sqrt(self.head_dim) if self.query_scale is None else self.query_scale

    @classmethod
    def tiny(cls, **changes) -> "DecoderConfig":
        """Return a small Llama with 3 layers for tests and examples, with overrides."""
        sizes = {
            "vocab_size": 96, "width": 48, "mlp_width": 64, "layers": 3,
            "q_heads": 6, "kv_heads": 2, "head_dim": 8, "context": 256,
        }  # fmt: skip
        return cls.model_validate(sizes | changes)
