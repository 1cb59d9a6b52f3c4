"""Dense definition of selected attention: truth at small sizes, O(Tq Tk) memory."""

import jax
import jax.numpy as jnp
from jax import Array

from xsake.kernels import reference_attention
from xsake.kernels.block_sparse.types import Gradients
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs


def forward(inputs: SelectedInputs, config: SelectedConfig, platform: str) -> tuple[Array, Array]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    return reference_attention.forward(*inputs[:3], visible(inputs, config), config.scale)[:2]


def backward(
    inputs: SelectedInputs, config: SelectedConfig, platform: str, *residuals: Array
) -> Gradients:
    """Gradients from (o, lse, do, dlse) by the formulas, over all pairs."""
    mask = visible(inputs, config)
    return reference_attention.backward(*inputs[:3], mask, residuals, config.scale)


def visible(inputs: SelectedInputs, config: SelectedConfig) -> Array:
    """bool [B, Hk, Tq, Tk]: the key's block is among the query's, and the key is not later."""
    tokens = inputs.k.shape[1]
    number = -(-tokens // config.block)
    named = jax.nn.one_hot(inputs.blocks, number, dtype=jnp.bool_).any(3)  # [B, Tq, Hk, Nk]
    listed = jnp.repeat(jnp.moveaxis(named, 2, 1), config.block, axis=3)[..., :tokens]
    causal = jnp.arange(tokens)[None, None, None] <= inputs.positions[:, None, :, None]
    return listed & causal
