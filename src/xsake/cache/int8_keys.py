"""Certified page selection: int8 keys with proved bounds on the attention mass of every page.

Let `c` be the code of a key `k`, `f` the factors of its page, `Q = scale * q * f` componentwise and
u = 2^-24. Codes are nearest integers, so that |k - f c| <= (1/2 + 2^-15) f, and

    |scale * q.k - Q.c| <= (1/2 + 2^-15) |Q|_1.

The computed product of D terms errs by less than (D + 8) u sum(|Q_d c_d|), in any order of
summation, the rounding of scale * q and of Q included (Higham's gamma_n); |c| <= 127, so that
127 (2 D + 32) u |Q|_1 is more. Subnormal numbers may become zeros: 2^-100 is added to every |q_d|.
All keys of a page have the same bound e of the error, so that their log-sum-exp L errs by at most
e, and by its own rounding: `exp` and `log` are within 2^8 u on all supported devices, so that of n
keys is within u (2^12 + 4 n + 4 |L|). Sums over N pages of exp(L - max) are within u (2^11 + 2 N),
relatively. Intermediate results that overflow, and keys that are not finite, give -inf and inf.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from xsake.cache.pages import LayerPages, PagedKV
from xsake.cache.selectors import ForcedPages, PageSelector, Summaries

UNIT = 2.0**-24
MAX_CODE = 127
MIN_FACTOR = 2.0**-100  # above subnormal numbers, and so is its reciprocal
OVERFLOW = 2.0**127


class KeyCodes(NamedTuple):
    """Keys of pages in int8."""

    code: Int8[Array, "*n Hk page D"]
    factor: Float[Array, "*n Hk D"]


class PageBounds(NamedTuple):
    """Bounds of the log of the sum of `exp(scale * q.k)` over the keys of each page.

    Both are -inf for a page that does not exist.
    """

    lower: Float[Array, "B Hk G N"]
    upper: Float[Array, "B Hk G N"]

    def dropped_mass(self, is_read: Bool[Array, "B Hk N"]) -> Float[Array, "B Hk G"]:
        """Return an upper bound on the share of attention in pages that are not read."""
        least, most = self._weights()
        is_read = is_read[:, :, None]
        dropped = jnp.where(is_read, 0, most).sum(-1)
        return _share(dropped, jnp.where(is_read, least, 0).sum(-1), least.shape[-1])

    def count_within(
        self, order: Int[Array, "B Hk N"], eps: float | Float[Array, ""]
    ) -> Int[Array, "B Hk"]:
        """Return how many pages, in an order, to read so that no head drops more than `eps`."""
        ordered = (jnp.take_along_axis(x, order[:, :, None], axis=-1) for x in self._weights())
        least, most = (jnp.pad(x, ((0, 0),) * 3 + ((1, 1),)) for x in ordered)
        # At n: sums after the first n pages are read.
        kept = jnp.cumsum(least, axis=-1)[..., :-1]
        dropped = jax.lax.cumsum(most, axis=3, reverse=True)[..., 1:]
        # `dropped_mass` of the same pages sums in another order.
        limit = eps * (1 - 2.0**-10)
        return (_share(dropped, kept, order.shape[-1]) <= limit).all(2).argmax(-1)

    def _weights(self) -> tuple[Float[Array, "B Hk G N"], Float[Array, "B Hk G N"]]:
        """Return bounds as weights relative to the largest finite one."""
        finite = jnp.where(jnp.isfinite(self.upper), self.upper, -jnp.inf)
        largest = finite.max(-1, keepdims=True)
        largest = jnp.where(jnp.isfinite(largest), largest, 0)
        most = jnp.exp(self.upper - largest) + 2.0**-120  # more than underflow takes
        return jnp.exp(self.lower - largest), jnp.where(self.upper == -jnp.inf, 0, most)


@dataclasses.dataclass(frozen=True)
class Int8Keys(PageSelector):
    """Keys in int8, with a factor per page and component: estimates and certified bounds.

    Pages that are int8 themselves are their own summary: it takes no memory, and the bounds are
    those of rounding only.
    """

    def initialize(self, pages: PagedKV) -> Summaries:
        """See `PageSelector`."""
        return () if pages.k_scale is not None else super().initialize(pages)

    def update(self, summaries: Summaries, at: LayerPages, tokens: int) -> Summaries:
        """See `PageSelector`."""
        return summaries if summaries == () else super().update(summaries, at, tokens)

    def load(self, summaries: Summaries, at: LayerPages, page: Int[Array, "B n"]) -> KeyCodes:
        """See `PageSelector`."""
        pool = at.pages
        if pool.k_scale is None:
            return super().load(summaries, at, page)
        code, factor = pool.k[at.layer, page], pool.k_scale[at.layer, page]
        shape = *factor.shape, code.shape[-1]
        return KeyCodes(code, jnp.broadcast_to(factor[..., None], shape))

    def summarize(
        self, keys: Float[Array, "*n Hk page D"], exists: Bool[Array, "*n page"], layer: Any
    ) -> KeyCodes:
        """See `PageSelector`."""
        x = jnp.where(exists[..., None, :, None], keys.astype(jnp.float32), 0)
        # No quotient exceeds 127: the margin is more than the rounding of bfloat16.
        factor = jnp.abs(x).max(-2, keepdims=True) * ((1 + 2.0**-8) / MAX_CODE)
        # XLA may drop a conversion to bfloat16 and back, but not `reduce_precision`.
        factor = jax.lax.reduce_precision(jnp.maximum(factor, MIN_FACTOR), 8, 7)
        code = jnp.nan_to_num(jnp.clip(jnp.round(x / factor), -MAX_CODE, MAX_CODE))
        return KeyCodes(code.astype(jnp.int8), factor[..., 0, :].astype(jnp.bfloat16))

    def estimate(self, q, summaries, at):
        """See `PageSelector`."""
        return self._estimate(q, *self.load_all(summaries, at))

    def _estimate(self, q, summaries: KeyCodes, exists):
        q = q[:, None] * summaries.factor.astype(jnp.float32)[:, :, :, None]
        code = summaries.code.astype(jnp.float32)
        s = jnp.einsum("bnkgd,bnksd->bnkgs", q, code, precision="highest")
        s = jnp.where(jnp.isfinite(s), s, jnp.finfo(s.dtype).max)  # a page to be read
        s = jnp.where(exists[:, :, None, None], s, -jnp.inf)
        return jnp.moveaxis(jax.nn.logsumexp(s, axis=-1), 1, 3)

    def bounds(
        self, q: Float[Array, "B Hk G D"], summaries: Summaries, at: LayerPages
    ) -> PageBounds:
        """Return bounds for every page of the sequences.

        Args:
            q: last query of each sequence, times the scale of attention.
            summaries: of all pages.
            at: layer, tables and lengths.
        """
        codes, exists = self.load_all(summaries, at)
        log_sum = self._estimate(q, codes, exists)
        factor = codes.factor.astype(jnp.float32)
        norm = jnp.einsum("bkgd,bnkd->bkgn", jnp.abs(q) + 2.0**-100, factor, precision="highest")
        residual = 0.0 if at.pages.k_scale is not None else 0.5 + 2.0**-15
        error = norm * (1 + 2.0**-10) * (residual + MAX_CODE * (2 * q.shape[-1] + 32) * UNIT)
        error = error + UNIT * (2**12 + 4 * exists.shape[-1] + 4 * jnp.abs(log_sum))
        is_valid = jnp.isfinite(error) & (log_sum < OVERFLOW)
        lower = jnp.where(is_valid, log_sum - error, -jnp.inf)
        upper = jnp.where(is_valid, log_sum + error, jnp.inf)
        is_page = exists.any(-1)[:, None, None]
        return PageBounds(lower, jnp.where(is_page, upper, -jnp.inf))

    def certify(
        self,
        q: Float[Array, "B Hq D"],
        summaries: Summaries,
        at: LayerPages,
        pages: Int[Array, "B Hk slots"],
        *,
        scale: float,
    ) -> Float[Array, "B Hq"]:
        """Return an upper bound on the share of attention in pages that are not listed.

        It holds for exact attention of the last tokens to all keys of the cache.

        Args:
            q: last query of each sequence.
            summaries: of all pages.
            at: layer, tables and lengths.
            pages: numbers of pages, as of `retrieve_topk`.
            scale: factor on q.k.
        """
        number = jnp.arange(at.page_table.shape[1])
        is_read = (pages[..., None] == number[None, None, None]).any(2)
        q = self.group_heads(q, at, scale)
        return self.bounds(q, summaries, at).dropped_mass(is_read).reshape(q.shape[0], -1)

    def retrieve_within(
        self,
        q: Float[Array, "B Hq D"],
        summaries: Summaries,
        at: LayerPages,
        counts: Int[Array, "B Hk"],
        eps: float | Float[Array, ""],
        *,
        scale: float,
        forced: ForcedPages = ForcedPages(),  # noqa: B008 (frozen)
        max_counts: Int[Array, "B Hk"] | None = None,
    ) -> Int[Array, "B Hk N"]:
        """Return pages as `retrieve_topk`, and more until no head drops more than `eps`.

        Args:
            q: last query of each sequence.
            summaries: of all pages.
            at: layer, tables and lengths.
            counts: fewest pages to read, forced ones included.
            eps: largest certified share of attention in pages that are not read.
            scale: factor on q.k.
            forced: pages that are read in any case.
            max_counts: most pages to read for `eps`; where it takes more, `counts` are read. None:
                all.
        """
        q = self.group_heads(q, at, scale)
        masses = self.weigh(q, summaries, at, forced)
        needed = self.bounds(q, summaries, at).count_within(masses.order(), eps)
        if max_counts is not None:
            needed = jnp.where(needed <= max_counts, needed, counts)
        return masses.list_pages(jnp.maximum(counts, needed), at.page_table.shape[1])


def _share(dropped: Array, kept: Array, pages: int) -> Array:
    """Return `dropped / (dropped + kept)` rounded up."""
    error = UNIT * (2**11 + 2 * pages)
    dropped = dropped * (1 + error)
    share = dropped / (dropped + kept * (1 - error)) * (1 + 8 * UNIT)
    share = jnp.where(jnp.isnan(share), 1, jnp.minimum(share, 1))
    return jnp.where(dropped == 0, 0, share)
