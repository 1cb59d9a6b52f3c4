"""The selected branch of native sparse attention compared with ejkernel's, on the same blocks.

python -m benchmarks.peers build ejkernel  # once
python -m benchmarks.experiments.selected  # 1024 and 2048 tokens, forward and backward
python -m benchmarks.experiments.selected --tokens 1024 --rounds 5

Every token selects its own block, the one before, the first and others at random. One more case
lists every block twice: it must count once. Outputs of drawn queries are checked in float64 NumPy.
ejkernel gathers every token's blocks for every head, which is 13 GB at 2048 tokens and twice that
at 4096, so longer inputs are ours alone.
"""

import contextlib
import tempfile
import uuid
from pathlib import Path

import numpy as np

from benchmarks.experiments.common import (
    Outcome,
    Settings,
    command,
    draw_inputs,
    limit_claim,
    plain_row,
)
from benchmarks.peers.client import Worker, WorkerError
from benchmarks.peers.recipes import interpreter
from xsake.benchmarking import (
    BenchmarkRow,
    Claim,
    Ratio,
    Shape,
    Spread,
    TimedSide,
    Verdict,
    interleave,
)
from xsake.benchmarking.rows import TimingStats
from xsake.benchmarking.runner import pair_ratio

BLOCK, COUNT = 64, 16
Q_HEADS, KV_HEADS, DIM = 12, 4, 64
LENGTHS = (1024, 2048)
OURS, PEER = "xsake", "ejkernel"
ADAPTERS = {OURS: ("selected_worker", None), PEER: ("ejkernel_worker", "ejkernel")}
CHECKED, TOLERANCE = 48, 1e-4


