"""Inputs and numbers of a call over pages."""

import dataclasses
from typing import NamedTuple

from jax import Array
from jaxtyping import Bool, Float, Int, Num

from xsake.kernels.validation import sum_dtype
from xsake.masks import AbstractMask


@dataclasses.dataclass(frozen=True)
class PagedConfig:
    """Numbers of a call: hashable, part of the key of a compiled program."""

    scale: float  # factor on q.k
    softcap: float | None
    mask: AbstractMask


class PagedInputs(NamedTuple):
    """Arrays of a call.

    A slot of a list is a page in memory and its number in the sequence: key i of page n is at
    position `n * page_size + i`. A negative page is an unused slot. Lists are per kv head, or one
    for all.
    """

    q: Float[Array, "B Tq Hq D"]
    k: Num[Array, "P Hk page D"]
    v: Num[Array, "P Hk page Dv"]
    page: Int[Array, "B Hl S"]
    number: Int[Array, "B Hl S"]
    is_partial: Bool[Array, "B Hl S"]  # whether the mask hides some pairs
    q_positions: Int[Array, "B Tq"]
    lengths: Int[Array, " B"]  # keys of each sequence
    k_scale: Float[Array, "P Hk"] | None = None  # factors of int8 keys and values
    v_scale: Float[Array, "P Hk"] | None = None

    @property
    def dtype(self):
        """Statistics and sums are float32 at least, float64 for float64 queries."""
        return sum_dtype(self.q.dtype)

    @property
    def page_size(self) -> int:
        """Keys of a page."""
        return self.k.shape[2]
