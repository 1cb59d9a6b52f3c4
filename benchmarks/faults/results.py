"""What a fault was met with: trials, their times, and whether the gate holds."""

import contextlib
import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from xsake._io import atomic_write
from xsake._provenance import Environment
from xsake.errors import XsakeError

NO_TIMES = "nothing"


class FaultError(Exception):
    """A run did not do what the trial waited for."""


@dataclass
class Trial:
    """One injection.

    Args:
        label: which one it is.
        problems: everything that was not as the gate wants it; empty: it has passed.
        seconds: how long what the gate times took; None if that was not reached.
    """

    label: str
    problems: list[str] = field(default_factory=list)
    seconds: float | None = None

    def require(self, is_so: bool, otherwise: object) -> None:
        """One of the things that the gate wants.

        Args:
            is_so: whether it is so.
            otherwise: message if it is not.
        """
        if not is_so:
            self.problems.append(str(otherwise))


@dataclass
class Fault:
    """A fault, its gate and all trials of it.

    Args:
        number: such as F7.
        name: of the fault.
        gate: when the fault counts as survived, in words.
        timed: what the seconds of a trial are.
        trials: one injection each.
        figures: whatever else was measured.
        wall_seconds: of the whole.
    """

    number: str
    name: str
    gate: str
    timed: str = NO_TIMES
    trials: list[Trial] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0

    @contextlib.contextmanager
    def trial(self, label: str) -> Iterator[Trial]:
        """One injection; a run that does not do what is waited for fails the trial, not us.

        Args:
            label: which one it is.
        """
        made = Trial(label)
        self.trials.append(made)
        try:
            yield made
        except (FaultError, XsakeError, subprocess.SubprocessError, OSError, LookupError) as error:
            made.problems.append(f"{type(error).__name__}: {error}"[:2000])

    @property
    def passes(self) -> int:
        """Trials without a problem."""
        return sum(not trial.problems for trial in self.trials)

    @property
    def is_met(self) -> bool:
        """Whether every trial has passed, and there was one."""
        return bool(self.trials) and self.passes == len(self.trials)

    def seconds(self, share: float) -> float | None:
        """A quantile of the trials' times, the next higher one; None without any.

        Args:
            share: of the trials, 0.5 or 0.95.
        """
        times = sorted(trial.seconds for trial in self.trials if trial.seconds is not None)
        return times[max(0, math.ceil(share * len(times)) - 1)] if times else None

    def row(self) -> dict[str, Any]:
        """As it is published."""
        return {
            "fault": self.number,
            "name": self.name,
            "gate": self.gate,
            "is_met": self.is_met,
            "n": len(self.trials),
            "passes": self.passes,
            "timed": self.timed,
            "seconds_p50": _rounded(self.seconds(0.5)),
            "seconds_p95": _rounded(self.seconds(0.95)),
            "wall_seconds": _rounded(self.wall_seconds),
            "figures": self.figures,
            "problems": [
                {"trial": trial.label, "problems": trial.problems}
                for trial in self.trials
                if trial.problems
            ],
        }


def save(
    path: Path,
    faults: list[Fault],
    where: Environment,
    *,
    seconds: float,
    earlier: float,
    is_quick: bool,
) -> None:
    """Write all results, whole or not at all; faults that were not measured now keep their rows.

    Args:
        path: the file.
        faults: measured so far.
        where: and with what.
        seconds: so far; less than the sum if some run in parallel.
        earlier: seconds of the command that measured the rows that are kept.
        is_quick: fewer trials than what is published.
    """
    when = {"utc": where.utc, "commit": where.commit, "load_average": where.load_average}
    rows = {row["fault"]: row for row in _known(path)}
    kept = rows.keys() - {fault.number for fault in faults}
    rows |= {fault.number: fault.row() | when for fault in faults}
    ordered = sorted(rows.values(), key=lambda row: int(row["fault"][1:]))
    document = {
        "environment": asdict(where),
        "is_quick": is_quick,
        "wall_seconds": _rounded(seconds + (earlier if kept else 0.0)),
        "faults": ordered,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(document, indent=1) + "\n")


def _known(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["faults"] if path.exists() else []


def seconds_of(path: Path | None) -> float:
    """How long the results in a file took; 0 without any."""
    return json.loads(path.read_text())["wall_seconds"] if path and path.exists() else 0.0


def table(faults: list[Fault]) -> Table:
    """The results for the screen."""
    drawn = Table(title="Faults", title_justify="left")
    for name in ("", "fault", "gate", "passed", "p50", "p95", "timed", "figures"):
        drawn.add_column(name, justify="right" if name in ("passed", "p50", "p95") else "left")
    for fault in faults:
        drawn.add_row(
            f"[{'green' if fault.is_met else 'red'}]{fault.number}",
            fault.name,
            fault.gate,
            f"{fault.passes}/{len(fault.trials)}",
            *(_shown(fault.seconds(share)) for share in (0.5, 0.95)),
            "" if fault.timed == NO_TIMES else fault.timed,
            ", ".join(f"{name} {value}" for name, value in fault.figures.items()),
        )
    return drawn


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"
