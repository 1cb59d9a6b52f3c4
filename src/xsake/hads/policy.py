"""Policies: how a profile and a budget become blocks of heads; knows no selector's arithmetic."""

import dataclasses
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from xsake.errors import ArgumentError
from xsake.hads import allocate
from xsake.hads.budget import AlwaysOn, level_totals, shared_out, total_blocks, visible_blocks
from xsake.hads.profile import Profile

Totals = Int[np.ndarray, "L Hq"]


@runtime_checkable
class Policy(Protocol):
    """A way to spend a budget.

    Attributes:
        name: its key in `POLICIES`.
    """

    name: ClassVar[str]

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        """Blocks of each head at the calibrated length.

        Args:
            profile: what calibration measured.
            budget: computed / causally visible blocks of the whole model, met exactly. None for
                policies that find their own.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every head gets as many blocks as any other."""

    name: ClassVar[str] = "uniform"

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        return _in_proportion(np.ones_like(profile.entropy), profile, budget, profile.always)


@dataclasses.dataclass(frozen=True)
class Entropy:
    """The original's share of each head, from its entropy alone; whatever that adds up to.

    `skipped = 0.9 - 0.8 (H - Hmin) / (Hmax - Hmin)` over all heads: the most focused head skips
    90 % of what it sees and the broadest 10 %. Nothing is rescaled to a budget; a head gets its
    always-on blocks at least.
    """

    name: ClassVar[str] = "entropy"

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        _refuse_budget(self.name, budget)
        return _of_shares(kept_by_entropy(profile.entropy), profile.n, profile.always)


@dataclasses.dataclass(frozen=True)
class EntropyBudget:
    """The shares of `entropy` in proportion, rescaled inside their bounds to meet the budget."""

    name: ClassVar[str] = "entropy_budget"

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        return _in_proportion(kept_by_entropy(profile.entropy), profile, budget, profile.always)


@dataclasses.dataclass(frozen=True)
class Original:
    """The original's budgets and its blocks: a window, and others drawn at random; no sink.

    Args:
        window: blocks to each side of the diagonal, of which causality leaves one side.
        seed: of the draw.

    With a budget the shares are those of `entropy_budget`, without one those of `entropy`.
    """

    window: int = 2
    seed: int = 0
    name: ClassVar[str] = "original"

    @property
    def always(self) -> AlwaysOn:
        """The window is what every head computes."""
        return AlwaysOn(sinks=0, locals=self.window + 1)

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        kept = kept_by_entropy(profile.entropy)
        if budget is None:
            return _of_shares(kept, profile.n, self.always)
        return _in_proportion(kept, profile, budget, self.always)


@dataclasses.dataclass(frozen=True)
class KL:
    """The least mean KL(sparse || dense) over heads, by the curves of the deployed selector.

    Args:
        curve: name of a selector in the profile; None: that of the plan, or the only one there is.
        floor: blocks per row that every head gets beyond the always-on ones; None: 1 if the
            budget allows it.
    """

    curve: str | None = None
    floor: int | None = None
    name: ClassVar[str] = "kl"

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        total = _total(profile, budget, profile.always)
        losses = curve_of(profile, self.curve)
        return allocate.water_fill(losses, total, profile.always, floor=self.floor)


@dataclasses.dataclass(frozen=True)
class Effect:
    """The least change of the model's predictions, by the measured effect of each head.

    Args:
        curve: as for `KL`.
        floor: as for `KL`.
    """

    curve: str | None = None
    floor: int | None = None
    name: ClassVar[str] = "effect"

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        total = _total(profile, budget, profile.always)
        if not profile.effects:
            raise ArgumentError(
                "the profile does not say what heads do to predictions",
                got="no effects",
                fix="calibrate with Settings(effect_documents=6), or use the policy kl",
            )
        losses = _named(profile.effects, self.curve)
        # More blocks of a row may do more harm by chance; nobody has to take them.
        losses = np.minimum.accumulate(losses, axis=-1)
        return allocate.water_fill(losses, total, profile.always, floor=self.floor)


@dataclasses.dataclass(frozen=True)
class Mass:
    """The most kept mass over heads, `exp(-curve)`: a starved head is not worth more than others.

    Args:
        curve: as for `KL`.
        floor: as for `KL`.
    """

    curve: str | None = None
    floor: int | None = None
    name: ClassVar[str] = "mass"

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        total = _total(profile, budget, profile.always)
        losses = allocate.dropped_mass(curve_of(profile, self.curve))
        return allocate.water_fill(losses, total, profile.always, floor=self.floor)


