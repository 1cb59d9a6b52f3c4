"""Attention layer with a block indexer: projections of the index, prefill, decoding over pages."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from xsake import indexed
from xsake.attention.layer_call import LayerCall
from xsake.errors import ArgumentError, UnsupportedError
from xsake.indexed.api import Index
from xsake.model.config import DecoderConfig
from xsake.model.layers import Attention, Norm, init_param


@dataclasses.dataclass(frozen=True, eq=False)
class IndexedCall:
    """Attention of one layer call to the blocks that its indexer selects."""

    config: indexed.Config
    index: Index | None  # of the new tokens; None: queries and keys of the attention

    @property
    def index_k(self) -> Float[Array, "B T 1 Di"] | None:
        """What a cache keeps for later tokens."""
        return None if self.index is None else self.index.k

    def __call__(self, q, k, v, call: LayerCall, mesh: Mesh | None = None):
        """Compute attention for sequences from position 0, or for the last tokens of a cache."""
        if call.segment_ids is not None or (call.q_positions is not None and call.pages is None):
            raise UnsupportedError(
                "indexed-position",
                "attention with an indexer in a model requires sequences from position 0",
                got="positions or segment_ids", expected="neither",
                fix="use one row per sequence; for packed ones: xsake.indexed.attention",
            )  # fmt: skip
        index, positions = self._whole_index(q, k, call), call.q_positions
        if positions is not None:
            positions = jnp.broadcast_to(positions, q.shape[:2])
        options = {"config": self.config, "q_positions": positions}
        if call.pages is None or q.shape[1] > 1:
            return indexed.attention(
                q, k, v, index.q, index.k, scale=call.scale, mesh=mesh, **options
            )
        blocks = indexed.select_blocks(index.q, index.k, kv_heads=k.shape[2], **options)
        pages = _list_pages(blocks[:, 0], self.config.size, call.pages)
        return call.pages.attend(q, pages=pages, scale=call.scale)

    def distillation_loss(
        self, q, k, call: LayerCall, *, is_sparse: bool = False
    ) -> Float[Array, "B T Hg"]:
        """Return the loss that trains the indexer: over all keys, or over the selected blocks."""
        if self.index is None:
            raise ArgumentError(
                "indexer-without-weights", "MoBA has no indexer to train", got="indexer.dim=None",
                expected="an index dimension",
            )  # fmt: skip
        x, blocks = self.index, None
        if is_sparse:
            blocks = indexed.select_blocks(x.q, x.k, kv_heads=k.shape[2], config=self.config)
        return indexed.distillation_loss(
            q, k, x.q, x.k, blocks=blocks, config=self.config, scale=call.scale
        )

    def _whole_index(self, q, k, call: LayerCall) -> Index:
        if self.index is None:
            return Index(*indexed.moba_index(q, k))
        if call.pages is None:
            return self.index
        return self.index._replace(k=call.pages.gather_index())


def _list_pages(blocks: Int[Array, "B Hk Ns"], size: int, at: Any) -> Int[Array, "B Hk S"]:
    """Return the pages of the blocks, -1 for those of unused slots."""
    number, page_size = at.page_table.shape[1], at.pages.page_size
    if size % page_size:
        raise ArgumentError(
            "indexed-pages", "a block must consist of whole pages of the cache",
            got=f"blocks of {size} tokens, pages of {page_size}",
        )  # fmt: skip
    per_block = size // page_size
    pages = blocks[..., None] * per_block + jnp.arange(per_block)[None, None, None]
    is_page = (blocks[..., None] >= 0) & (pages < number)
    return jnp.where(is_page, pages, -1).reshape(*blocks.shape[:2], -1)


class Indexer(nnx.Module):
    """Projections of index queries and of one index key, both normalized.

    Its gradient stops at its input: the language model is not trained by the loss of the index.
    """

    def __init__(self, config: DecoderConfig, heads: int, dim: int, rngs: nnx.Rngs, dtype):
        width, axis = config.width, "kv_heads" if heads == config.kv_heads else "index_heads"
        names = ("embed", axis, "head_dim")
        self.query = init_param(rngs, names, (width, heads, dim), dtype, fan_in=width)
        self.key = init_param(rngs, ("embed", "head_dim"), (width, dim), dtype, fan_in=width)
        self.query_norm = Norm(config, dim, "head_dim", dtype)
        self.key_norm = Norm(config, dim, "head_dim", dtype)

    def __call__(self, x: Float[Array, "B T width"]) -> Index:
        """Return the index before its rotation."""
        x = jax.lax.stop_gradient(x)
        q = jnp.einsum("bte,ehd->bthd", x, self.query[...].astype(x.dtype))
        k = x @ self.key[...].astype(x.dtype)
        return Index(self.query_norm(q), self.key_norm(k)[:, :, None])


class IndexedAttention(Attention):
    """Attention projections with those of a block indexer; `config.indexer` has the sizes.

    There is an index query per kv head, or one for all heads. Without an index dimension queries
    and keys are their own index (MoBA).
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype):
        super().__init__(config, rngs, dtype)
        assert config.indexer is not None
        self.index_config, dim = config.indexer.blocks, config.indexer.dim
        heads = 1 if self.index_config.is_shared else config.kv_heads
        self.indexer = None if dim is None else Indexer(config, heads, dim, rngs, dtype)

    def __call__(
        self, x: Float[Array, "B T width"], attention_fn: Callable[..., tuple[Array, Any]]
    ):
        """Return (output, auxiliary output of `attention_fn(q, k, v, (this layer, index))`)."""
        index = None if self.indexer is None else self.indexer(x)
        return super().__call__(x, attention_fn, (self, index))

    def make_call(self, index: Index | None, rotate: Callable[[Array], Array]) -> IndexedCall:
        """Return the attention of a call; `rotate(x)` rotates index queries and keys."""
        if index is not None:
            index = Index(rotate(index.q), rotate(index.k))
        return IndexedCall(self.index_config, index)
