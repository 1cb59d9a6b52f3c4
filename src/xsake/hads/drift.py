"""Whether a plan still fits: what its heads lose on other texts beside what was promised."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from xsake.errors import ArgumentError
from xsake.hads import fit
from xsake.hads.attend import selector_of
from xsake.hads.budget import AlwaysOn, level_totals
from xsake.hads.calibrate import Progress, Reading, document_of
from xsake.hads.measure import LayerMasses, Observe, watch_masses
from xsake.hads.plan import SparsityPlan
from xsake.hads.profile import Profile
from xsake.hads.shelf import DocumentMasses, Shelf
from xsake.layout.grid import blocks_of

FEW = 10


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is still a fit.

    Args:
        head_ratio: a head is lost if it loses more than so many times what was promised,
        head_nats: and so many nats more.
        mean_ratio: the mean over heads may be so many times what was promised.
        lost_share: so many of the heads may be lost.
    """

    head_ratio: float = 2.0
    head_nats: float = 0.1
    mean_ratio: float = 1.5
    lost_share: float = 0.05

    def __str__(self) -> str:
        return (
            f"A head is lost beyond {self.head_ratio:g} times its promised KL and"
            f" {self.head_nats:g} nats more; a plan fits while the mean is at most"
            f" {self.mean_ratio:g} times what was promised and at most {self.lost_share:.0%} of"
            " the heads are lost."
        )


