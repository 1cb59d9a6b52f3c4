"""Decoder language models (Flax NNX) on XSAKE attention, and their checkpoints."""

from xsake.attention.layer_call import AttentionFn, LayerCall
from xsake.model.attend import DenseAttention, LayoutAttention, MaskedAttention
from xsake.model.cache import KVCache
from xsake.model.config import DecoderConfig, LayerKind, NativeSparseSizes, Rope
from xsake.model.decoder import Decoder
from xsake.model.nsa_layer import NativeSparse

__all__ = [
    "AttentionFn", "Decoder", "DecoderConfig", "DenseAttention", "KVCache", "LayerCall",
    "LayerKind", "LayoutAttention", "MaskedAttention", "NativeSparse", "NativeSparseSizes", "Rope",
]  # fmt: skip
