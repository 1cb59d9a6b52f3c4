"""Policies: allocate a budget of blocks to heads by the measurements of a profile."""

import abc
import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from xsake.errors import ArgumentError
from xsake.hads.allocation import StaticUnits, static_units, water_fill
from xsake.hads.budget import ForcedBlocks, apportion, level_totals, total_blocks, visible_blocks
from xsake.hads.profile import Profile
from xsake.hads.selectors.base import make_by_name

Totals = Int[np.ndarray, "L Hq"]
Curves = Float[np.ndarray, "L Hq levels"]


class Policy(abc.ABC):
    """Allocation rule; a frozen dataclass of its settings.

    Attributes:
        name: key in `POLICIES` and in plan files.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        """Return the blocks of each head at the calibrated length.

        Args:
            profile: measurements of the model.
            budget: computed / causally visible blocks of the whole model, met exactly; None for
                policies without a budget.
        """


@dataclasses.dataclass(frozen=True)
class Uniform(Policy):
    """Equal numbers of blocks for all heads."""

    name: ClassVar[str] = "uniform"

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        return _apportion(np.ones_like(profile.entropy), profile, budget, profile.forced)


@dataclasses.dataclass(frozen=True)
class Entropy(Policy):
    """Shares of the original HADS, a linear map of each head's entropy, without a budget.

    `skipped = 0.9 - 0.8 (H - Hmin) / (Hmax - Hmin)` over all heads: the lowest entropy skips 90 %
    of the visible blocks, the highest 10 %. Every head gets at least its forced blocks.
    """

    name: ClassVar[str] = "entropy"

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        _reject_budget(self.name, budget)
        return _round_shares(entropy_shares(profile.entropy), profile.n, profile.forced)


@dataclasses.dataclass(frozen=True)
class EntropyBudget(Policy):
    """Shares of `entropy`, rescaled within bounds to the budget."""

    name: ClassVar[str] = "entropy_budget"

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        return _apportion(entropy_shares(profile.entropy), profile, budget, profile.forced)


@dataclasses.dataclass(frozen=True)
class EntropyRandom(Policy):
    """The original HADS: entropy shares, a local window and random blocks, no sink block.

    Shares are those of `entropy_budget` with a budget, else those of `entropy`.

    Args:
        window: blocks before the diagonal.
        seed: of the random blocks.
    """

    window: int = 2
    seed: int = 0
    name: ClassVar[str] = "original"

    @property
    def forced(self) -> ForcedBlocks:
        """The window of every head."""
        return ForcedBlocks(num_sink=0, num_local=self.window + 1)

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        shares = entropy_shares(profile.entropy)
        if budget is None:
            return _round_shares(shares, profile.n, self.forced)
        return _apportion(shares, profile, budget, self.forced)


@dataclasses.dataclass(frozen=True)
class KL(Policy):
    """Minimize the mean KL(sparse || dense) over heads, by the curves of the selector.

    Args:
        curve: name of a selector in the profile; None: that of the plan, or the only one.
        floor: minimum blocks per row of every head beyond the forced ones; None: 1 if the budget
            allows it.
    """

    curve: str | None = None
    floor: int | None = None
    name: ClassVar[str] = "kl"

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        total = _total_blocks(profile, budget, profile.forced)
        return water_fill(self._losses(profile), total, profile.forced, floor=self.floor)

    def _losses(self, profile: Profile) -> Curves:
        return _curve(profile.curves, self.curve)


class KeptMass(KL):
    """Maximize the kept mass `exp(-curve)` over heads; arguments as for `KL`."""

    name: ClassVar[str] = "mass"

    def _losses(self, profile: Profile) -> Curves:
        # A curve is a mean of logarithms, so `exp(-curve)` is the geometric mean of the kept mass
        # over queries, at most the arithmetic mean: queries with large losses weigh more.
        return -np.expm1(-_curve(profile.curves, self.curve))


class Sensitivity(KL):
    """Minimize the change of the model's predictions, by the measured effect of each head.

    Arguments as for `KL`.
    """

    name: ClassVar[str] = "effect"

    def _losses(self, profile: Profile) -> Curves:
        if not profile.effects:
            raise ArgumentError(
                "policy-effects",
                "the profile has no effects on predictions",
                got="no effects",
                fix="calibrate with CalibrationSettings(effect_documents=6), or use the policy kl",
            )
        # A measured effect may rise with more blocks by chance; use the running minimum.
        return np.minimum.accumulate(_curve(profile.effects, self.curve), axis=-1)


@dataclasses.dataclass(frozen=True)
class TopP(Policy):
    """Fewest blocks per row of each head that keep the mass `p`, without a budget.

    Args:
        p: of `exp(-curve)`.
        curve: as for `KL`.
    """

    p: float
    curve: str | None = None
    name: ClassVar[str] = "top_p"

    def __post_init__(self) -> None:
        _require_share("p", self.p)

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        _reject_budget(self.name, budget)
        is_enough = np.exp(-_curve(profile.curves, self.curve)) >= self.p
        is_enough[..., -1] = True
        return level_totals(is_enough.argmax(axis=-1), profile.n, profile.forced)


@dataclasses.dataclass(frozen=True)
class Static(Policy):
    """Whole diagonals and columns by calibrated mass per block; no run-time selection."""

    name: ClassVar[str] = "static"

    def units(self, profile: Profile, budget: float | None) -> StaticUnits:
        """Return diagonals, columns and block totals of each head."""
        total = _total_blocks(profile, budget, profile.forced)
        return static_units(profile.offset_mass, profile.column_mass, total, profile.forced)

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        return self.units(profile, budget).totals


@dataclasses.dataclass(frozen=True)
class Bounded(Policy):
    """Budgets of `kl`; at run time blocks are added until no query drops more than `eps`.

    Args:
        eps: maximum dropped attention mass of a query.
        curve: as for `KL`.
        floor: as for `KL`.
    """

    eps: float
    curve: str | None = None
    floor: int | None = None
    name: ClassVar[str] = "bounded"

    def __post_init__(self) -> None:
        _require_share("eps", self.eps)

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        return KL(self.curve, self.floor).plan_shares(profile, budget)


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Sensitivity, KL, KeptMass, Uniform, Entropy, EntropyBudget, TopP, Static, Bounded,
        EntropyRandom,
    )
}  # fmt: skip
"""Policies by name."""


def make_policy(name: str, **settings: int | float | str) -> Policy:
    """Build a policy by name."""
    return make_by_name("policy", POLICIES, name, settings)


def with_curve(policy: Policy, selector: str) -> Policy:
    """Return the policy with `curve` set to a selector, if it uses curves and has none."""
    if isinstance(policy, KL | TopP | Bounded) and policy.curve is None:
        return dataclasses.replace(policy, curve=selector)
    return policy


def entropy_shares(entropy: Float[np.ndarray, "L Hq"]) -> Float[np.ndarray, "L Hq"]:
    """Return the share of blocks of each head in the original HADS, 0.1 to 0.9 by entropy.

    Example:
        >>> entropy_shares(np.array([[1.0, 2.0], [3.0, 1.5]])).round(3)
        array([[0.1, 0.5],
               [0.9, 0.3]])
    """
    spread = max(float(np.ptp(entropy)), 1e-6)
    skipped = 0.9 - 0.8 * (entropy - entropy.min()) / spread
    return 1 - skipped


def _curve(curves: dict[str, Curves], name: str | None) -> Curves:
    """Return the curves of a selector; None: of the only one."""
    if name is None and len(curves) == 1:
        return next(iter(curves.values()))
    if name not in curves:
        raise ArgumentError(
            "policy-curves",
            "the profile has no curves of this selector",
            got=repr(name),
            expected=f"one of {sorted(curves)}",
            fix="use a calibrated selector, or calibrate with this one",
        )
    return curves[name]


def _total_blocks(profile: Profile, budget: float | None, forced: ForcedBlocks) -> int:
    if budget is None:
        expected = "0 < .. <= 1"
        raise ArgumentError(
            "policy-needs-budget",
            "this policy requires a budget",
            got="budget=None",
            expected=expected,
        )
    return total_blocks(budget, heads=profile.model.heads, n=profile.n, forced=forced)


def _apportion(
    weights: Float[np.ndarray, "L Hq"], profile: Profile, budget: float | None, forced: ForcedBlocks
) -> Totals:
    total = _total_blocks(profile, budget, forced)
    bounds = forced.total(profile.n), visible_blocks(profile.n)
    return apportion(weights.ravel(), total, *bounds).reshape(weights.shape)


def _round_shares(shares: Float[np.ndarray, "L Hq"], n: int, forced: ForcedBlocks) -> Totals:
    blocks = np.floor(shares * visible_blocks(n) + 0.5).astype(np.int64)
    return np.clip(blocks, forced.total(n), visible_blocks(n))


def _reject_budget(name: str, budget: float | None) -> None:
    if budget is not None:
        raise ArgumentError(
            "policy-takes-no-budget",
            f"the policy {name!r} takes no budget",
            got=f"{budget=}",
            expected="budget=None",
            fix="omit the budget, or use a policy with a budget: entropy_budget, kl",
        )


def _require_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ArgumentError(
            "policy-range", f"{name} is out of range", got=f"{value!r}", expected="0 < .. <= 1"
        )
