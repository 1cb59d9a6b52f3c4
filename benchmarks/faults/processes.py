"""Faults of processes: signals, kills, hangs, storms of kills, and another number of them."""

import itertools
import json
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.faults.results import Fault, FaultError, Trial
from benchmarks.faults.runs import HEARTBEAT, INTERVAL, Ground, Run
from benchmarks.faults.watching import Started, is_gone, kill, wait_until
from xsake.observability import goodput

STOP_SECONDS, SPARE_SECONDS = 5.0, 2.0
PACE = {"pace": 0.2}  # steps that are longer than a save of so little
STORM_STEPS, STORM_KILLS = 200, 10
SAME_LOSS = 1e-5


def asked_to_stop(ground: Ground, is_quick: bool) -> Fault:
    """F6: SIGTERM to one of two processes."""
    fault = Fault(
        "F6", "SIGTERM to one of two processes",
        f"both save the same step and end with code 75 in {STOP_SECONDS:g} s; the run resumes",
        timed="from the signal to the end of both",
    )  # fmt: skip
    for rank in (0, 1):
        run = ground.run(f"f6-{rank}", "mesh.data=2")
        with fault.trial(f"to process {rank}") as trial, run.launched(inject=PACE) as started:
            first = started.all_ranks(2)
            started.until(lambda run=run: run.last_step >= 13, "steps")
            begin = kill(first[rank], signal.SIGTERM)
            _all_gone(first)
            trial.seconds = time.monotonic() - begin
            trial.require(trial.seconds <= STOP_SECONDS, f"{trial.seconds:.1f} s")
            stopped = run.last_step + 1
            trial.require(run.steps[-1] == stopped, f"saved {run.steps}, stopped at {stopped}")
            started.ended(0)
            codes = started.text.count("requests a restart, code 75")
            trial.require(codes == 2, f"{codes} of 2 ended with code 75")
            _is_straight(run, trial, ground)
            lost = goodput.read_goodput(run.folder / "goodput.jsonl").lost_steps
            trial.require(lost == 0, f"{lost} steps were done again")
    return fault


def killed_worker(ground: Ground, is_quick: bool) -> Fault:
    """F7: SIGKILL to the second of two processes."""
    limit = HEARTBEAT + SPARE_SECONDS
    return _killed("F7", "SIGKILL to a worker", 1, limit, ground)


def killed_coordinator(ground: Ground, is_quick: bool) -> Fault:
    """F8: SIGKILL to the first of two processes, where all meet."""
    return _killed("F8", "SIGKILL to the coordinator", 0, SPARE_SECONDS, ground)


def _killed(number: str, name: str, rank: int, limit: float, ground: Ground) -> Fault:
    fault = Fault(
        number, name,
        f"the other is gone in {limit:g} s; at most {INTERVAL} steps are lost; same end, bit by "
        "bit",
        timed="from the kill to the end of the other",
    )  # fmt: skip
    draw = random.Random(rank)
    run = ground.run(f"{number}-alone".lower(), "mesh.data=2")
    with fault.trial("without a launcher") as trial:
        target = draw.randrange(13, 19)
        with run.pair(inject=PACE) as both:
            both[0].until(lambda: run.last_step >= target, "steps")
            begin = kill(both[rank].process.pid)
            wait_until(lambda: both[1 - rank].is_over, "the end of the other")
            trial.seconds = time.monotonic() - begin
        trial.require(trial.seconds <= limit, f"{trial.seconds:.1f} s")
        with run.pair() as both:
            for one in both:
                one.ended(0)
        _is_straight(run, trial, ground)
    run = ground.run(f"{number}-launched".lower(), "mesh.data=2")
    with fault.trial("under xsake launch") as trial, run.launched(inject=PACE) as started:
        target = draw.randrange(13, 19)
        first = started.all_ranks(2)
        started.until(lambda: run.last_step >= target, "steps")
        begin = kill(first[rank])
        _all_gone(first)
        trial.seconds = time.monotonic() - begin
        trial.require(trial.seconds <= limit, f"{trial.seconds:.1f} s")
        lost = run.last_step + 1 - max(run.steps, default=0)
        trial.require(lost <= INTERVAL, f"{lost} steps lost")
        fault.figures["steps lost"] = lost
        started.ended(0)
        _is_straight(run, trial, ground)
    return fault


def hangs(ground: Ground, is_quick: bool) -> Fault:
    """F9: one of two processes stands still."""
    limit = HEARTBEAT + SPARE_SECONDS
    fault = Fault(
        "F9", "one of two processes hangs",
        f"the other ends in {limit:g} s and has written where it hung; same end, bit by bit",
        timed="from the stop to the end of the other",
    )  # fmt: skip
    run = ground.run("f9", "mesh.data=2", "run.step_timeout_s=2.0")
    with fault.trial("SIGSTOP to process 1") as trial, run.launched(inject=PACE) as started:
        first = started.all_ranks(2)
        started.until(lambda: run.last_step >= 13, "steps")
        begin = kill(first[1], signal.SIGSTOP)
        wait_until(lambda: is_gone(first[0]), "the end of the other")
        trial.seconds = time.monotonic() - begin
        trial.require(trial.seconds <= limit, f"{trial.seconds:.1f} s")
        stacks = (run.folder / "stacks-0.txt").read_text()
        trial.require("train.py" in stacks, f"stacks: {stacks[-300:]!r}")
        started.ended(0)
        _is_straight(run, trial, ground)
    return fault


