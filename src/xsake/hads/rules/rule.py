"""What a rule sees and what it answers: a scene in, a ranking of blocks out; knows no budget."""

import dataclasses
import enum
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float

from xsake.errors import ArgumentError
from xsake.hads.budget import AlwaysOn


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
    """One layer of one document: causal self-attention, and what a rule may look at.

    Args:
        q: queries as they enter the scores, rotations included.
        k: keys, likewise.
        scale: factor of the scores.
        block: tokens of a query block and of a key block.
        layer: which layer of the model.
        seed: of rules that draw.
        masses: true attention masses of blocks, each the mean over the queries of its row; for
            oracles, and for rules that learn while they watch.
        entropy: mean entropy of the heads' attention in nats, for rules that learn from it.
    """

    q: Float[Array | np.ndarray, "Tq Hq D"]
    k: Float[Array | np.ndarray, "Tk Hk D"]
    scale: float
    block: int
    layer: int
    seed: int = 0
    masses: Float[Array | np.ndarray, "Hq Nq Nk"] | None = None
    entropy: Float[Array | np.ndarray, " Hq"] | None = None

    def __post_init__(self) -> None:
        tokens, heads, _ = self.q.shape
        if len(self.k) != tokens or tokens % self.block or heads % self.k.shape[1]:
            raise ArgumentError(
                "a scene is self-attention over whole blocks",
                got=f"q {self.q.shape}, k {self.k.shape}, block {self.block}",
                expected="equal tokens, a multiple of the block; Hq a multiple of Hk",
            )

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def blocks(self) -> int:
        return len(self.q) // self.block

    def true_masses(self) -> Float[np.ndarray, "Hq Nq Nk"]:
        """The true masses, or an error that says who must give them."""
        if self.masses is None:
            raise ArgumentError(
                "this rule needs the true masses of the scene",
                got="masses=None",
                fix="give masses to scenes that are watched, and to those of an oracle",
            )
        return np.asarray(self.masses)


class Scope(enum.Enum):
    """How far a rule lets blocks compete for a budget.

    Attributes:
        ROWS: every head has the same total, every row the same count as far as it is visible.
        HEADS: totals differ between heads by the rule's `shares`, rows of a head are alike.
        MODEL: one threshold for all blocks of all heads of all layers.
    """

    ROWS = "rows"
    HEADS = "heads"
    MODEL = "model"


@dataclasses.dataclass(frozen=True, eq=False)
class Ranking:
    """The order in which a rule takes blocks.

    Args:
        priority: float32; the higher, the earlier. `inf`: the rule takes the block at any budget,
            inside which it is counted. `-inf`: hidden by causality, never taken.
    """

    priority: Float[np.ndarray, "Hq Nq Nk"]

    @classmethod
    def of(
        cls, priority: Float[np.ndarray, "Hq Nq Nk"], *, forced: Bool[np.ndarray, "Nq Nk"]
    ) -> "Ranking":
        """Finite priorities under causality, with blocks that are forced in every head."""
        if not np.isfinite(priority).all():
            raise ArgumentError(
                "the queries and keys of a scene give scores that are not finite",
                got=f"{np.count_nonzero(~np.isfinite(priority))} such priorities",
                expected="finite numbers",
            )
        seen = np.where(visible(len(forced)), priority.astype(np.float32), -np.inf)
        return cls(np.where(forced, np.float32(np.inf), seen).astype(np.float32))

    @property
    def forced(self) -> Bool[np.ndarray, "Hq Nq Nk"]:
        return np.isposinf(self.priority)


@runtime_checkable
class Rule(Protocol):
    """A published way to choose blocks.

    Attributes:
        name: its key in `RULES`.
        scope: how a budget is spent on its ranking.
    """

    @property
    def name(self) -> str: ...

    @property
    def scope(self) -> Scope: ...

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Flops of choosing, as a share of those of dense causal attention; see `cost.py`."""
        ...

    def watch(self, scene: Scene) -> None:
        """Learn from one layer of a calibration document."""

    def finish(self) -> None:
        """All calibration documents have been watched; learn no more."""

    def rank(self, scene: Scene) -> Ranking:
        """Rank the blocks of one layer of a new document."""
        ...


@runtime_checkable
class HeadRule(Rule, Protocol):
    """A rule of scope `HEADS`."""

    def shares(self, layer: int) -> Float[np.ndarray, " Hq"]:
        """Share of its visible blocks that each head of a layer wants, before any rescaling."""
        ...


class LearnsNothing:
    """The half of a rule that calibration leaves as it is."""

    def watch(self, scene: Scene) -> None:
        pass

    def finish(self) -> None:
        pass


def visible(blocks: int) -> Bool[np.ndarray, "Nq Nk"]:
    """The blocks that causality leaves."""
    return np.tri(blocks, dtype=bool)


def offsets(blocks: int) -> Float[np.ndarray, "Nq Nk"]:
    """How many blocks each key block lies before its query block."""
    return np.subtract.outer(np.arange(blocks), np.arange(blocks)).astype(np.float32)


def always_on(blocks: int, *, sinks: int = 1, locals: int = 2) -> Bool[np.ndarray, "Nq Nk"]:
    """The first `sinks` blocks of a row and its last `locals`, the diagonal counted.

    Example:
        >>> always_on(4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 0, 1, 1]])
    """
    return AlwaysOn(sinks, locals).grid(blocks)
