"""TPU kernels compared with JAX's splash attention, by libtpu's compiled programs; nothing is run.

python -m benchmarks.experiments.splash  # v5e and v6e; in an environment with libtpu, or builds one
python -m benchmarks.experiments.splash --quick  # v5e, one shape, nothing saved

Same target, same shape, same mask. Where splash can express the mask: vector memory, spills, and
VLIW bundles per 128 x 128 block, from the final schedule. On ragged heads: iterations, where splash
pads every row of every head to the widest one; iterations are defined
in `splash_sides`. Bundles are counted as scheduled: waiting for memory, which no
compiler knows, is not in them, so no speed follows from them.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from benchmarks.experiments.common import Settings, parse_settings, plain_row, show
from benchmarks.experiments.splash_job import Job
from benchmarks.peers.client import ROOT
from xsake._io import cache_folder
from xsake.benchmarking import BenchmarkRow, Claim, Shape, Verdict, append_rows, claims_table
from xsake.certify import environments, family, tpu

RESULTS = ROOT / "benchmarks" / "results" / "splash.jsonl"
TARGETS = ("v5e", "v6e")
PASSES = ("forward", "dq", "dkv")
# At 4096 tokens XLA would move whole operands into vector memory, which longer texts do not get.
OPERANDS_STAY_IN_HBM = (
    "--xla_vf_vmem_memory_space_assignment=false --xla_gf_vmem_memory_space_assignment=false"
)


class Heads(NamedTuple):
    """Query heads, kv heads and head dimension."""

    q: int
    kv: int
    dim: int


WIDE, GROUPED, NARROW = Heads(8, 8, 128), Heads(8, 2, 128), Heads(8, 8, 64)


def compiled_jobs(tokens: int, seed: int) -> list[Job]:
    """What is compiled for every target: both sides, blocks of 128 and 512."""
    problems = [("causal", heads) for heads in (WIDE, GROUPED, NARROW)]
    problems += [("window", WIDE), ("per_head", WIDE)]
    jobs = [
        Job(side, mask, tokens, *heads, block, seed)
        for mask, heads in problems
        for block in (128, 512)
        for side in ("splash", "xsake")
    ]
    ragged = (("splash", 128), ("splash", 512), ("xsake", 128))
    return jobs + [Job(side, "ragged_25", tokens, *WIDE, block, seed) for side, block in ragged]


def counted_jobs(tokens: int, seed: int) -> list[Job]:
    """Ragged heads: steps only, the same for every target; splash may choose its blocks."""
    return [
        Job(side, mask, length, *WIDE, block, seed, is_compiled=False)
        for length in (tokens, 4 * tokens)
        for mask in ("ragged_25", "ragged_50")
        for side, block in (("splash", 128), ("splash", 512), ("xsake", 128))
    ]


def ask(target: str, jobs: Sequence[Job]) -> tuple[dict[str, str], Iterator[dict]]:
    """The versions in the family's environment, and its answer to every job, as they come."""
    python = environments.find_interpreter(
        family.load_family("xsake.certify.tpu"),
        cache_folder("environments"),
        lambda words: print(words, file=sys.stderr),
    )
    dump = tempfile.TemporaryDirectory(prefix="xsake-splash-")
    log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed below
    variables = tpu.process_variables(Path(dump.name))
    variables["LIBTPU_INIT_ARGS"] += f" {OPERANDS_STAY_IN_HBM}"
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    process = subprocess.Popen(
        [str(python), "-m", "benchmarks.experiments.splash_sides", target, dump.name],
        cwd=ROOT, env=os.environ | variables, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    for job in jobs:
        process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
    process.stdin.close()
    replies = process.stdout

    def reply() -> dict:
        line = replies.readline()
        if not line:
            log.seek(0)
            raise RuntimeError(f"the process of {target} died:\n{log.read()[-2000:]}")
        return json.loads(line)

    def answers() -> Iterator[dict]:
        with dump, log, process:
            for _ in jobs:
                yield reply()

    return reply(), answers()


def measure(settings: Settings) -> tuple[list[BenchmarkRow], list[Claim]]:
    """Rows of every target, and what they say about us."""
    (tokens,) = settings.choose([4096], quick=2048)
    rows: list[BenchmarkRow] = []
    for target in TARGETS[:1] if settings.is_quick else TARGETS:
        jobs = compiled_jobs(tokens, settings.seed)
        if settings.is_quick:
            jobs = [job for job in jobs if job.mask == "causal" and job.kv_heads == job.q_heads][:2]
        elif target == TARGETS[0]:
            jobs += counted_jobs(tokens, settings.seed)
        versions, answers = ask(target, jobs)
        run = uuid.uuid4().hex[:12]
        for number, (job, answer) in enumerate(zip(jobs, answers, strict=True), start=1):
            print(f"{target} {number}/{len(jobs)} {job}", file=sys.stderr)
            if "refused" in answer:
                raise RuntimeError(f"{target} {job}: {answer['refused']}")
            rows += _rows(job, answer["counts"], target, run, versions, settings)
    return rows, _claims(rows)


def _rows(
    job: Job,
    counts: dict[str, dict[str, int]],
    target: str,
    run: str,
    versions: dict[str, str],
    settings: Settings,
) -> list[BenchmarkRow]:
    shape = Shape(
        q_tokens=job.tokens,
        kv_tokens=job.tokens,
        q_heads=job.q_heads,
        kv_heads=job.kv_heads,
        head_dim=job.head_dim,
    )
    ours = job.side == "xsake"
    return [
        plain_row(
            "splash", run, shape, settings,
            side=f"{job.side} {job.block}",
            implementation="xsake mosaic_tpu" if ours else "jax splash attention",
            direction=name, dtype="bfloat16", mask=job.mask, layout=job.mask,
            block_q=job.block, block_kv=job.block,
            device=f"tpu {target}, compiled only" if job.is_compiled else "none, counted only",
            temp_bytes=counts[name].get("temp_bytes"),
            counts={key: n for key, n in counts[name].items() if key != "temp_bytes"},
            versions=versions,
        )
        for name in PASSES
    ]  # fmt: skip


def inner_bundles(row: BenchmarkRow) -> float | None:
    """Bundles of one iteration without masks per 128 x 128 block; None if it was not compiled."""
    counts = row.counts or {}
    if "loop_bundles" not in counts:
        return None
    whole = counts["loop_bundles"]
    if "around_bundles" not in counts:  # no loop inside a grid step: it opens and closes rows
        whole -= counts["edge_bundles"]
    return whole / counts["iteration_blocks"]


def issued_bundles(row: BenchmarkRow) -> float | None:
    """Bundles of the whole call, with everything around the blocks; None if it was not compiled.

    Both numbers lean towards splash: every iteration of ours is counted with masks, and what opens
    and closes splash's rows is left out.
    """
    counts = row.counts or {}
    if "loop_bundles" not in counts:
        return None
    if "around_bundles" in counts:
        around = counts["grid_steps"] * counts["around_bundles"]
        return counts["iterations"] * counts["most_loop_bundles"] + around
    computed = counts["computed_blocks"] / counts["iteration_blocks"]
    return counts["grid_steps"] * counts["scalar_bundles"] + computed * counts["work_bundles"]


def _claims(rows: Sequence[BenchmarkRow]) -> list[Claim]:
    """Per target, mask, shape and pass: ours against splash, each with its better block size.

    Iterations are compared in blocks of 128, where both list the same blocks.
    """
    calls: dict[tuple, dict[str, BenchmarkRow]] = {}
    for row in rows:
        key = (row.device.split(",")[0], row.mask, _heads(row), row.direction)
        calls.setdefault(key, {})[row.side] = row
    claims = []
    for key, sides in calls.items():
        topic = " ".join(key)
        ours, theirs = (_iterations(sides[f"{name} 128"]) for name in ("xsake", "splash"))
        claims.append(_at_most(f"{topic}: iterations", ours, theirs))
        best = [_fewest_bundles(sides, name) for name in ("xsake", "splash")]
        if None not in best:
            claims.append(_at_most(f"{topic}: bundles of the call", *best))
    return claims


def _fewest_bundles(sides: dict[str, BenchmarkRow], name: str) -> float | None:
    found = [issued_bundles(row) for side, row in sides.items() if side.startswith(name)]
    return min((count for count in found if count is not None), default=None)


def _at_most(topic: str, ours: float, theirs: float) -> Claim:
    verdict = Verdict.PASS if ours <= theirs else Verdict.FAIL
    return Claim(topic, "at most splash's", f"{ours:.0f} of {theirs:.0f}", verdict)


def _iterations(row: BenchmarkRow) -> int:
    return (row.counts or {})["iterations"]


def _heads(row: BenchmarkRow) -> str:
    shape = row.shape
    return f"{shape.q_tokens}x{shape.q_heads}/{shape.kv_heads}x{shape.head_dim}"


def table(rows: Sequence[BenchmarkRow]) -> Table:
    """One line per kernel; bundles of an iteration are per block of 128 x 128."""
    where = ("device", "mask", "tokens x heads x dim", "pass", "side")
    counted = ("grid steps", "iterations", "listed", "computed")
    compiled = ("VMEM", "spills", "bundles of an iteration", "of the call")
    found = Table(*where, *counted, *compiled, title="splash")
    for row in rows:
        counts = row.counts or {}
        names = ("grid_steps", "iterations", "listed_blocks", "computed_blocks")
        found.add_row(
            row.device.split(",")[0], row.mask, _heads(row), row.direction, row.side,
            *(str(counts[name]) for name in names),
            f"{counts['vmem_bytes'] / 2**10:.0f} KiB" if "vmem_bytes" in counts else "",
            str(counts.get("spills", "")),
            *("" if n is None else f"{n:.0f}" for n in (inner_bundles(row), issued_bundles(row))),
        )  # fmt: skip
    return found


def main() -> None:
    """Measure, save, print."""
    settings = parse_settings(__doc__)
    rows, claims = measure(settings)
    if settings.is_saved:
        append_rows(RESULTS, rows)
    show(table(rows), claims_table(claims))


if __name__ == "__main__":
    main()