def kill_storm(ground: Ground, is_quick: bool) -> Fault:
    """F10: ten kills at random steps of 200, each of them started again by the launcher."""
    fault = Fault(
        "F10", f"{STORM_KILLS} kills in {STORM_STEPS} steps",
        f"same end and same batches as the straight run, bit by bit; at most "
        f"{STORM_KILLS * INTERVAL} wasted steps; goodput within 2 points of an independent count",
        timed="from a kill to the next step that is new",
    )  # fmt: skip
    # A batch that is large enough for a step to take longer than what is around it.
    settings = f"run.steps={STORM_STEPS}", "data.batch=96"
    straight = ground.run("f10-straight", *settings, "checkpoint.save_interval=100")
    if not straight.steps:
        straight.train()
    run, times = ground.run("f10", *settings), ground.folder / "f10-times.txt"
    targets = sorted(random.Random(10).sample(range(5, STORM_STEPS - 5), STORM_KILLS))
    options = "--max-restarts", str(STORM_KILLS), "--reset-failures-after", "1"
    inject = {"times": str(times)}
    with fault.trial("the storm") as trial, run.launched(1, *options, inject=inject) as started:
        wasted, recoveries = _storm(run, started, targets)
        started.ended(0)
        end = time.time()
        begin = _begun(run)
        trial.seconds = sorted(recoveries)[len(recoveries) // 2]
        found, expected = run.saved(), straight.saved()
        trial.require(found.step == STORM_STEPS, f"ends at {found.step}")
        trial.require(found.digest == expected.digest, "other bits at the end")
        trial.require(run.windows == straight.windows, "other batches")
        trial.require(wasted <= STORM_KILLS * INTERVAL, f"{wasted} wasted steps")
        report = goodput.read_goodput(run.folder / "goodput.jsonl")
        trial.require(report.attempts == STORM_KILLS + 1, f"{report.attempts} attempts")
        counted = _productive(times) / (end - begin)
        trial.require(abs(report.share - counted) <= 0.02, f"{report.share:.4f}, not {counted:.4f}")
        fault.figures |= {
            "kills": len(recoveries), "wasted steps": wasted,
            "goodput by the recorder": round(report.share, 4),
            "goodput by our count": round(counted, 4),
            "relative difference": round(abs(report.share / counted - 1), 4),
            "recovery p50 s": round(trial.seconds, 2), "recovery max s": round(max(recoveries), 2),
        }  # fmt: skip
    return fault


def _storm(run: Run, started: Started, targets: list[int]) -> tuple[int, list[float]]:
    """Kill whenever a step is reached; steps that had to be done again, seconds to new steps."""
    wasted, recoveries, before = 0, [], {}
    for target in targets:
        before = started.all_ranks(1, other_than=before)
        started.until(lambda target=target: run.last_step >= target, f"step {target}")
        begin = kill(before[0])
        wait_until(lambda old=before: is_gone(old[0]), "the end")
        done = run.last_step
        wasted += done + 1 - max(run.steps, default=0)
        started.until(lambda done=done: run.last_step > done, "new steps")
        recoveries.append(time.monotonic() - begin)
    return wasted, recoveries


def _begun(run: Run) -> float:
    """When the recorder began to count, by the wall clock."""
    with (run.folder / "goodput.jsonl").open() as file:
        return float(json.loads(file.readline())["wall"])


def _productive(times: Path) -> float:
    """Return the seconds that devices spent on new steps; a step counts once."""
    done, total = -1, 0.0
    for line in times.read_text().splitlines():
        words = line.split()
        if len(words) == 3 and int(words[0]) > done:
            done, total = int(words[0]), total + float(words[2]) - float(words[1])
    return total


def other_topology(ground: Ground, is_quick: bool) -> Fault:
    """F12: a run of two processes is resumed by one, with two devices and with one."""
    fault = Fault(
        "F12", "two processes become one",
        f"with two devices the same bits; with one the same losses to {SAME_LOSS:g} for 20 steps",
    )  # fmt: skip
    straight = ground.straight_pair
    with fault.trial("one process of two devices") as trial:
        run = straight.kept_to("f12-two", 20)
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        run.train(variables=flags)
        _is_straight(run, trial, ground)
    with fault.trial("one process of one device") as trial:
        run = Run(ground, straight.kept_to("f12-one", 20).name)
        run.train()
        pairs = itertools.zip_longest(run.metrics[20:], straight.metrics[20:])
        worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs)
        trial.require(len(run.metrics) == 40 and worst <= SAME_LOSS, f"losses differ by {worst}")
        trial.require(run.windows == ground.straight.windows[:40], "other batches")
        fault.figures["losses differ by"] = worst
    return fault


def _all_gone(ranks: Mapping[int, int]) -> None:
    wait_until(lambda: all(map(is_gone, ranks.values())), "the end of all")


def _is_straight(run: Run, trial: Trial, ground: Ground) -> None:
    """Two processes that nothing happened to end in the same way."""
    straight = ground.straight_pair
    found, expected = run.saved(), straight.saved()
    trial.require(found.step == expected.step, f"ends at step {found.step}")
    trial.require(found.digest == expected.digest, "other bits at the end")
    if run.windows != straight.windows:
        raise FaultError("other batches")


PROCESSES = {
    "F6": asked_to_stop,
    "F7": killed_worker,
    "F8": killed_coordinator,
    "F9": hangs,
    "F10": kill_storm,
    "F12": other_topology,
}