def listed_blocks(tokens: int, seed: int, *, is_doubled: bool = False) -> np.ndarray:
    """Blocks `[1, T, KV_HEADS, COUNT]` of every token, in order, -1 for slots without a block.

    Example:
        >>> listed_blocks(256, 0)[0, 130, 0].tolist()
        [0, 1, 2, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1]
    """
    rng = np.random.default_rng(seed)
    own = np.arange(tokens)[:, None, None] // BLOCK
    number = np.arange(-(-tokens // BLOCK))
    priority = rng.random((tokens, KV_HEADS, len(number)))
    priority += (number == 0) | (number == own) | (number == own - 1)
    priority[np.broadcast_to(number > own, priority.shape)] = -1
    count = COUNT // 2 if is_doubled else COUNT
    taken = np.argsort(-priority, axis=-1)[..., :count]
    is_seen = np.take_along_axis(priority, taken, -1) >= 0
    taken = np.sort(np.where(is_seen, taken, len(number)), axis=-1)
    taken = np.where(taken == len(number), -1, taken)
    taken = np.concatenate([taken, taken], axis=-1) if is_doubled else taken
    spare = ((0, 0), (0, 0), (0, COUNT - taken.shape[-1]))
    return np.pad(taken, spare, constant_values=-1)[None].astype(np.int32)


def error(out: np.ndarray, arrays: dict[str, np.ndarray], seed: int) -> float:
    """The largest difference from float64 over some queries, relative to the largest output."""
    tokens = out.shape[1]
    chosen = np.random.default_rng(seed).choice(tokens, CHECKED, replace=False)
    group, worst, largest = Q_HEADS // KV_HEADS, 0.0, 0.0
    for token in chosen:
        for head in range(Q_HEADS):
            kv = head // group
            keys = np.arange(token + 1)
            keys = keys[np.isin(keys // BLOCK, arrays["blocks"][0, token, kv])]
            k, v = (arrays[name][0, keys, kv].astype(np.float64) for name in "kv")
            scores = k @ arrays["q"][0, token, head].astype(np.float64) / np.sqrt(DIM)
            weights = np.exp(scores - scores.max())
            true = weights @ v / weights.sum()
            worst = max(worst, float(np.abs(true - out[0, token, head]).max()))
            largest = max(largest, float(np.abs(true).max()))
    return worst / largest


def measure(settings: Settings) -> Outcome:
    """Both directions at every length, then the blocks that are listed twice."""
    rows: list[BenchmarkRow] = []
    claims: list[Claim] = []
    for tokens in settings.choose(LENGTHS, quick=512):
        for is_backward in (False, True):
            found = _race(tokens, settings, is_backward=is_backward)
            rows += found
            text = f"selected blocks, {found[0].direction}, {tokens} tokens"
            failure = next(row.failure for row in found if row.side == PEER)
            if failure is not None:
                claims.append(Claim(text, "faster", f"{PEER}: {failure}", Verdict.UNCLEAR))
                continue
            claims.append(limit_claim(text, "faster", found, side=OURS, baseline=PEER, limit=1.0))
            claims.append(_less_memory(text, found))
    found = _race(settings.choose(LENGTHS, quick=512)[0], settings, is_doubled=True)
    rows += found
    for row in found:
        verdict = Verdict.PASS if row.is_correct else Verdict.FAIL
        text = f"largest error {row.max_error:.1e}"
        claims.append(
            Claim(f"a block listed twice counts once: {row.side}", "exact", text, verdict)
        )
    return rows, claims


def _race(
    tokens: int, settings: Settings, *, is_backward: bool = False, is_doubled: bool = False
) -> list[BenchmarkRow]:
    shape = Shape(q_tokens=tokens, kv_tokens=tokens, q_heads=Q_HEADS, kv_heads=KV_HEADS,
                  head_dim=DIM)  # fmt: skip
    arrays = draw_inputs(shape, settings.seed)
    arrays |= {name: arrays[name][:, :, :KV_HEADS] for name in "kv"}
    arrays["blocks"] = listed_blocks(tokens, settings.seed, is_doubled=is_doubled)
    facts, errors, versions, failures = {}, {}, {}, {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name, array in arrays.items():
            np.save(Path(folder, f"{name}.npy"), array)
        workers = {}
        for side, (adapter, home) in ADAPTERS.items():
            worker = stack.enter_context(Worker(
                interpreter(home, settings.peers_dir), adapter, threads=settings.threads,
                is_isolated=home is not None,
            ))  # fmt: skip
            worker.load(Path(folder))
            case = {"block": BLOCK, "backward": False}
            worker.compile("forward", case)
            errors[side] = error(worker.check("forward")["out"], arrays, settings.seed)
            versions[side] = worker.versions
            try:
                facts[side] = worker.compile("timed", case | {"backward": is_backward})
            except WorkerError as failure:
                if side == OURS:
                    raise
                failures[side] = str(failure).strip().splitlines()[-1]
                continue
            workers[side] = worker
        sides = [TimedSide(x, lambda w=w: w.run("timed")) for x, w in workers.items()]
        times = interleave(sides, rounds=settings.rounds)
    run = uuid.uuid4().hex[:12]
    ratios: tuple[Ratio, ...] = ()
    if PEER in times:
        ratios = (Ratio(baseline=PEER, **vars(pair_ratio(times[OURS], times[PEER]))),)
    timed = {
        side: {
            "seconds": TimingStats(**vars(Spread.of(times[side]))), "repeats": settings.rounds,
            "compile_seconds": facts[side]["compile_seconds"],
            "temp_bytes": facts[side]["temp_bytes"],
        }
        for side in times
    }  # fmt: skip
    return [
        plain_row(
            "selected", run, shape, settings, side=side,
            implementation=f"{side} apply_native_sparse_attention",
            direction="forward+backward" if is_backward else "forward", mask="causal",
            layout="16 blocks of every token" + (", each listed twice" if is_doubled else ""),
            block_q=1, block_kv=BLOCK, ratios=ratios if side == OURS else (),
            max_error=errors[side], is_correct=errors[side] <= TOLERANCE,
            versions=versions[side], failure=failures.get(side), **timed.get(side, {}),
        )
        for side in ADAPTERS
    ]  # fmt: skip


def _less_memory(text: str, rows: list[BenchmarkRow]) -> Claim:
    ours, peers = (next(x.temp_bytes for x in rows if x.side == side) for side in (OURS, PEER))
    verdict = Verdict.PASS if ours < peers else Verdict.FAIL
    return Claim(text, "less temporary memory", f"{ours / peers:.4f}x", verdict)


if __name__ == "__main__":
    command("selected", measure, __doc__)
