"""Pages in the layout of ragged paged attention for TPUs (version 3), and back.

Its cache is one array [pages, page_size, 2 Hk / packing, packing, D]: keys and values of the heads
take turns, `packing` of them share 32 bits, and D is padded to 128.
"""

import jax.numpy as jnp
from jaxtyping import Array, Num

from xsake.errors import UnsupportedError

LANES = 128


def to_rpa(
    k: Num[Array, "P Hk page D"], v: Num[Array, "P Hk page Dv"]
) -> Num[Array, "P page W packing C"]:
    """Convert the pages of one layer."""
    if k.shape != v.shape or k.dtype != v.dtype:
        raise UnsupportedError(
            "rpa-layout",
            "this layout has keys and values of one shape and dtype",
            got=f"k {k.dtype} {k.shape}, v {v.dtype} {v.shape}",
        )
    pages, heads, size, dim = k.shape
    packing = 4 // k.dtype.itemsize
    both = jnp.stack([k, v], axis=2)  # [P, Hk, 2, page, D]
    both = jnp.moveaxis(both, 3, 1).reshape(pages, size, 2 * heads, dim)
    both = jnp.pad(both, ((0, 0), (0, 0), (0, -2 * heads % packing), (0, -dim % LANES)))
    return both.reshape(pages, size, -1, packing, both.shape[-1])


def from_rpa(
    kv: Num[Array, "P page W packing C"], *, kv_heads: int, head_dim: int
) -> tuple[Num[Array, "P Hk page D"], Num[Array, "P Hk page D"]]:
    """Convert back; returns `(k, v)` of one layer."""
    pages, size = kv.shape[:2]
    both = kv.reshape(pages, size, -1, kv.shape[-1])[:, :, : 2 * kv_heads, :head_dim]
    both = jnp.moveaxis(both.reshape(pages, size, kv_heads, 2, head_dim), 1, 3)
    return both[:, :, 0], both[:, :, 1]
