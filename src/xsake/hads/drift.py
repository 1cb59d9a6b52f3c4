"""Drift of a plan: KL of its heads on other texts compared with the calibrated KL."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from xsake._progress import Progress, ProgressFn
from xsake.errors import ArgumentError
from xsake.hads import curves
from xsake.hads.budget import ForcedBlocks, level_totals
from xsake.hads.calibrate import (
    CalibrationDocument,
    DocumentMasses,
    require_length,
)
from xsake.hads.hooks import ObserveFn, make_mass_hook
from xsake.hads.plan import SparsityPlan
from xsake.hads.profile import Profile
from xsake.hads.selectors import from_spec

MAX_HEADS = 10


@dataclasses.dataclass(frozen=True)
class DriftLimits:
    """Limits within which a plan still fits."""

    head_ratio: float = 2.0  # a head has drifted if its KL exceeds this multiple of the calibrated
    head_nats: float = 0.1  # and exceeds it by more than this
    mean_ratio: float = 1.5  # maximum mean KL over heads, relative to the calibrated mean
    lost_share: float = 0.05  # maximum share of drifted heads

    def __str__(self) -> str:
        return (
            f"A head has drifted if its KL exceeds {self.head_ratio:g} times the calibrated KL and"
            f" is {self.head_nats:g} nats larger; a plan fits if the mean KL is at most"
            f" {self.mean_ratio:g} times the calibrated one and at most {self.lost_share:.0%} of"
            " the heads have drifted."
        )


@dataclasses.dataclass(frozen=True)
class Drift:
    """Mean KL(sparse || dense) over queries of every head, calibrated and on other documents."""

    calibrated: Float[np.ndarray, "L Hq"]
    measured: Float[np.ndarray, "L Hq"]
    documents: int  # number of other documents
    limits: DriftLimits = DriftLimits()

    @property
    def drifted_heads(self) -> tuple[tuple[int, int], ...]:
        """Layer and head number of drifted heads, worst first."""
        excess = self.measured - self.calibrated
        is_drifted = self.measured > self.limits.head_ratio * self.calibrated
        is_drifted &= excess > self.limits.head_nats
        order = np.argsort(-excess[is_drifted], kind="stable")
        return tuple((int(layer), int(head)) for layer, head in np.argwhere(is_drifted)[order])

    @property
    def fits(self) -> bool:
        """Whether the mean KL and the number of drifted heads are within the limits."""
        limit = self.limits.mean_ratio * self.calibrated.mean() + 1e-6  # rounding in files
        allowed = self.limits.lost_share * self.measured.size
        return bool(self.measured.mean() <= limit) and len(self.drifted_heads) <= allowed

    def __str__(self) -> str:
        verdict = "still fits" if self.fits else "does not fit"
        texts = f"{self.documents} document{'' if self.documents == 1 else 's'}"
        before, after = self.calibrated, self.measured
        heads = [
            f"L{layer}H{head} ({before[layer, head]:.3f} -> {after[layer, head]:.3f})"
            for layer, head in self.drifted_heads[:MAX_HEADS]
        ]
        if len(self.drifted_heads) > MAX_HEADS:
            heads.append(f"{len(self.drifted_heads) - MAX_HEADS} more")
        listed = ": " + ", ".join(heads) if heads else ""
        return (
            f"The plan {verdict}: mean KL {after.mean():.4f} nats on {texts},"
            f" {before.mean():.4f} calibrated; {len(self.drifted_heads)} of {after.size} heads"
            f" drifted{listed}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "fits": self.fits,
            "documents": self.documents,
            "mean_kl": _digits(self.measured.mean()),
            "promised_mean_kl": _digits(self.calibrated.mean()),
            "lost": [list(head) for head in self.drifted_heads],
            "kl": [[_digits(kl) for kl in layer] for layer in self.measured],
            "promised_kl": [[_digits(kl) for kl in layer] for layer in self.calibrated],
            "limits": dataclasses.asdict(self.limits),
        }


def loss_at(
    losses: Float[np.ndarray, "L Hq levels"], totals: Int[np.ndarray, "L Hq"], forced: ForcedBlocks
) -> Float[np.ndarray, "L Hq"]:
    """Return the loss of each head at its number of blocks, by linear interpolation of its curve.

    Example:
        >>> loss_at(np.array([[[3.0, 3, 3, 3, 1, 0]]]), np.array([[13]]), ForcedBlocks())
        array([[2.]])
    """
    n = losses.shape[-1] - 1
    levels = np.arange(min(forced.blocks_per_row, n), n + 1)
    cost = level_totals(levels, n, forced)
    flat = zip(totals.ravel(), losses[..., levels].reshape(totals.size, -1), strict=True)
    return np.array([np.interp(total, cost, curve) for total, curve in flat]).reshape(totals.shape)


def calibrated_loss(plan: SparsityPlan, profile: Profile) -> Float[np.ndarray, "L Hq"]:
    """Return the KL of each head of a plan on the calibration documents."""
    require_profile(plan, profile)
    if plan.selector.name not in profile.curves:
        raise ArgumentError(
            "drift-selector",
            "the selector of this plan was not calibrated",
            got=f"policy {plan.policy.name}, selector {plan.selector.name}",
            expected=f"one of the selectors {', '.join(sorted(profile.selector_weights))}",
            fix="compare the model with and without the plan: xsake evaluate --plan",
        )
    return loss_at(profile.curves[plan.selector.name], plan.blocks, plan.forced)


def require_profile(plan: SparsityPlan, profile: Profile) -> None:
    """Raise unless the plan was built from this profile."""
    if profile.digest != plan.calibration.profile:
        raise ArgumentError(
            "drift-profile",
            "the plan was built from another profile",
            got=f"a profile with the digest {profile.digest}",
            expected=plan.calibration.profile,
            fix="pass the profile that was written with the plan",
        )


def measure_documents(
    observe: ObserveFn,
    plan: SparsityPlan,
    documents: Sequence[CalibrationDocument],
    *,
    on_progress: ProgressFn = lambda _: None,
) -> Iterator[DocumentMasses]:
    """Measure true block masses and the selector's estimates on other documents."""
    shortest = min((len(document.tokens) for document in documents), default=0)
    require_length(shortest, plan.block, plan.forced)
    begin = time.monotonic()
    hook = make_mass_hook(plan.block, (from_spec(plan.selector),), plan.components_array)
    for done, document in enumerate(documents, start=1):
        measured = DocumentMasses.of(observe(jnp.asarray(document.tokens)[None], hook), 0)
        elapsed = time.monotonic() - begin
        to_go = elapsed / done * (len(documents) - done)
        on_progress(Progress(done, len(documents), document.name, True, elapsed, to_go))
        yield DocumentMasses.unpack(measured.pack())  # rounded to float16 as in calibration


def mean_loss(
    plan: SparsityPlan, documents: Iterable[DocumentMasses]
) -> tuple[Float[np.ndarray, "L Hq"], int]:
    """Return the mean KL of each head of a plan over documents, and the number of documents.

    Blocks are ranked by the plan's selector and its corrections, with the same number in every row
    of a head, as for the curves of the profile.
    """
    weights = plan.weights.reshape(plan.model.heads, -1)
    total, count = np.zeros(plan.blocks.shape), 0
    for document in documents:
        order = curves.correct_estimates(document.estimates[plan.selector.name], weights)
        losses = curves.loss_curve(document.true, order, plan.forced)
        total += loss_at(
            losses.reshape(*plan.blocks.shape, -1),
            plan.totals(document.true.shape[-1]),
            plan.forced,
        )
        count += 1
    return total / max(count, 1), count


def _digits(number: float) -> float:
    return float(f"{number:.6g}")
