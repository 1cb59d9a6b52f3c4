"""`xsake.BlockSparseAttention`: configured attention callable, optionally on a mesh."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from xsake.attention.block_sparse import attend
from xsake.attention.sharded import attention_on_mesh
from xsake.attention.types import DEFAULT_BLOCK, AttentionArgs, Implementation, Mask
from xsake.attention.validation import (
    canonicalize_args,
    check_block_size,
    make_output,
)
from xsake.errors import ArgumentError
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.validation import no_runtime_typecheck
from xsake.layout import BlockLayout


@dataclasses.dataclass(frozen=True)
class BlockSparseAttention:
    """Immutable, hashable callable: `xsake.attention` with a fixed configuration.

    Args:
        dtype: q, k and v are cast to it; None keeps them.
        scale: factor on q.k; None is 1 / sqrt(D).
        block_q, block_kv: block sizes for calls without a layout.
        implementation: as for `xsake.attention`.
        mesh: shards the batch over its axes "data" and "fsdp" and heads over "tensor", if present;
            other axes replicate the work.

    Example:
        >>> import jax, xsake
        >>> attend = xsake.BlockSparseAttention(dtype="bfloat16", block_q=64, block_kv=64)
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 300, 4, 32))
        >>> out = attend(q, k, v, is_causal=True)
        >>> out.dtype, out.shape
        (dtype(bfloat16), (1, 300, 4, 32))
    """

    dtype: DTypeLike | None = None
    scale: float | None = None
    block_q: int = DEFAULT_BLOCK
    block_kv: int = DEFAULT_BLOCK
    implementation: Implementation = None
    mesh: Mesh | None = None

    def __post_init__(self):
        if self.dtype is not None and not jnp.issubdtype(self.dtype, jnp.floating):
            raise ArgumentError(
                "operator-dtype",
                "attention needs a floating-point dtype",
                got=f"dtype={self.dtype}",
                expected="float32, bfloat16, float16 or float64",
                fix="None keeps the dtype of the arrays",
            )
        if isinstance(self.implementation, list):  # the operator is hashable
            object.__setattr__(self, "implementation", tuple(self.implementation))
        for name in ("block_q", "block_kv"):
            check_block_size(name, getattr(self, name))

    @no_runtime_typecheck
    def __call__(
        self,
        q: Float[Array | np.ndarray, "*B Tq Hq D"],
        k: Float[Array | np.ndarray, "*B Tk Hk D"],
        v: Float[Array | np.ndarray, "*B Tk Hk Dv"],
        *,
        mask: Mask = None,
        is_causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        layout: BlockLayout | None = None,
        bias: Float[Array | np.ndarray, "..."] | None = None,
        sinks: Float[Array | np.ndarray, "Hq *S"] | None = None,
        softcap: float | None = None,
        q_segment_ids=None,
        kv_segment_ids=None,
        q_positions=None,
        kv_positions=None,
        return_lse: bool = False,
    ) -> Any:
        """Compute attention; arguments and results as of `xsake.attention`."""
        block_size = (self.block_q, self.block_kv) if layout is None else None
        args = AttentionArgs(
            mask, is_causal, window, layout, block_size, bias, sinks, softcap, self.scale,
            q_segment_ids, kv_segment_ids, q_positions, kv_positions,
        )  # fmt: skip
        if self.dtype is not None:
            q, k, v = (jnp.asarray(x).astype(self.dtype) for x in (q, k, v))
        inputs, config, sinks = canonicalize_args(q, k, v, args)
        o, lse = self._attend(inputs, config, sinks)
        return make_output(q, o, lse, return_lse)

    def _attend(self, inputs: BlockSparseInputs, config: BlockSparseConfig, sinks: Any) -> Any:
        """Return `(o, lse)` of a validated call."""
        if self.mesh is None:
            return attend(inputs, config, self.implementation, sinks)
        return attention_on_mesh(self.mesh, inputs, config, self.implementation, sinks)
