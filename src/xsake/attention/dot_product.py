"""`xsake.dot_product_attention`: the signature of `jax.nn.dot_product_attention`."""

from typing import Any, Literal, cast

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from xsake.attention.block_sparse import attention
from xsake.attention.types import Implementation
from xsake.kernels.validation import no_runtime_typecheck


@no_runtime_typecheck
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention`, computed by `xsake.attention`.

    Blocks without an allowed pair are skipped. Two differences: a query that may attend to no key
    gets zeros, where `jax.nn` averages all values; `implementation` names a backend of XSAKE, so
    "cudnn" raises.

    Args:
        query: [B, T, N, H] or [T, N, H].
        key: [B, S, K, H]; each of the K kv heads serves N / K query heads.
        value: [B, S, K, H].
        bias: added to the logits; broadcasts to [B, N, T, S].
        mask: True where a query may attend to a key; broadcasts to [B, N, T, S].
        scale: factor on the products; None is 1 / sqrt(H).
        is_causal: whether a query attends only to keys up to its own index.
        query_seq_lengths: [B] queries of each sequence; the others get zeros.
        key_value_seq_lengths: [B] keys of each sequence; the others are masked.
        local_window_size: (left, right) tokens around the query, or one number for both.
        implementation: as for `xsake.attention`.
        return_residual: also return the log-sum-exp, [B, T, N].

    Returns:
        The output, with the shape of `query`, or `(output, log-sum-exp)`.

    Example:
        >>> import jax, xsake
        >>> q = k = v = jax.random.normal(jax.random.key(0), (2, 300, 4, 64))
        >>> xsake.dot_product_attention(q, k, v, is_causal=True).shape
        (2, 300, 4, 64)
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    q_ids = kv_ids = None
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        q_ids = _mark_padding(query_seq_lengths, query)
        kv_ids = _mark_padding(key_value_seq_lengths, key)
    return attention(
        query,
        key,
        value,
        bias=None if bias is None else jnp.asarray(bias),
        mask=None if mask is None else jnp.asarray(mask),
        scale=scale,
        is_causal=is_causal,
        window=local_window_size,
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        implementation=cast(Implementation, implementation),  # "cudnn" is refused
        return_lse=return_residual,
    )


def _mark_padding(lengths: ArrayLike | None, x: Array) -> Array:
    """Segment ids [B, T]: 0 for tokens of a sequence, -1 for padding."""
    batch, tokens = (1, *x.shape)[-4:-2]
    lengths = tokens if lengths is None else jnp.asarray(lengths).reshape(-1, 1)
    ids = jnp.where(jnp.arange(tokens)[None] < lengths, 0, -1)
    return jnp.broadcast_to(ids, (batch, tokens))
