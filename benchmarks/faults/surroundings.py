"""Faults of what is around a run: clocks, folders, homes, networks, and caches that are cut."""

import shutil
import time
from pathlib import Path

from benchmarks.faults.results import Fault, Trial
from benchmarks.faults.runs import Ground, Run
from benchmarks.faults.watching import kill
from benchmarks.observability import streams

DAY = 86400.0
PLANNED = ('attention.kind="plan"', "attention.budget=0.8", "attention.block=8")

# Of F19; `benchmarks.observability.streams` takes four times as many steps for its own row.
PAIRS, STEPS_OF_A_PAIR = 5, 50


def odd_surroundings(ground: Ground, is_quick: bool) -> Fault:
    """F18: a clock that jumps, a cache that cannot be written, no home, no network."""
    fault = Fault(
        "F18", "clock, cache, home or network fail", "the same end as always, bit by bit",
        timed="the whole run",
    )  # fmt: skip
    cache = ground.folder / "compiled-read-only"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(mode=0o555)
    nowhere = {"HOME": None, "XDG_CACHE_HOME": None, "XDG_CONFIG_HOME": None}
    cases = {
        "the clock jumps a day back, again and again": {"inject": {"clock": -DAY}},
        "the clock jumps a day ahead, again and again": {"inject": {"clock": DAY}},
        "the cache cannot be written": {
            "inject": {"alone": "root"}, "variables": {"JAX_COMPILATION_CACHE_DIR": str(cache)},
        },
        "there is no home": {"variables": nowhere},
        "there is no network": {"inject": {"alone": "network"}},
    }  # fmt: skip
    for number, (label, given) in enumerate(cases.items()):
        run = ground.run(f"f18-{number}")
        with fault.trial(label) as trial:
            begin = time.monotonic()
            run.train(**given)
            trial.seconds = time.monotonic() - begin
            _is_straight(run, trial, ground)
    return fault


def slow_clients(ground: Ground, is_quick: bool) -> Fault:
    """F19: 200 clients of the dashboard's live updates that hardly read what they are sent."""
    fault = Fault(
        "F19", "200 slow clients of live updates",
        f"steps take at most {streams.MOST - 1:.0%} longer; the server's memory grows by at most "
        f"{streams.MOST_GROWTH:.0f} MB",
        timed="a step, with the clients",
    )  # fmt: skip
    count, pairs = (20, 1) if is_quick else (streams.CLIENTS, PAIRS)
    with fault.trial(f"{count} clients, {pairs} times") as trial:
        found = streams.measure(ground, clients=count, steps=STEPS_OF_A_PAIR, pairs=pairs)
        trial.seconds = found["seconds"][0]
        trial.require(found["ratio"] <= streams.MOST, f"{found['ratio']} times as long")
        growth = found["growth_megabytes"]
        trial.require(growth <= streams.MOST_GROWTH, f"{growth} MB more")
        for name in ("ratio", "growth_megabytes", "dropped_events"):
            fault.figures[name.replace("_", " ")] = found[name]
    return fault


def cut_caches(ground: Ground, is_quick: bool) -> Fault:
    """F20: compiled programs and profiles that are only half there."""
    fault = Fault(
        "F20", "caches are cut in the middle", "not used, made again, with a warning; same end"
    )
    with fault.trial("compiled programs") as trial:
        cache = ground.folder / "compiled-cut"
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(ground.cache, cache)
        cut = [_cut(path) for path in cache.rglob("*") if path.is_file()]
        run = ground.run("f20-compiled")
        ended = run.train(variables={"JAX_COMPILATION_CACHE_DIR": str(cache)})
        _is_straight(run, trial, ground)
        trial.require("persistent compilation cache" in ended.text, "no warning")
        fault.figures["programs cut"] = len(cut)
    with fault.trial("a profile that plans are made of") as trial:
        straight = ground.run("f20-straight", *PLANNED)
        straight.train()
        run = ground.run("f20-profile", *PLANNED)
        with run.started(inject={"pace": 0.1}) as started:
            started.until(lambda: 20 in run.steps, "step 20 saved")
            kill(started.process.pid)
            started.process.wait()
        cut = [_cut(path) for path in (run.folder / "profiles").iterdir()]
        ended = run.train()
        trial.require(run.saved().digest == straight.saved().digest, "other bits at the end")
        trial.require("profile" in ended.text, f"no warning: {ended.text[-300:]}")
        fault.figures["profiles cut"] = len(cut)
    return fault


def _is_straight(run: Run, trial: Trial, ground: Ground) -> None:
    trial.require(run.saved().digest == ground.straight.saved(40).digest, "other bits at the end")
    trial.require(run.windows == ground.straight.windows[:40], "other batches")


def _cut(path: Path) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


SURROUNDINGS = {"F18": odd_surroundings, "F19": slow_clients, "F20": cut_caches}
