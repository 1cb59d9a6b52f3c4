"""Multi-head attention as an equinox module, with the API of `equinox.nn.MultiheadAttention`."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from xsake.attention.operator import BlockSparseAttention
from xsake.errors import ShapeError
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Channel sizes of a `MultiheadAttention`.

    Args:
        query: channels of the query input.
        key: channels of the key input; None: `query`.
        value: channels of the value input; None: `query`.
        output: channels of the output; None: `query`.
        qk: channels per head of queries and keys; None: `query // heads`.
        vo: channels per head of values; None: `query // heads`.
    """

    query: int
    key: int | None = None
    value: int | None = None
    output: int | None = None
    qk: int | None = None
    vo: int | None = None


class MultiheadAttention(eqx.Module):
    """Projections around `xsake.attention` with grouped kv heads; unbatched, use `jax.vmap`.

    Attention dropout is not supported. A fully masked query gets zeros before the output
    projection.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from xsake.attention.adapters.equinox import MultiheadAttention
        >>> from xsake.masks import Causal
        >>> layer = MultiheadAttention(4, 32, num_kv_heads=2, key=jax.random.key(0))
        >>> x = jnp.ones((100, 32))
        >>> layer(x, x, x, Causal()).shape
        (100, 32)
    """

    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    attend: BlockSparseAttention = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        sizes: int | Sizes,
        *,
        num_kv_heads: int | None = None,
        use_bias: bool = False,
        attend: BlockSparseAttention = BlockSparseAttention(),  # noqa: B008 (frozen)
        dtype=None,
        key: PRNGKeyArray,
    ):
        """Initialize the projections.

        Args:
            num_heads: query heads.
            sizes: channels of the input, or `Sizes`.
            num_kv_heads: kv heads, a divisor of `num_heads`; None: `num_heads`.
            use_bias: whether projections add a bias.
            attend: block sizes, scale, implementation.
            dtype: of the parameters.
            key: PRNG key.
        """
        sizes = Sizes(sizes) if isinstance(sizes, int) else sizes
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % kv_heads:
            raise ShapeError(
                "equinox-heads",
                "query heads must be a multiple of kv heads",
                got=f"{num_heads=}, {num_kv_heads=}",
                expected=f"kv heads that divide {num_heads}",
                fix="each kv head serves num_heads / num_kv_heads query heads",
            )
        resolve = lambda size, default: default if size is None else size
        qk, vo = (resolve(size, sizes.query // num_heads) for size in (sizes.qk, sizes.vo))
        widths = (
            (sizes.query, num_heads * qk),
            (resolve(sizes.key, sizes.query), kv_heads * qk),
            (resolve(sizes.value, sizes.query), kv_heads * vo),
            (num_heads * vo, resolve(sizes.output, sizes.query)),
        )
        self.query_proj, self.key_proj, self.value_proj, self.output_proj = (
            eqx.nn.Linear(*width, use_bias=use_bias, dtype=dtype, key=each)
            for width, each in zip(widths, jax.random.split(key, 4), strict=True)
        )
        self.num_heads, self.num_kv_heads, self.attend = num_heads, kv_heads, attend

    def __call__(
        self,
        query: Float[Array, "Tq Cq"],
        key_: Float[Array, "Tk Ck"],
        value: Float[Array, "Tk Cv"],
        mask: AbstractMask | Bool[Array, "... Tq Tk"] | None = None,
        *,
        layout: BlockLayout | None = None,
        process_heads: Callable | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> Float[Array, "Tq Co"]:
        """Compute attention of `query` to `key_` and `value`.

        Args:
            query: [Tq, channels].
            key_: [Tk, channels].
            value: [Tk, channels].
            mask: a mask of `xsake.masks`, or booleans [Tq, Tk] or [heads, Tq, Tk].
            layout: blocks to compute; None derives them from the mask.
            process_heads: `(q, k, v) -> (q, k, v)` on [T, heads, size], e.g. rotary embeddings.
            key: unused, for compatibility with equinox.
            inference: unused, for compatibility with equinox.

        Returns:
            [Tq, output channels].
        """
        projections = (
            (self.query_proj, query, self.num_heads),
            (self.key_proj, key_, self.num_kv_heads),
            (self.value_proj, value, self.num_kv_heads),
        )
        heads = tuple(_split(jax.vmap(f)(x), number) for f, x, number in projections)
        if process_heads is not None:
            heads = process_heads(*heads)
        out = self.attend(*heads, mask=mask, layout=layout)
        return jax.vmap(self.output_proj)(jnp.reshape(out, (query.shape[0], -1)))


def _split(x, heads: int):
    return x.reshape(x.shape[0], heads, -1)
