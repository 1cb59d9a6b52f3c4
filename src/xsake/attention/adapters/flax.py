"""`attention_fn` for the multi-head attention layers of flax, both `nnx` and `linen`.

Nothing of flax is imported: its layers hand over plain arrays.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xsake.attention.adapters.boolean_masks import arguments_of
from xsake.attention.operator import BlockSparseAttention
from xsake.errors import ShapeError, UnsupportedError
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask, Causal, Full

_PRECISIONS = (None, "default", "high", "highest", *jax.lax.Precision)


def attention_fn(
    *,
    mask: AbstractMask | None = None,
    layout: BlockLayout | None = None,
    softcap: float | None = None,
    operator: BlockSparseAttention = BlockSparseAttention(),  # noqa: B008 (frozen)
) -> Callable[..., jax.Array]:
    """A function that flax calls in place of its own dot-product attention.

    It honours what the layer passes: `mask` and `bias` arrays, `is_causal`, `dtype`. What it cannot
    honour raises: attention dropout while training, sown attention weights, einsum overrides. A
    query that may see nothing gets zeros, where flax averages over all values.

    Args:
        mask: who may see whom, on top of what the layer passes.
        layout: the blocks to compute; None derives them from the mask.
        softcap: as for `xsake.attention`.
        operator: block sizes, scale, implementation, mesh.

    Returns:
        A value for the `attention_fn` of `nnx.MultiHeadAttention` and of linen's
        `MultiHeadDotProductAttention` or `MultiHeadAttention`.

    Example:
        >>> from flax import nnx
        >>> from xsake.attention.adapters.flax import attention_fn
        >>> from xsake.masks import Causal, Window
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0),
        ...     attention_fn=attention_fn(mask=Causal() & Window(left=63, right=0)))
        >>> layer(jnp.ones((2, 100, 32))).shape
        (2, 100, 32)
    """
    return _Attention(mask, layout, softcap, operator)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """`xsake.attention` with the arguments of flax's `dot_product_attention`."""

    rule: AbstractMask | None
    layout: BlockLayout | None
    softcap: float | None
    operator: BlockSparseAttention

    # linen passes only arguments that are named here, so each one that could matter is.
    def __call__(
        self,
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        is_causal=False,
        force_fp32_for_softmax=False,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
        input_positions=None,
    ):
        if dropout_rate > 0 and not deterministic:
            raise _refusal("attention dropout", f"{dropout_rate=}", "dropout_rate=0")
        if precision not in _PRECISIONS:
            raise _refusal("another precision than float32's", f"{precision=}", "precision=None")
        refused = {
            "sown attention weights": module,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
            "input_positions": input_positions,
        }
        for what, given in refused.items():
            if given is not None:
                raise _refusal(what, type(given).__name__, "None")
        query, key, value = _promoted(query, key, value, dtype)
        _check_position(self.rule, self.layout, query, key)
        arguments = _merged(query, key, bias, mask, self.softcap)
        rules = [self.rule, arguments.pop("mask", None), Causal() if is_causal else None]
        out = self.operator(
            *(_flat(x) for x in (query, key, value)),
            mask=_all_of(rules),
            layout=self.layout,
            softcap=self.softcap,
            **arguments,
        ).out
        return out.reshape(*query.shape[:-1], value.shape[-1])


def _promoted(query, key, value, dtype):
    """One dtype for all three: the given one, or the widest among them."""
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    return tuple(x.astype(dtype) for x in (query, key, value))


def _flat(x):
    """[batch..., T, H, D] -> [B, T, H, D]."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _merged(query, key, bias, mask, softcap: float | None) -> dict[str, Any]:
    """The layer's arrays as arguments of `xsake.attention`."""
    shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    flat = (math.prod(shape[:-3]), *shape[-3:])
    arguments: dict[str, Any] = {}
    if mask is not None:
        arguments = arguments_of(_flat_logits("mask", mask, shape), flat, softcap)
    if bias is not None:
        bias = _flat_logits("bias", bias, shape)
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], *flat[2:]))
        arguments["bias"] = bias + arguments.get("bias", jnp.zeros((), bias.dtype))
    return arguments


def _flat_logits(name: str, x, shape: tuple[int, ...]):
    """An array that broadcasts to [batch..., H, Tq, Tk] as [B or 1, H or 1, Tq or 1, Tk or 1]."""
    if x.ndim > len(shape):
        raise ShapeError(f"the {name} has too many axes", got=x.shape, expected=shape)
    x = x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
    if math.prod(x.shape[:-3]) > 1 and x.shape[:-3] != shape[:-3]:
        x = jnp.broadcast_to(x, (*shape[:-3], *x.shape[-3:]))
    return _flat(x)


def _all_of(rules: list[AbstractMask | None]) -> AbstractMask | None:
    joint = None
    for rule in rules:
        if rule is not None:
            joint = rule if joint is None else joint & rule
    return joint


def _check_position(rule: AbstractMask | None, layout: BlockLayout | None, query, key) -> None:
    """A cached decode step hides from `attention_fn` where its query stands."""
    alone = query.shape[-3] == 1 < key.shape[-3]
    if alone and (layout is not None or rule not in (None, Full())):
        raise UnsupportedError(
            "the position of a single query among many keys is not known here",
            got=f"{layout if rule is None else rule!r} with 1 query and {key.shape[-3]} keys",
            expected="attention_fn() without a rule for cached decoding",
            fix="decode with xsake.attention(..., q_positions=...), or leave the rule to flax",
        )


def _refusal(what: str, got: str, expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"xsake's attention_fn does not support {what}",
        got=got,
        expected=expected,
        fix="change the layer's setting, or use flax's own attention for this layer",
    )
