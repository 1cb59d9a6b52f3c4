"""Faults of numbers: stops that change bits, bad batches, flipped parameters, slow processes."""

import json
import re

import numpy as np

from benchmarks.faults.results import Fault
from benchmarks.faults.runs import Ground
from xsake.training.state import digest

POISONED = 37
FLIPPED_AFTER, CHECKED_EVERY = 11, 5
SLOW_STEPS, CLEAN_STEPS = 200, 1000


def exact_resume(ground: Ground, is_quick: bool) -> Fault:
    """F11: stopped after the first step, in the middle, and inside the batch of two epochs."""
    fault = Fault(
        "F11", "stopped and started again",
        "weights, moments, keys and batches as in the straight run, bit by bit",
    )  # fmt: skip
    straight = ground.straight
    edge = _epoch_edge(straight.windows)
    for stop in (1, 20, edge)[-1 if is_quick else 0 :]:
        run = ground.run(f"f11-{stop}")
        with fault.trial(f"after step {stop}") as trial:
            run.different(f"run.steps={stop}").train()
            trial.require(run.saved().digest == straight.saved(stop).digest, "other bits before")
            run.train()
            found = run.saved()
            trial.require(found.step == 40, f"ends at step {found.step}")
            trial.require(found.digest == straight.saved(40).digest, "other bits at the end")
            trial.require(run.windows == straight.windows[:40], "other batches")
    fault.figures["epoch ends in step"] = edge
    return fault


def bad_batches(ground: Ground, is_quick: bool) -> Fault:
    """F13: a batch that makes NaN, one of 50 times the gradients, and three of NaN."""
    fault = Fault(
        "F13", "a batch of NaN, or a spike of 50 times",
        "skipped, with every weight and moment as it was; three in a row end the run, with a "
        "record of what to replay that reproduces it",
    )  # fmt: skip
    for kind in ("nan",) if is_quick else ("nan", "spike"):
        run = ground.run(f"f13-{kind}", "checkpoint.save_interval=1", "guard.window=16")
        with fault.trial(kind) as trial:
            run.train(inject={"poison": {str(POISONED): kind}})
            before, after = run.saved(POISONED).state, run.saved(POISONED + 1).state
            for part in ("parameters", "optimizer", "key"):
                is_same = digest(getattr(before, part)) == digest(getattr(after, part))
                trial.require(is_same, f"{part} changed")
            skipped = [line["step"] for line in run.metrics if line["is_skipped"]]
            trial.require(skipped == [POISONED], f"skipped {skipped}")
            total = int(run.saved().state.guard.total)
            trial.require(total == 1, f"{total} skips in the state")
            norms = [line["gradient_norm"] for line in run.metrics]
            usual = float(np.median(norms[POISONED - 16 : POISONED]))
            if kind == "spike":
                fault.figures["spike, in usual norms"] = round(norms[POISONED] / usual, 1)
    poison = {"poison": {str(POISONED + i): "nan" for i in range(3)}}
    run = ground.run("f13-hopeless")
    with fault.trial("three of NaN in a row") as trial:
        ended = run.train(code=2, inject=poison)
        trial.require("consecutive updates were skipped" in ended.text, ended.text[-500:])
        replay = _replay(run)
        trial.require(replay["step"] == POISONED + 2, f"replay: {replay}")
        windows = ground.straight.windows[POISONED : POISONED + 3]
        trial.require(replay["windows"] == windows, f"windows {replay['windows']}")
        trial.require(run.steps[-1] == 30 == replay["checkpoint"], f"checkpoints {run.steps}")
        if is_quick:
            return fault
        run.train(code=2, inject=poison)
        trial.require(_replay(run) == replay, f"another end the second time: {_replay(run)}")
        run.train()  # without the poison
        is_exact = run.saved().digest == ground.straight.saved(40).digest
        trial.require(is_exact, "the run cannot be saved")
    return fault


def flipped_parameter(ground: Ground, is_quick: bool) -> Fault:
    """F14: one bit of a parameter of which three processes have a copy."""
    fault = Fault(
        "F14", "a bit of one copy of a parameter flips",
        "found at the next comparison, with process and leaf; the run resumes from before",
    )  # fmt: skip
    settings = ("mesh.data=3", f"run.replica_check_interval={CHECKED_EVERY}", "run.steps=20")
    clean, run = ground.run("f14-clean", *settings), ground.run("f14", *settings)
    marker = ground.folder / "f14-flipped"
    marker.unlink(missing_ok=True)
    flip = {"step": FLIPPED_AFTER, "process": 1, "marker": str(marker)}
    with fault.trial("process 1 of 3") as trial:
        with clean.launched(3) as started:
            started.ended(0)
        with run.launched(3, inject={"flip": flip}) as started:
            started.ended(0)
        trial.require(marker.exists(), "nothing was flipped")
        named = r"embedding: process 1 \(device \d+\) against 2 copies that agree"
        trial.require(bool(re.search(named, started.text)), started.text[-800:])
        next_check = (FLIPPED_AFTER // CHECKED_EVERY + 1) * CHECKED_EVERY
        trial.require(run.saved().digest == clean.saved().digest, "other bits at the end")
        fault.figures |= {
            "flipped after step": FLIPPED_AFTER,
            "compared after step": next_check - 1,
        }
    return fault


def straggler(ground: Ground, is_quick: bool) -> Fault:
    """F15: one of two processes takes three times as long; and neither does."""
    fault = Fault(
        "F15", "one of two processes is slow",
        f"named within 150 steps; none is named in {CLEAN_STEPS} steps without one",
    )  # fmt: skip
    long = (
        "mesh.data=2",
        "checkpoint.save_interval=500",
        "run.log_interval=50",
        "optimizer.total_steps=2000",
    )
    with fault.trial("process 1 takes three times as long") as trial:
        run = ground.run("f15-slow", *long, f"run.steps={SLOW_STEPS}")
        with run.launched(inject={"slow": {"process": 1, "ratio": 3}}) as started:
            started.ended(0)
        notes = [
            (line["step"], line["note"]) for line in run.metrics if "takes" in line.get("note", "")
        ]
        first = notes[0][0] if notes else None
        trial.require(first is not None and first <= 150, f"named at step {first}")
        trial.require(all("process 1 takes" in note for _, note in notes), f"notes {notes[:3]}")
        trial.require(not any("process 0 takes" in note for _, note in notes), "process 0 is named")
        fault.figures["named at step"] = first
    with fault.trial("none is slow") as trial:
        run = ground.run("f15-clean", *long, f"run.steps={CLEAN_STEPS}")
        with run.launched() as started:
            started.ended(0)
        notes = {line["note"] for line in run.metrics if "takes" in line.get("note", "")}
        trial.require(not notes, f"false: {sorted(notes)[:3]}")
        fault.figures["false in clean steps"] = len(notes)
    return fault


def _epoch_edge(windows: list[list[int]]) -> int:
    """Steps until the first batch in which a window comes for the second time."""
    seen: set[int] = set()
    for step, batch in enumerate(windows):
        if seen & set(batch):
            return step
        seen |= set(batch)
    raise AssertionError("the straight run reads no window twice")


def _replay(run) -> dict:
    return json.loads((run.folder / "refused.json").read_text())


NUMBERS = {
    "F11": exact_resume,
    "F13": bad_batches,
    "F14": flipped_parameter,
    "F15": straggler,
}