@dataclasses.dataclass(frozen=True)
class Drift:
    """KL(sparse || dense) of every head, mean over queries: now, and as promised.

    Args:
        promised: on the texts of the calibration.
        now: on others.
        documents: that were read now.
        limits: what is still a fit.
    """

    promised: Float[np.ndarray, "L Hq"]
    now: Float[np.ndarray, "L Hq"]
    documents: int
    limits: Limits = Limits()

    @property
    def lost(self) -> tuple[tuple[int, int], ...]:
        """Layer and number of heads that lose too much more than was promised, worst first."""
        more = self.now - self.promised
        is_lost = self.now > self.limits.head_ratio * self.promised
        is_lost &= more > self.limits.head_nats
        order = np.argsort(-more[is_lost], kind="stable")
        return tuple((int(layer), int(head)) for layer, head in np.argwhere(is_lost)[order])

    @property
    def fits(self) -> bool:
        """Neither the mean nor too many single heads have got much worse."""
        most = self.limits.mean_ratio * self.promised.mean() + 1e-6  # of digits in files
        allowed = self.limits.lost_share * self.now.size
        return bool(self.now.mean() <= most) and len(self.lost) <= allowed

    def __str__(self) -> str:
        verdict = "still fits" if self.fits else "does not fit"
        texts = f"{self.documents} document{'' if self.documents == 1 else 's'}"
        named = [
            f"L{layer}H{head} ({self.promised[layer, head]:.3f} -> {self.now[layer, head]:.3f})"
            for layer, head in self.lost[:FEW]
        ]
        if len(self.lost) > FEW:
            named.append(f"{len(self.lost) - FEW} more")
        which = ": " + ", ".join(named) if named else ""
        return (
            f"The plan {verdict}: mean KL {self.now.mean():.4f} nats on {texts},"
            f" {self.promised.mean():.4f} promised; {len(self.lost)} of {self.now.size} heads lost"
            f"{which}."
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures behind the sentence."""
        return {
            "fits": self.fits,
            "documents": self.documents,
            "mean_kl": _digits(self.now.mean()),
            "promised_mean_kl": _digits(self.promised.mean()),
            "lost": [list(place) for place in self.lost],
            "kl": [[_digits(kl) for kl in layer] for layer in self.now],
            "promised_kl": [[_digits(kl) for kl in layer] for layer in self.promised],
            "limits": dataclasses.asdict(self.limits),
        }


def loss_at(
    curves: Float[np.ndarray, "L Hq levels"], totals: Int[np.ndarray, "L Hq"], always: AlwaysOn
) -> Float[np.ndarray, "L Hq"]:
    """What heads lose that compute so many blocks, straight between the levels of their curves.

    Args:
        curves: at `k` from 0 to `n` blocks per row.
        totals: blocks of each head.
        always: what every head computes anyway.

    Example:
        >>> loss_at(np.array([[[3.0, 3, 3, 3, 1, 0]]]), np.array([[13]]), AlwaysOn())
        array([[2.]])
    """
    n = curves.shape[-1] - 1
    levels = np.arange(min(always.level, n), n + 1)
    cost = level_totals(levels, n, always)
    flat = zip(totals.ravel(), curves[..., levels].reshape(totals.size, -1), strict=True)
    return np.array([np.interp(total, cost, curve) for total, curve in flat]).reshape(totals.shape)


def promised_loss(plan: SparsityPlan, profile: Profile) -> Float[np.ndarray, "L Hq"]:
    """What each head of a plan loses on the texts of its calibration.

    Args:
        plan: whose blocks a calibrated selector chooses.
        profile: the one that the plan was made of.
    """
    require_profile(plan, profile)
    if plan.selector.name not in profile.curves:
        raise ArgumentError(
            "no curve was calibrated for what chooses the blocks of this plan",
            got=f"policy {plan.policy.name}, selector {plan.selector.name}",
            expected=f"one of the selectors {', '.join(sorted(profile.selector_weights))}",
            fix="compare the model with and without the plan: xsake evaluate --plan",
        )
    return loss_at(profile.curves[plan.selector.name], plan.blocks, plan.always)


def require_profile(plan: SparsityPlan, profile: Profile) -> None:
    """Raise unless the plan was made of this profile."""
    if profile.digest != plan.calibration.profile:
        raise ArgumentError(
            "the plan was made of another profile",
            got=f"a profile with the digest {profile.digest}",
            expected=plan.calibration.profile,
            fix="name the profile that was written with the plan",
        )


def read_again(
    observe: Observe,
    plan: SparsityPlan,
    readings: Sequence[Reading],
    *,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Iterator[DocumentMasses]:
    """What heads look at in other documents, and what the plan's selector thinks of it.

    Args:
        observe: lets the model read tokens.
        plan: whose selector and components are used.
        readings: the documents.
        watch: told about every document.
    """
    _require_length(plan, readings)
    selector, begin = selector_of(plan), time.monotonic()
    look = watch_masses(plan.block, {selector.name: selector}, plan.components_array)
    for done, reading in enumerate(readings, start=1):
        found: LayerMasses = observe(jnp.asarray(reading.tokens)[None], look)
        shelf = Shelf()  # rounds as the masses of a calibration are rounded
        shelf.put(reading.sha256, document_of(found, 0))
        elapsed = time.monotonic() - begin
        to_go = elapsed / done * (len(readings) - done)
        watch(Progress(done, len(readings), reading.name, True, elapsed, to_go))
        yield shelf.get(reading.sha256)


def _require_length(plan: SparsityPlan, readings: Sequence[Reading]) -> None:
    shortest = min((len(reading.tokens) for reading in readings), default=0)
    if blocks_of(shortest, plan.block) <= plan.always.level:
        raise ArgumentError(
            "the documents are too short to choose blocks in",
            got=f"{shortest} tokens, blocks of {plan.block}",
            expected=f"more blocks than the {plan.always.level} that are always on",
            fix="read longer documents",
        )


def loss_on(
    plan: SparsityPlan, documents: Iterable[DocumentMasses]
) -> tuple[Float[np.ndarray, "L Hq"], int]:
    """What each head of a plan loses on documents, and how many those were.

    Their blocks are taken as the plan's selector ranks them with the plan's corrections, the same
    number in every row of a head: as the curves of its profile were made.

    Args:
        plan: whose blocks a selector chooses.
        documents: measured with that selector and the plan's components, all of one length.
    """
    weights = plan.weights.reshape(plan.model.heads, -1)
    total, count = np.zeros(plan.blocks.shape), 0
    for document in documents:
        order = fit.corrected(document.estimates[plan.selector.name], weights)
        curves = fit.curve(document.true, order, plan.always)
        shaped = curves.reshape(*plan.blocks.shape, -1)
        total += loss_at(shaped, plan.totals(document.true.shape[-1]), plan.always)
        count += 1
    return total / max(count, 1), count


def _digits(number: float) -> float:
    return float(f"{number:.6g}")
