"""`xsake.BlockSparseAttention`: configured attention callable, optionally on a mesh."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from xsake.attention.block_sparse import attention_with_lse
from xsake.attention.sharded import attention_on_mesh
from xsake.attention.validation import (
    DEFAULT_BLOCK,
    LogitsSpec,
    MaskSpec,
    check_block_size,
    no_runtime_typecheck,
)
from xsake.errors import ArgumentError
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


class AttentionOutput(NamedTuple):
    """Output and log-sum-exp of attention."""

    out: Float[Array, "B Tq Hq Dv"]
    lse: Float[Array, "B Tq Hq"]


@dataclasses.dataclass(frozen=True)
class BlockSparseAttention:
    """Immutable, hashable callable: `xsake.attention` with a fixed configuration.

    Args:
        dtype: q, k and v are cast to it; None keeps them.
        scale: factor on q.k; None is 1 / sqrt(D).
        block_q, block_kv: block sizes for calls without a layout.
        implementation: "mosaic_gpu_hopper", "mosaic_gpu", "mosaic_tpu", "xla" or "reference"; None
            selects one for the platform.
        mesh: shards the batch over its axes "data" and "fsdp" and heads over "tensor", if present;
            other axes replicate the work.

    Example:
        >>> import jax, xsake
        >>> attend = xsake.BlockSparseAttention(dtype="bfloat16", block_q=64, block_kv=64)
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 300, 4, 32))
        >>> out, lse = attend(q, k, v, mask=xsake.masks.Causal())
        >>> out.dtype, out.shape, lse.shape
        (dtype(bfloat16), (1, 300, 4, 32), (1, 300, 4))
    """

    dtype: DTypeLike | None = None
    scale: float | None = None
    block_q: int = DEFAULT_BLOCK
    block_kv: int = DEFAULT_BLOCK
    implementation: str | None = None
    mesh: Mesh | None = None

    def __post_init__(self):
        if self.dtype is not None and not jnp.issubdtype(self.dtype, jnp.floating):
            raise ArgumentError(
                "attention needs a floating-point dtype",
                got=f"dtype={self.dtype}",
                expected="float32, bfloat16, float16 or float64",
                fix="None keeps the dtype of the arrays",
            )
        for name in ("block_q", "block_kv"):
            check_block_size(name, getattr(self, name))

    @no_runtime_typecheck
    def __call__(
        self,
        q: Float[Array | np.ndarray, "B Tq Hq D"],
        k: Float[Array | np.ndarray, "B Tk Hk D"],
        v: Float[Array | np.ndarray, "B Tk Hk Dv"],
        *,
        mask: AbstractMask | None = None,
        layout: BlockLayout | None = None,
        bias: Float[Array | np.ndarray, "Bb Hb Tq Tk"] | None = None,
        sinks: Float[Array | np.ndarray, "Hq *S"] | None = None,
        softcap: float | None = None,
        q_segment_ids=None,
        kv_segment_ids=None,
        q_positions=None,
        kv_positions=None,
    ) -> AttentionOutput:
        """Compute attention; arguments as for `xsake.attention`.

        Returns:
            `AttentionOutput(out, lse)`: [B, Tq, Hq, Dv] and [B, Tq, Hq].
        """
        masking = MaskSpec(
            mask,
            layout,
            q_segment_ids,
            kv_segment_ids,
            q_positions,
            kv_positions,
            self.block_q,
            self.block_kv,
        )
        logits = LogitsSpec(self.scale, softcap, bias, sinks)
        if self.dtype is not None:
            q, k, v = (jnp.asarray(x).astype(self.dtype) for x in (q, k, v))
        if self.mesh is not None:
            result = attention_on_mesh(self.mesh, q, k, v, masking, logits, self.implementation)
        else:
            result = attention_with_lse(q, k, v, masking, logits, self.implementation)
        return AttentionOutput(*result)
