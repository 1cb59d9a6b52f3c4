"""Scores of pages by labels, by the native kernels of the distribution `xsake-cpu`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from xsake.kernels import native_library
from xsake.kernels.page_labels.types import LabelInputs

MAX_COMPONENTS = MAX_TOKENS = 256


def unsupported_reason(inputs: LabelInputs, config: Any, platform: str) -> str | None:
    """Why this backend cannot serve the call; None if it can."""
    sizes = inputs.q.shape[3], inputs.page_size
    if sizes[0] > MAX_COMPONENTS or sizes[1] > MAX_TOKENS:
        return (
            f"it takes up to {MAX_COMPONENTS} components and pages of {MAX_TOKENS} tokens, "
            f"these are {sizes[0]} and {sizes[1]}"
        )
    return None


def forward(inputs: LabelInputs, config: Any, platform: str) -> Float[Array, "B Hk G N"]:
    """See `label_scores`."""
    shape = *inputs.q.shape[:3], inputs.page_table.shape[1]
    (scores,) = native_library.call(
        "page_labels", inputs, [jax.ShapeDtypeStruct(shape, jnp.float32)]
    )
    return scores
