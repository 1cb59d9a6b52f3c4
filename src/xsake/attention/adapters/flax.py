"""`attention_fn` for the multi-head attention layers of flax, both `nnx` and `linen`.

flax is not imported: its layers pass plain arrays.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from xsake.attention.operator import BlockSparseAttention
from xsake.attention.types import AttentionArgs
from xsake.attention.validation import convert_booleans
from xsake.errors import ShapeError, UnsupportedError
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask, Full

_PRECISIONS = (None, "default", "high", "highest", *jax.lax.Precision)


def attention_fn(
    *,
    mask: AbstractMask | None = None,
    layout: BlockLayout | None = None,
    softcap: float | None = None,
    operator: BlockSparseAttention = BlockSparseAttention(),  # noqa: B008 (frozen)
) -> Callable[..., jax.Array]:
    """Return a replacement for flax's `dot_product_attention`.

    `mask` and `bias` arrays, `is_causal` and `dtype` of the layer are supported. Attention dropout
    in training, sown attention weights and einsum overrides raise. A fully masked query gets
    zeros, where flax averages over all values.

    Args:
        mask: intersected with the mask of the layer.
        layout: blocks to compute; None derives them from the mask.
        softcap: as for `xsake.attention`.
        operator: block sizes, scale, implementation, mesh.

    Returns:
        `attention_fn` of `nnx.MultiHeadAttention` and linen's `MultiHeadDotProductAttention` or
        `MultiHeadAttention`.

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
    return _AttentionFn(mask, layout, softcap, operator)


@dataclasses.dataclass(frozen=True)
class _AttentionFn:
    """`xsake.attention` with the arguments of flax's `dot_product_attention`."""

    rule: AbstractMask | None
    layout: BlockLayout | None
    softcap: float | None
    operator: BlockSparseAttention

    # linen passes only arguments that are named here.
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
            raise _unsupported_error("attention dropout", f"{dropout_rate=}", "dropout_rate=0")
        if precision not in _PRECISIONS:
            raise _unsupported_error(
                "precisions other than float32", f"{precision=}", "precision=None"
            )
        unsupported = {
            "sown attention weights": module,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
            "input_positions": input_positions,
        }
        for argument, setting in unsupported.items():
            if setting is not None:
                raise _unsupported_error(argument, type(setting).__name__, "None")
        query, key, value = _promote(query, key, value, dtype)
        _check_position(self.rule, self.layout, query, key)
        args = _convert_arrays(query, key, bias, mask, self)
        rules = [rule for rule in (self.rule, args.mask) if rule is not None]
        out = self.operator(
            *(_flatten_batch(x) for x in (query, key, value)),
            mask=functools.reduce(operator.and_, rules) if rules else None,
            is_causal=is_causal,
            layout=args.layout,
            bias=args.bias,
            softcap=self.softcap,
            q_segment_ids=args.q_segment_ids,
            kv_segment_ids=args.kv_segment_ids,
        )
        return out.reshape(*query.shape[:-1], value.shape[-1])


def _promote(query, key, value, dtype):
    """Cast to `dtype`, or to the common dtype if it is None."""
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    return tuple(x.astype(dtype) for x in (query, key, value))


def _flatten_batch(x):
    """Reshape [batch..., T, H, D] to [B, T, H, D]."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _convert_arrays(query, key, bias, mask, attend: _AttentionFn) -> AttentionArgs:
    """Convert the layer's arrays to arguments of `xsake.attention`."""
    shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    bias = None if bias is None else _flat_logits("bias", bias, shape)
    args = AttentionArgs(bias=bias, layout=attend.layout, softcap=attend.softcap)
    if mask is None:
        return args
    mask = _flat_logits("mask", mask, shape).astype(bool)
    blocks = min(attend.operator.block_q, shape[-2]), min(attend.operator.block_kv, shape[-1])
    flat = math.prod(shape[:-3]), *shape[-3:]
    return convert_booleans(dataclasses.replace(args, mask=mask), flat, blocks)


def _flat_logits(name: str, x, shape: tuple[int, ...]):
    """Reshape an array that broadcasts to [batch..., H, Tq, Tk] to 4 axes; sizes may be 1."""
    if x.ndim > len(shape):
        raise ShapeError("flax-axes", f"the {name} has too many axes", got=x.shape, expected=shape)
    x = x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
    if math.prod(x.shape[:-3]) > 1 and x.shape[:-3] != shape[:-3]:
        x = jnp.broadcast_to(x, (*shape[:-3], *x.shape[-3:]))
    return _flatten_batch(x)


def _check_position(rule: AbstractMask | None, layout: BlockLayout | None, query, key) -> None:
    """Raise for cached decoding with a mask: the position of the query is unknown."""
    is_decoding = query.shape[-3] == 1 < key.shape[-3]
    if is_decoding and (layout is not None or rule not in (None, Full())):
        raise UnsupportedError(
            "flax-decode-position",
            "the position of a single query is unknown in cached decoding",
            got=f"{layout if rule is None else rule!r} with 1 query and {key.shape[-3]} keys",
            expected="attention_fn() without mask and layout",
            fix="decode with xsake.attention(..., q_positions=...), or pass the mask to flax",
        )


def _unsupported_error(what: str, got: str, expected: str) -> UnsupportedError:
    return UnsupportedError(
        "flax-unsupported",
        f"xsake's attention_fn does not support {what}",
        got=got,
        expected=expected,
        fix="change the layer, or use flax's attention for it",
    )
