"""Language models that run on XSAKE attention: a Flax NNX decoder and its checkpoints."""

from xsake.model.attend import Attend, Dense, LayerCall, Listed, Masked
from xsake.model.cache import Cache
from xsake.model.config import DecoderConfig, LayerKind, NativeSparseSizes, Rope
from xsake.model.decoder import Decoder
from xsake.model.native_sparse import NativeSparse

__all__ = [
    "Attend", "Cache", "Decoder", "DecoderConfig", "Dense", "LayerCall", "LayerKind", "Listed",
    "Masked", "NativeSparse", "NativeSparseSizes", "Rope",
]  # fmt: skip
