"""Rule comparisons from a file of rows, and the blocks that a rule requires for a given KL."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from xsake import _json
from xsake._schema import Count, Fraction, Frozen, Number, Positive, Text, validate
from xsake.errors import ArgumentError

MAX_BYTES, MAX_LINES = 2**24, 20_000
MAX_CONTAINERS = 2**12  # of one line
MIN_KL = 1e-9
TARGET_KL = 0.089
OURS = "hads"
WHAT = "a row of a policy comparison"


class ComparisonRow(Frozen, extra="ignore"):
    """KL of one rule at one budget; other keys of a row are ignored."""

    context: Positive
    block: Positive
    rule: Text
    budget: Fraction
    effective: Annotated[Number, Field(ge=0)] = Field(description="budget + selection cost")
    documents: Count
    kl: Annotated[Number, Field(ge=0)]


@dataclasses.dataclass(frozen=True)
class RequiredShare:
    """Share of blocks that a rule requires, or a bound if it is outside of the measured range."""

    share: float
    relation: Literal["=", "<", ">"]

    def __str__(self) -> str:
        mark = "" if self.relation == "=" else f"{self.relation} "
        return f"{mark}{self.share:.1%}"


@dataclasses.dataclass(frozen=True)
class RuleCurve:
    """KL of one rule at ascending budgets."""

    name: str
    rows: tuple[ComparisonRow, ...]

    @property
    def is_ours(self) -> bool:
        return self.name == OURS

    def blocks_for_kl(self, kl: float = TARGET_KL, *, with_choosing: bool = False) -> RequiredShare:
        """Return the share of blocks for a KL, by log-linear interpolation."""
        shares = [row.effective if with_choosing else row.budget for row in self.rows]
        return interpolate_share(shares, [row.kl for row in self.rows], kl)


@dataclasses.dataclass(frozen=True)
class RuleComparison:
    """All rules at one context and block size.

    Args:
        context: tokens of each document.
        block: tokens of a block.
        rules: by ascending number of required blocks.
        commit: of the measured code; None if unknown.
    """

    context: int
    block: int
    rules: tuple[RuleCurve, ...]
    commit: str | None

    @property
    def documents(self) -> int:
        """Smallest number of documents of a row."""
        return min(row.documents for rule in self.rules for row in rule.rows)

    @property
    def origin(self) -> str:
        """Documents and commit of the measurement."""
        texts = f"{self.documents} document{'' if self.documents == 1 else 's'}"
        return f"{texts}, commit {self.commit or 'unknown'}"

    def to_dict(self, kl: float = TARGET_KL) -> dict[str, Any]:
        """Return the data of chart and table as JSON values."""
        return {
            "context": self.context,
            "block": self.block,
            "documents": self.documents,
            "commit": self.commit,
            "target_kl": kl,
            "rules": [
                {
                    "rule": rule.name,
                    "needed": dataclasses.asdict(rule.blocks_for_kl(kl)),
                    "needed_with_choosing": dataclasses.asdict(
                        rule.blocks_for_kl(kl, with_choosing=True)
                    ),
                    "budget": [row.budget for row in rule.rows],
                    "effective": [row.effective for row in rule.rows],
                    "kl": [row.kl for row in rule.rows],
                }
                for rule in self.rules
            ],
        }


def interpolate_share(
    shares: Sequence[float], kls: Sequence[float], target: float
) -> RequiredShare:
    """Return the share at which a falling KL first reaches a target.

    Args:
        shares: of blocks, ascending.
        kls: measured there.
        target: KL.

    Example:
        >>> str(interpolate_share([0.1, 0.2, 0.4], [0.4, 0.2, 0.05], 0.1))
        '30.0%'
        >>> str(interpolate_share([0.1, 0.2], [0.4, 0.2], 0.1))
        '> 20.0%'
    """
    index = next((i for i, kl in enumerate(kls) if kl <= target), None)
    if index is None:
        return RequiredShare(shares[-1], ">")
    if index == 0:
        return RequiredShare(shares[0], "=" if kls[0] == target else "<")
    above, below, goal = (math.log(max(kl, MIN_KL)) for kl in (kls[index - 1], kls[index], target))
    fraction = (above - goal) / (above - below)
    return RequiredShare(shares[index - 1] + fraction * (shares[index] - shares[index - 1]), "=")


def read_comparisons(path: Path) -> tuple[RuleComparison, ...]:
    """Read the comparisons of a .jsonl file.

    A line without a rule has the environment of the rows after it.
    """
    data = _json.read(path, max_bytes=MAX_BYTES)
    lines = [line for line in data.splitlines() if line.strip()]
    if len(data) > MAX_BYTES or len(lines) > MAX_LINES:
        raise _json.invalid_file("rows of a policy comparison", "more than 16 MB or 20000 lines")
    rows, commit = [], None
    for line in lines:
        document = _json.loads(line, what=WHAT, max_bytes=MAX_BYTES, max_containers=MAX_CONTAINERS)
        if "rule" in document:
            rows.append((validate(ComparisonRow, document, what=WHAT), commit))
        else:
            commit = _commit(document)
    if not rows:
        raise ArgumentError("the file has no rows", got=path, expected="one line per measurement")
    sizes = lambda pair: (pair[0].context, pair[0].block)
    groups = itertools.groupby(sorted(rows, key=sizes), key=sizes)
    return tuple(_comparison(*key, list(group)) for key, group in groups)


def _comparison(
    context: int, block: int, pairs: list[tuple[ComparisonRow, str | None]]
) -> RuleComparison:
    rules: dict[str, list[ComparisonRow]] = {}
    for row, _ in pairs:
        rules.setdefault(row.rule, []).append(row)
    curves = [RuleCurve(name, _sort_rows(rows)) for name, rows in rules.items()]
    curves.sort(key=_sort_key)
    return RuleComparison(context, block, tuple(curves), pairs[-1][1])


def _sort_key(rule: RuleCurve) -> tuple[bool, float, float]:
    """Sort by required share; rules that do not reach the target come last, by their last KL."""
    required = rule.blocks_for_kl(with_choosing=True)
    is_above = required.relation == ">"
    return is_above, 0.0 if is_above else required.share, rule.rows[-1].kl


def _sort_rows(rows: Iterable[ComparisonRow]) -> tuple[ComparisonRow, ...]:
    ordered = tuple(sorted(rows, key=lambda row: row.budget))
    for before, after in itertools.pairwise(ordered):
        if before.budget == after.budget:
            raise ArgumentError(
                "duplicate row of a rule at one budget",
                got=f"{after.rule} at {after.budget:.1%}, context {after.context}",
                expected="every measurement once",
            )
    return ordered


def _commit(document: dict[str, Any]) -> str | None:
    machine = document.get("environment")
    commit = machine.get("commit") if isinstance(machine, dict) else None
    return commit[:40] if isinstance(commit, str) and commit.isprintable() else None
