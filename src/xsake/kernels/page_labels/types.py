"""Arrays of a call that scores pages by labels."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt8


class LabelInputs(NamedTuple):
    """Queries, labels of the keys of a pool of pages, and the pages of each sequence.

    A code is an integer from -7 to 7, stored plus 8 in 4 bits: byte r of a token holds component
    2 r in its low and 2 r + 1 in its high half. A component of a key is code times factor.
    """

    q: Float[Array, "B Hk G R"]
    codes: UInt8[Array, "P Hk R/2 page"]
    factor: Float[Array, "P Hk R"]
    page_table: Int[Array, "B N"]  # negative: no page
    lengths: Int[Array, " B"]  # tokens of each sequence

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.codes.shape[3]
