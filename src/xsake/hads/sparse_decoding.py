"""Sparse decoding driven by a plan: each kv head reads as many pages as its share allows."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.attention import BlockSparseAttention
from xsake.attention.layer_call import LayerCall
from xsake.cache import ForcedPages, Int8Keys, Labels, LayerPages, PageSelector
from xsake.errors import ArgumentError, UnsupportedError
from xsake.hads.plan import SparsityPlan
from xsake.masks import Causal

LABEL_COMPONENTS = 32


@dataclasses.dataclass(frozen=True, eq=False)
class PlanDecoding:
    """Attention function of decoding steps, for `xsake.model.generate`.

    The plan is that of prefill: shares of its heads, averaged over the query heads of a kv head and
    rescaled to `budget`, are shares of the pages of a sequence. A step of several tokens is dense.

    With `eps`, a kv head reads more pages, until each of its query heads is certified to drop at
    most `eps` of its attention mass. A plan of the policy `bounded` keeps its own limit so. Heads
    that spread their attention need most pages for it; `max_share` leaves them at their budget.

    Args:
        plan: shares of blocks per head.
        budget: pages that are read / pages of the sequence, on average over the kv heads of the
            model; summaries are not counted.
        selector: of pages; None: `Labels` of the plan's first 32 components, or `Int8Keys` with a
            limit.
        forced: pages that are read in any case.
        operator: implementation, and block sizes of dense steps.
        eps: limit of the attention mass that a head drops; None: that of a plan of the policy
            `bounded`, no limit for another.
        max_share: pages that a head may read for the limit / pages of the sequence; a head that
            needs more keeps its budget, and its limit is not certified.
    """

    plan: SparsityPlan
    budget: float
    selector: PageSelector | None = None
    forced: ForcedPages = ForcedPages()
    operator: BlockSparseAttention = BlockSparseAttention()
    eps: float | None = None
    max_share: float = 1.0

    def __post_init__(self):
        for name in ("budget", "max_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ArgumentError(
                    "page-budget", "the pages that are read are a share of all",
                    got=f"{name}={getattr(self, name)}", expected="above 0, at most 1",
                )  # fmt: skip
        assert self.page_selector is not None  # refused before any model runs

    @property
    def limit(self) -> float | None:
        """Largest attention mass that a head is certified to drop; None: any."""
        return self.plan.eps if self.eps is None else self.eps

    @functools.cached_property
    def page_selector(self) -> PageSelector:
        """Page selector of the cache."""
        if self.limit is not None and not isinstance(self.selector, Int8Keys | None):
            raise ArgumentError(
                "bounded-decoding-selector", "this page selector cannot certify a limit",
                got=repr(self.selector), expected="Int8Keys()",
            )  # fmt: skip
        if self.selector is not None:
            return self.selector
        if self.limit is not None:
            return Int8Keys()
        components = self.plan.components_array
        if not components.size:
            raise ArgumentError(
                "plan-without-components",
                "the plan has no components for labels",
                got=f"selector {self.plan.selector.name!r}",
                fix="pass selector=Quest()",
            )
        return Labels(components[..., :LABEL_COMPONENTS])

    def __call__(self, q, k, v, call: LayerCall):
        """Compute the attention of one layer."""
        if q.shape[1] != 1 or call.pages is None:
            return call.apply(self.operator, q, k, v)
        at = call.pages
        if at.selector is not self.page_selector:
            raise ArgumentError(
                "cache-selector",
                "the cache has no summaries for the page selector of this decoding",
                got=repr(at.selector), expected=repr(self.page_selector),
                fix="cache.with_selector(attend.page_selector)",
            )  # fmt: skip
        return at.attend(
            q, pages=self.retrieve(q[:, 0], call), mask=call.mask, scale=call.scale,
            softcap=call.softcap, implementation=self.operator.implementation,
        )  # fmt: skip

    def retrieve(self, q: Float[Array, "B Hq D"], call: LayerCall) -> Int[Array, "B Hk slots"]:
        """Return the pages that a step reads; -1: unused."""
        at = call.pages
        assert at is not None
        options = {"scale": call.scale, "forced": self.forced}
        share = jnp.asarray(self.shares, jnp.float32)[call.layer]
        count = count_pages(at, share)
        if self.limit is None:
            slots = self._slots(at.page_table.shape[1], at.pages.page_size)
            return at.selector.retrieve_topk(q, at.summaries, at, count, slots=slots, **options)
        require_certifiable(call)
        most = count_pages(at, jnp.full_like(share, self.max_share))
        return at.selector.retrieve_within(
            q, at.summaries, at, count, self.limit, max_counts=most, **options
        )

    @functools.cached_property
    def shares(self) -> Float[np.ndarray, "L Hk"]:
        """Share of the pages that each kv head reads."""
        model = self.plan.model
        shares = np.array([[head.share for head in layer] for layer in self.plan.heads])
        shares = shares.reshape(model.layers, model.kv_heads, -1).mean(-1)
        return rescale_shares(shares, self.budget)

    def _slots(self, pages: int, page_size: int) -> int:
        """Return the largest number of pages that any head reads."""
        forced = -(-self.forced.num_sinks // page_size) + -(-self.forced.num_local // page_size) + 1
        return min(pages, max(forced, int(np.ceil(pages * self.shares.max()))))


def count_pages(at: LayerPages, share: Float[Array, " Hk"]) -> Int[Array, "B Hk"]:
    """Return shares of the pages of sequences, forced ones included, rounded up."""
    pages = -(-at.lengths // at.pages.page_size)
    return jnp.ceil(pages[:, None] * share[None]).astype(jnp.int32)


def require_certifiable(call: LayerCall) -> None:
    """Raise for a layer whose attention the bounds of `Int8Keys` do not describe."""
    if call.softcap is not None or call.mask != Causal() or call.native is not None:
        raise UnsupportedError(
            "certified-attention", "bounds on dropped mass are of plain causal attention",
            got="native sparse attention" if call.native is not None
            else f"mask {call.mask!r}, softcap {call.softcap}",
            fix="decode by a plan of another policy; such a layer has no audit",
        )  # fmt: skip


def rescale_shares(shares: Float[np.ndarray, "L Hk"], budget: float) -> Float[np.ndarray, "L Hk"]:
    """Multiply shares by one factor, up to 1 each, so that their mean is the budget.

    Example:
        >>> rescale_shares(np.array([[0.1, 0.2, 0.6]]), 0.5).round(3).tolist()
        [[0.167, 0.333, 1.0]]
    """
    low, high = 0.0, 1 / shares.min()
    for _ in range(60):
        factor = (low + high) / 2
        low, high = (
            (low, factor) if np.minimum(factor * shares, 1).mean() > budget else (factor, high)
        )
    return np.minimum(high * shares, 1)
