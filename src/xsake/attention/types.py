"""Arguments of an attention call."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Bool

from xsake.masks import AbstractMask

DEFAULT_BLOCK = 128
AnyArray = Array | np.ndarray | jax.ShapeDtypeStruct

BackendName = Literal[
    "mosaic_gpu_hopper", "mosaic_gpu", "mosaic_tpu", "native_cpu", "xla", "reference"
]
type Implementation = BackendName | Sequence[BackendName] | None
type Mask = AbstractMask | Bool[Array | np.ndarray, "..."] | str | None


def reshape(x: Any, *shape: int) -> Any:
    """`x.reshape(shape)`; abstract arrays stay abstract."""
    is_abstract = isinstance(x, jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(shape, x.dtype) if is_abstract else x.reshape(shape)


@dataclasses.dataclass(frozen=True)
class AttentionArgs:
    """Keyword arguments of `xsake.attention`, not yet validated."""

    mask: Any = None
    is_causal: Any = False
    window: Any = None
    layout: Any = None
    block_size: Any = None
    bias: Any = None
    sinks: Any = None
    softcap: Any = None
    scale: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    q_positions: Any = None
    kv_positions: Any = None
