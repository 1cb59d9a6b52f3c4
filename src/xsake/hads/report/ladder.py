"""Rows of a policy comparison from a file, and how many blocks each rule needs for a given KL."""

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

MOST_BYTES, MOST_LINES = 2**24, 20_000
MOST_PARTS = 2**12  # of one line
LEAST_KL = 1e-9
TARGET_KL = 0.089
OURS = "hads"
WHAT = "a row of a policy comparison"


class Row(Frozen, extra="ignore"):
    """What one rule loses at one budget; other fields of a row are not looked at."""

    context: Positive
    block: Positive
    rule: Text
    budget: Fraction
    effective: Annotated[Number, Field(ge=0)] = Field(description="budget + what choosing costs")
    documents: Count
    kl: Annotated[Number, Field(ge=0)]


@dataclasses.dataclass(frozen=True)
class Needed:
    """The share of blocks that a rule needs: exactly so many, or outside of what was measured."""

    share: float
    relation: Literal["=", "<", ">"]

    def __str__(self) -> str:
        mark = "" if self.relation == "=" else f"{self.relation} "
        return f"{mark}{self.share:.1%}"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule at all its budgets, in their order."""

    name: str
    rows: tuple[Row, ...]

    @property
    def is_ours(self) -> bool:
        return self.name == OURS

    def needed(self, kl: float = TARGET_KL, *, with_choosing: bool = False) -> Needed:
        """Blocks for a KL, by a straight line between logarithms of the measured KLs."""
        shares = [row.effective if with_choosing else row.budget for row in self.rows]
        return needed(shares, [row.kl for row in self.rows], kl)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All rules at one context and block size.

    Args:
        context: tokens of each document.
        block: tokens of a block.
        rules: those that need fewest blocks first.
        commit: of the code that measured; None if the file does not tell.
    """

    context: int
    block: int
    rules: tuple[Rule, ...]
    commit: str | None

    @property
    def documents(self) -> int:
        """The fewest that a row is a mean of."""
        return min(row.documents for rule in self.rules for row in rule.rows)

    @property
    def origin(self) -> str:
        """Where the numbers come from."""
        texts = f"{self.documents} document{'' if self.documents == 1 else 's'}"
        return f"{texts}, commit {self.commit or 'not told'}"

    def to_dict(self, kl: float = TARGET_KL) -> dict[str, Any]:
        """The figures behind chart and table."""
        return {
            "context": self.context,
            "block": self.block,
            "documents": self.documents,
            "commit": self.commit,
            "target_kl": kl,
            "rules": [
                {
                    "rule": rule.name,
                    "needed": dataclasses.asdict(rule.needed(kl)),
                    "needed_with_choosing": dataclasses.asdict(rule.needed(kl, with_choosing=True)),
                    "budget": [row.budget for row in rule.rows],
                    "effective": [row.effective for row in rule.rows],
                    "kl": [row.kl for row in rule.rows],
                }
                for rule in self.rules
            ],
        }


def needed(shares: Sequence[float], kls: Sequence[float], target: float) -> Needed:
    """The share at which a falling KL first reaches a target.

    Args:
        shares: of blocks, ascending.
        kls: measured there.
        target: KL.

    Example:
        >>> str(needed([0.1, 0.2, 0.4], [0.4, 0.2, 0.05], 0.1))
        '30.0%'
        >>> str(needed([0.1, 0.2], [0.4, 0.2], 0.1))
        '> 20.0%'
    """
    place = next((i for i, kl in enumerate(kls) if kl <= target), None)
    if place is None:
        return Needed(shares[-1], ">")
    if place == 0:
        return Needed(shares[0], "=" if kls[0] == target else "<")
    above, below, wanted = (
        math.log(max(kl, LEAST_KL)) for kl in (kls[place - 1], kls[place], target)
    )
    part = (above - wanted) / (above - below)
    return Needed(shares[place - 1] + part * (shares[place] - shares[place - 1]), "=")


def read_ladder(path: Path) -> tuple[Comparison, ...]:
    """The comparisons of a file of rows, one JSON object per line.

    A line without a rule says where the rows after it come from.

    Args:
        path: of the file, at most 16 MB.
    """
    data = _json.read(path, max_bytes=MOST_BYTES)
    lines = [line for line in data.splitlines() if line.strip()]
    if len(data) > MOST_BYTES or len(lines) > MOST_LINES:
        raise _json.invalid_file("rows of a policy comparison", "more than 16 MB or 20000 lines")
    rows, commit = [], None
    for line in lines:
        document = _json.loads(line, what=WHAT, max_bytes=MOST_BYTES, max_containers=MOST_PARTS)
        if "rule" in document:
            rows.append((validate(Row, document, what=WHAT), commit))
        else:
            commit = _commit(document)
    if not rows:
        raise ArgumentError("the file has no rows", got=path, expected="a line per measurement")
    place = lambda pair: (pair[0].context, pair[0].block)
    groups = itertools.groupby(sorted(rows, key=place), key=place)
    return tuple(_comparison(*sizes, list(group)) for sizes, group in groups)


def _comparison(context: int, block: int, pairs: list[tuple[Row, str | None]]) -> Comparison:
    rules: dict[str, list[Row]] = {}
    for row, _ in pairs:
        rules.setdefault(row.rule, []).append(row)
    found = [Rule(name, _ordered(rows)) for name, rows in rules.items()]
    found.sort(key=_by_need)
    return Comparison(context, block, tuple(found), pairs[-1][1])


def _by_need(rule: Rule) -> tuple[bool, float, float]:
    """What was never reached comes last, by the KL where it ends."""
    found = rule.needed(with_choosing=True)
    return found.relation == ">", 0.0 if found.relation == ">" else found.share, rule.rows[-1].kl


def _ordered(rows: Iterable[Row]) -> tuple[Row, ...]:
    ordered = tuple(sorted(rows, key=lambda row: row.budget))
    for before, after in itertools.pairwise(ordered):
        if before.budget == after.budget:
            raise ArgumentError(
                "a rule is there twice at one budget",
                got=f"{after.rule} at {after.budget:.1%}, context {after.context}",
                expected="every measurement once",
            )
    return ordered


def _commit(document: dict[str, Any]) -> str | None:
    machine = document.get("environment")
    commit = machine.get("commit") if isinstance(machine, dict) else None
    return commit[:40] if isinstance(commit, str) and commit.isprintable() else None