@dataclasses.dataclass(frozen=True)
class TopP:
    """Each head the fewest blocks per row that keep the mass `p`; whatever that adds up to.

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
        _refuse_budget(self.name, budget)
        suffices = np.exp(-curve_of(profile, self.curve)) >= self.p
        suffices[..., -1] = True
        return level_totals(suffices.argmax(axis=-1), profile.n, profile.always)


@dataclasses.dataclass(frozen=True)
class Static:
    """Whole diagonals and columns by calibrated mass per block; nothing is scored at run time."""

    name: ClassVar[str] = "static"

    def units(self, profile: Profile, budget: float | None) -> allocate.Units:
        """Which diagonals and columns, and the blocks of each head."""
        total = _total(profile, budget, profile.always)
        masses = profile.offset_mass, profile.column_mass
        return allocate.static_units(*masses, total, profile.always)

    def plan_shares(self, profile: Profile, budget: float | None) -> Totals:
        return self.units(profile, budget).totals


@dataclasses.dataclass(frozen=True)
class Bounded:
    """The budgets of `kl`, to which the run time adds blocks until a bound holds in every row.

    Args:
        eps: largest attention mass that a row may be proved to drop.
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
    kind.name: kind
    for kind in (Effect, KL, Mass, Uniform, Entropy, EntropyBudget, TopP, Static, Bounded, Original)
}
"""Policies by name."""


def kept_by_entropy(entropy: Float[np.ndarray, "L Hq"]) -> Float[np.ndarray, "L Hq"]:
    """The original's share of blocks that a head keeps, 0.1 (focused) to 0.9 (broad).

    Example:
        >>> kept_by_entropy(np.array([[1.0, 2.0], [3.0, 1.5]])).round(3)
        array([[0.1, 0.5],
               [0.9, 0.3]])
    """
    spread = max(float(np.ptp(entropy)), 1e-6)
    skipped = 0.9 - 0.8 * (entropy - entropy.min()) / spread
    return 1 - skipped


def curve_of(profile: Profile, name: str | None) -> Float[np.ndarray, "L Hq levels"]:
    """The curves of a selector; without a name those of the only one."""
    return _named(profile.curves, name)


def _named(
    curves: dict[str, Float[np.ndarray, "L Hq levels"]], name: str | None
) -> Float[np.ndarray, "L Hq levels"]:
    if name is None and len(curves) == 1:
        return next(iter(curves.values()))
    if name not in curves:
        raise ArgumentError(
            "the profile has no curves of that selector",
            got=repr(name),
            expected=f"one of {sorted(curves)}",
            fix="name a selector that was calibrated, or calibrate again with it",
        )
    return curves[name]


def with_curve(policy: Policy, selector: str) -> Policy:
    """The policy with the curves of a selector, if it needs curves and names none."""
    if isinstance(policy, Effect | KL | Mass | TopP | Bounded) and policy.curve is None:
        return dataclasses.replace(policy, curve=selector)
    return policy


def _total(profile: Profile, budget: float | None, always: AlwaysOn) -> int:
    if budget is None:
        raise ArgumentError("this policy needs a budget", got="budget=None", expected="0 < .. <= 1")
    return total_blocks(budget, heads=profile.model.heads, n=profile.n, always=always)


def _in_proportion(
    weights: Float[np.ndarray, "L Hq"], profile: Profile, budget: float | None, always: AlwaysOn
) -> Totals:
    total = _total(profile, budget, always)
    least = np.full(weights.size, always.total(profile.n))
    most = np.full(weights.size, visible_blocks(profile.n))
    return shared_out(weights.ravel(), total, least, most).reshape(weights.shape)


def _of_shares(kept: Float[np.ndarray, "L Hq"], n: int, always: AlwaysOn) -> Totals:
    blocks = np.floor(kept * visible_blocks(n) + 0.5).astype(np.int64)
    return np.clip(blocks, always.total(n), visible_blocks(n))


def _refuse_budget(name: str, budget: float | None) -> None:
    if budget is not None:
        raise ArgumentError(
            f"the policy {name!r} finds its own budget",
            got=f"{budget=}",
            expected="budget=None",
            fix="leave the budget out, or use a policy that meets one: entropy_budget, kl",
        )


def _require_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ArgumentError(f"{name} is no share", got=f"{value!r}", expected="0 < .. <= 1")
