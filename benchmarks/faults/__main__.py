"""Puts faults into real training runs, one after the other, and measures what comes of them.

python -m benchmarks.faults                 # all of them, about a quarter of an hour
python -m benchmarks.faults --only F6,F7    # the rows of the others stay
python -m benchmarks.faults --quick         # a part of them, fewer trials, most in one process
python -m benchmarks.faults --planted       # bugs on purpose: every one must make its check fail
"""

import argparse
import concurrent.futures
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from benchmarks.experiments.common import RESULTS
from benchmarks.faults.hosts import HOSTS
from benchmarks.faults.numbers import NUMBERS
from benchmarks.faults.planted import BUGS, planted
from benchmarks.faults.processes import PROCESSES
from benchmarks.faults.results import Fault, save, seconds_of, table
from benchmarks.faults.runs import Ground, prepare
from benchmarks.faults.saves import SAVES
from benchmarks.faults.surroundings import SURROUNDINGS
from benchmarks.peers.client import ROOT
from xsake._provenance import environment

FAULTS: dict[str, Callable[[Ground, bool], Fault]] = dict(
    sorted(
        (SAVES | PROCESSES | NUMBERS | SURROUNDINGS | HOSTS).items(),
        key=lambda pair: int(pair[0][1:]),
    )
)
QUICK = ("F2", "F3", "F4", "F11", "F13", "F16", "F22", "F23")
TIMED = ("F15", "F19")  # by the length of steps: nothing else runs meanwhile
LANES = 2  # of all others: half of a start keeps one core busy, the rest waits


def measure(number: str, ground: Ground, *, is_quick: bool = False) -> Fault:
    """Put one fault into runs, and time it.

    Args:
        number: such as F7.
        ground: folder of the runs.
        is_quick: fewer trials.
    """
    begin = time.monotonic()
    fault = FAULTS[number](ground, is_quick)
    fault.wall_seconds = time.monotonic() - begin
    return fault


def main() -> int:
    """Measure what is asked for; 0 when every gate is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("--only", help="numbers with commas between them, such as F6,F7")
    parser.add_argument("--quick", action="store_true", help="a part, with fewer trials")
    parser.add_argument("--planted", action="store_true", help="check the checks, with bugs")
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--folder", type=Path, help="for the runs, which stay there; made anew")
    given = parser.parse_args()
    numbers = given.only.upper().split(",") if given.only else [*(QUICK if given.quick else FAULTS)]
    if unknown := [number for number in numbers if number not in FAULTS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    out = given.out or (None if given.quick else RESULTS / "faults.json")
    with tempfile.TemporaryDirectory(prefix="xsake-faults-") as temporary:
        if given.planted:
            return _check_the_checks((given.folder or Path(temporary)).absolute())
        return _measured(numbers, given.folder or Path(temporary), out, is_quick=given.quick)


def _measured(numbers: list[str], folder: Path, out: Path | None, *, is_quick: bool) -> int:
    console, where, done = Console(), environment(ROOT), []
    begin, earlier = time.monotonic(), seconds_of(out)
    ground = prepare(folder.absolute(), is_inside=is_quick)
    for fault in _in_lanes(numbers, ground, is_quick=is_quick):
        done.append(fault)
        word = "met" if fault.is_met else "NOT MET"
        summary = f"{fault.number} {fault.name}: {fault.passes}/{len(fault.trials)}, {word}"
        console.print(f"{summary}, {fault.wall_seconds:.0f} s", highlight=False)
        for trial in fault.trials:
            for problem in trial.problems:
                console.print(f"  {trial.label}: {problem}", style="red", markup=False)
        if out is not None:
            spent = time.monotonic() - begin
            save(out, done, where, seconds=spent, earlier=earlier, is_quick=is_quick)
    console.print(table(sorted(done, key=lambda fault: int(fault.number[1:]))))
    console.print(f"{time.monotonic() - begin:.0f} s in all")
    return 0 if all(fault.is_met for fault in done) else 1


def notices(name: str, ground: Ground) -> bool:
    """Whether the check of a fault fails with a bug in place.

    Args:
        name: of the bug.
        ground: folder of the runs.
    """
    assert ground.straight, "made without the bug"
    with planted(name):
        fault = measure(BUGS[name].fault, dataclasses.replace(ground, bug=name), is_quick=True)
    return not fault.is_met


def _check_the_checks(folder: Path) -> int:
    console, ground = Console(), prepare(folder, is_inside=True)
    results = {name: notices(name, ground) for name in BUGS}
    for name, is_noticed in results.items():
        word = "fails, as it must" if is_noticed else "DOES NOT NOTICE"
        console.print(f"{name}: {BUGS[name].fault} {word}", highlight=False)
    return 0 if all(results.values()) else 1


def _in_lanes(numbers: list[str], ground: Ground, *, is_quick: bool) -> Iterator[Fault]:
    """Faults as they are done."""
    together = [] if is_quick else [number for number in numbers if number not in TIMED]
    if len(together) == 1:
        together = []
    if together:
        assert ground.straight and ground.straight_pair, "made once, before two lanes ask for them"
        with concurrent.futures.ThreadPoolExecutor(LANES) as pool:
            under_way = [pool.submit(measure, number, ground) for number in together]
            for each in concurrent.futures.as_completed(under_way):
                yield each.result()
    for number in numbers:
        if number not in together:
            yield measure(number, ground, is_quick=is_quick)


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    sys.exit(main())
