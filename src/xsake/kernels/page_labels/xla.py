"""Scores of pages by labels in plain XLA."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from xsake.kernels.page_labels.types import LabelInputs


def forward(inputs: LabelInputs, config: Any, platform: str) -> Float[Array, "B Hk G N"]:
    """See `label_scores`."""
    page = jnp.maximum(inputs.page_table, 0)
    # Arrays in memory: fused, XLA gathers and unpacks them again for every use.
    codes, factor = jax.lax.optimization_barrier((inputs.codes[page], inputs.factor[page]))
    q = inputs.q[:, None] * factor.astype(jnp.float32)[:, :, :, None]  # [B, N, Hk, G, R]
    numbers = jnp.stack([codes & 15, codes >> 4], axis=-2).astype(jnp.float32)
    numbers = numbers.reshape(*codes.shape[:3], -1, codes.shape[-1])  # [B, N, Hk, R, page]
    q, numbers = jax.lax.optimization_barrier((q, numbers))
    s = jnp.einsum("bnkgr,bnkrs->bnkgs", q, numbers - 8)
    position = jnp.arange(page.shape[1] * inputs.page_size).reshape(1, -1, inputs.page_size)
    exists = (position < inputs.lengths[:, None, None]) & (inputs.page_table >= 0)[..., None]
    s = jnp.where(exists[:, :, None, None], s, -jnp.inf)
    return jnp.moveaxis(jax.nn.logsumexp(s, axis=-1), 1, 3)
