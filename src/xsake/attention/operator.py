"""`xsake.BlockSparseAttention`: attention configured once and called many times, on a mesh too."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from xsake.attention.arguments import DEFAULT_BLOCK, Rules, Scores, check_block, checks_itself
from xsake.attention.block_sparse import attend
from xsake.attention.sharded import attend_on_mesh
from xsake.errors import ArgumentError
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


class AttentionOutput(NamedTuple):
    """What attention gives: the output, and the log of the softmax denominator."""

    out: Float[Array, "B Tq Hq Dv"]
    lse: Float[Array, "B Tq Hq"]


@dataclasses.dataclass(frozen=True)
class BlockSparseAttention:
    """`xsake.attention` with the choices of a model fixed: an immutable, hashable callable.

    Args:
        dtype: q, k and v are cast to it; None leaves them.
        scale: factor on q.k; None is 1 / sqrt(D).
        block_q, block_kv: block sizes for calls without a layout.
        implementation: "mosaic_gpu_hopper", "mosaic_gpu", "mosaic_tpu", "xla" or "reference"; None
            picks for the platform.
        mesh: devices to spread the call over: the batch over its axis "data", heads over its axis
            "tensor", if it has them; other axes repeat the work.

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
                "attention computes in floating-point numbers",
                got=f"dtype={self.dtype}",
                expected="float32, bfloat16, float16 or float64",
                fix="None keeps the dtype of the arrays",
            )
        for name in ("block_q", "block_kv"):
            check_block(name, getattr(self, name))

    @checks_itself
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
        """Attention with this configuration; arguments as for `xsake.attention`.

        Returns:
            `AttentionOutput(out, lse)`: [B, Tq, Hq, Dv] and [B, Tq, Hq].
        """
        rules = Rules(
            mask,
            layout,
            q_segment_ids,
            kv_segment_ids,
            q_positions,
            kv_positions,
            self.block_q,
            self.block_kv,
        )
        scores = Scores(self.scale, softcap, bias, sinks)
        if self.dtype is not None:
            q, k, v = (jnp.asarray(x).astype(self.dtype) for x in (q, k, v))
        if self.mesh is not None:
            found = attend_on_mesh(self.mesh, q, k, v, rules, scores, self.implementation)
        else:
            found = attend(q, k, v, rules, scores, self.implementation)
        return AttentionOutput(*found)
