"""Checks that keep a run correct: update filter, same run, equal processes, stragglers."""

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from xsake._io import atomic_write
from xsake._provenance import installed_versions, source_digest
from xsake.errors import ArgumentError, CheckpointError, XsakeError
from xsake.observability.log import parse_line
from xsake.training import processes, verify
from xsake.training.config import TrainingConfig
from xsake.training.data import SPLITS, read_index
from xsake.training.processes import gather
from xsake.training.sections import GuardSection

# ---------- update filter: skip updates with non-finite or outlier gradient norms ----------

# Lower bound of the deviation, relative to the mean: nearly constant norms have a tiny deviation.
MIN_RELATIVE_DEVIATION = 0.05


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardState:
    """State of the update filter, part of the training state."""

    norms: Any  # float32 [window], ring buffer of the last accepted gradient norms
    accepted: Any  # int32, number of applied updates
    skips: Any  # int32, number of consecutive skipped updates
    total: Any  # int32, number of all skipped updates


def init_guard(section: GuardSection) -> GuardState:
    """Return the state before the first update."""
    count = lambda: jnp.zeros((), jnp.int32)
    return GuardState(jnp.zeros((section.window,), jnp.float32), count(), count(), count())


def should_update(
    section: GuardSection, guard: GuardState, loss: Float[Array, ""], norm: Float[Array, ""]
) -> Bool[Array, ""]:
    """Return whether to apply an update with this loss and norm of the unclipped gradients.

    Both must be finite. Once `window` updates were accepted, the norm must also be below
    `mean + zscore_threshold * deviation` of theirs. After `max_consecutive_skips - 1` skipped
    updates a large finite norm is accepted, because gradients may have grown permanently.

    Example:
        >>> section = GuardSection(window=2)
        >>> guard = init_guard(section)
        >>> bool(should_update(section, guard, jnp.float32(1.0), jnp.float32(float("nan"))))
        False
    """
    if not section.enabled:
        return jnp.ones((), bool)
    is_persistent = guard.skips + 1 >= section.max_consecutive_skips
    is_accepted = _is_in_range(section, guard, norm) | is_persistent
    return jnp.isfinite(loss) & jnp.isfinite(norm) & is_accepted


def _is_in_range(
    section: GuardSection, guard: GuardState, norm: Float[Array, ""]
) -> Bool[Array, ""]:
    """Return whether a norm is below the threshold, or fewer than `window` norms are known."""
    mean = guard.norms.mean()
    deviation = jnp.maximum(guard.norms.std(), MIN_RELATIVE_DEVIATION * mean)
    return (norm < mean + section.zscore_threshold * deviation) | (guard.accepted < section.window)


def update_guard(
    section: GuardSection, guard: GuardState, norm: Float[Array, ""], is_applied: Bool[Array, ""]
) -> GuardState:
    """Return the state after an update; an accepted outlier shifts all norms to its level."""
    is_level_shift = is_applied & ~_is_in_range(section, guard, norm)
    slot = guard.accepted % section.window
    norms = guard.norms + jnp.where(is_level_shift, norm - guard.norms.mean(), 0)
    norms = norms.at[slot].set(jnp.where(is_applied, norm, norms[slot]))
    one = is_applied.astype(jnp.int32)
    return GuardState(
        norms=norms,
        accepted=guard.accepted + one,
        skips=jnp.where(is_applied, 0, guard.skips + 1),
        total=guard.total + 1 - one,
    )


def select_tree(is_applied: Bool[Array, ""], new: Any, old: Any) -> Any:
    """Return `new` or `old` leaf by leaf, without a branch in the program."""
    return jax.tree.map(lambda a, b: jnp.where(is_applied, a, b), new, old)


# ---------- same run: settings, checkpoints and data of the folder ----------

MUTABLE_SETTINGS: Mapping[str, Any] = {
    "run": {"steps", "log_interval", "step_timeout_s"}, "mesh": True, "checkpoint": True,
    "track": True, "attention": {"probe_interval", "probe_rows"},
    "data": {"folder", "verify"},  # the data is compared by its digest
    "optimizer": {"total_steps"},  # compared as `TrainingConfig.total_steps`
}  # fmt: skip
"""Settings that may differ when a run is resumed."""


def require_same_run(config: TrainingConfig, folder: Path) -> None:
    """Save the configuration in the folder; raise if the folder belongs to another run.

    A run that failed before its first step can be started with any settings.
    """
    path = folder / "config.json"
    if (folder / "metrics.jsonl").exists() or any((folder / "steps").glob("*")):
        before = TrainingConfig.from_json(path.read_bytes()) if path.exists() else config
        require_same_settings(before, config, str(path))
        require_saves(folder, before.checkpoint.save_interval)
    atomic_write(path, config.to_json())


def require_same_settings(before: TrainingConfig, config: TrainingConfig, source: str) -> None:
    """Raise if a run would be resumed with settings that change its results."""
    old, new = (each.model_dump(exclude=dict(MUTABLE_SETTINGS)) for each in (before, config))
    changed = [
        f"{section}.{name}"
        for section, values in new.items()
        for name in values
        if values[name] != old[section][name]
    ]
    if changed:
        raise ArgumentError(
            "changed-settings",
            "the folder belongs to a run with other settings",
            got=f"{config.checkpoint.folder}: different in {', '.join(changed)}",
            expected=f"the settings of {source}",
            fix="name another checkpoint.folder, or use the settings of the interrupted run",
        )
    if before.total_steps != config.total_steps:
        raise ArgumentError(
            "changed-schedule",
            "the learning rate of a resumed run would jump: its schedule ends at another step",
            got=f"run.steps={config.run.steps}, optimizer.total_steps="
            f"{config.optimizer.total_steps}: the schedule ends at step {config.total_steps}",
            expected=f"a schedule that ends at step {before.total_steps}, as in {source}",
            fix=f"set optimizer.total_steps={before.total_steps} and at most as many run.steps; to "
            "train longer, start in another folder with a larger optimizer.total_steps",
        )


def require_saves(folder: Path, save_interval: int) -> None:
    """Raise if a run has no checkpoints although its metrics show that it had some.

    The usual cause is a volume that is not mounted; starting at step 0 would hide the loss.
    """
    steps, metrics = folder / "steps", folder / "metrics.jsonl"
    if verify.list_steps(steps) or verify.list_quarantined_steps(steps):
        return
    last, has_ended = _read_progress(metrics)
    # The first save is complete when the second one starts.
    if has_ended or (save_interval and last + 1 > 2 * save_interval):
        raise ArgumentError(
            "lost-checkpoints",
            "the checkpoints of this run are missing",
            got=f"{steps} has none, and metrics.jsonl has steps up to {last}",
            expected="the checkpoints that the run has saved",
            fix="mount or restore the folder; to start the run again from step 0, delete "
            f"{metrics}, or name another checkpoint.folder",
        )


def require_consistent(step: int, extra: Mapping[str, Any], config: TrainingConfig) -> None:
    """Raise if the JSON that was saved with a checkpoint does not match its step or the run."""
    data, what = extra.get("data"), f"the checkpoint of step {step}"
    fix = f"move the folder of step {step} away to resume from the step before it"
    if not isinstance(data, dict) or not isinstance(extra.get("attention"), dict):
        raise CheckpointError(
            "no-run-state", f"{what} has no state of the data or the attention",
            got=f"a record with {', '.join(sorted(extra)) or 'no entries'}",
            expected="data and attention, as `xsake train` saves them", fix=fix,
        )  # fmt: skip
    if data.get("step") != step:
        raise CheckpointError(
            "inconsistent-step", f"{what} is inconsistent: its data is at another step",
            got=f"data at step {data.get('step')}", expected=f"data at step {step}",
            fix=f"the record was edited: {fix}",
        )  # fmt: skip
    if "config" in extra:  # missing in 0.1.0
        require_same_settings(TrainingConfig.from_json(json.dumps(extra["config"])), config, what)


def _read_progress(metrics: Path) -> tuple[int, bool]:
    """Return the last finished step, and whether an attempt ended after its last save."""
    last, has_ended = -1, False
    try:
        with metrics.open("rb") as file:
            for line in map(parse_line, file):
                if line is None:
                    continue
                if "event" in line:
                    has_ended |= line.get("ending") in ("done", "stopped")
                elif not line.get("failed_saves"):
                    last = max(last, line["step"])
    except OSError:
        return -1, False
    return last, has_ended


# ---------- equal settings, data and versions of all processes ----------
# Every process reads its own copy of the run's files. A stale copy on one host would train replicas
# that differ, without an error. `data.folder` may differ: the data is compared by its digests.

_PACKAGES = ("xsake", "jax", "jaxlib")
_MAX_SHOWN = 8  # differences in one error
_MAX_VALUE = 80  # characters
_FLUSH_SECONDS = 1.0


def require_agreement(config: TrainingConfig) -> None:
    """Raise on every process if any of them has other settings, data or code."""
    if jax.process_count() == 1:
        return
    text = json.dumps(collect_facts(config), sort_keys=True).encode()
    digests = gather(np.frombuffer(hashlib.sha256(text).digest(), np.uint8))
    if (digests == digests[0]).all():
        return
    # Texts are padded to the longest one for the transfer.
    lengths = gather(np.array([len(text)], np.int32))[:, 0]
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    rows = zip(gather(padded), lengths.tolist(), strict=True)
    lines = list_differences([json.loads(bytes(row[:length])) for row, length in rows])
    if processes.is_primary():
        # This process runs the coordinator; its exit aborts the others before they log their error.
        time.sleep(_FLUSH_SECONDS)
    raise ArgumentError(
        "process-settings",
        "the processes of this run do not have the same settings, data or code",
        got="\n".join([*lines[:_MAX_SHOWN], f"and {len(lines) - _MAX_SHOWN} more"][: len(lines)]),
        expected="equal values on every process; only data.folder may differ",
        fix="copy the run's files and install the same versions on every host",
    )


def collect_facts(config: TrainingConfig) -> dict[str, Any]:
    """Return all settings by dotted name, digests of the files they name, and versions of code."""
    facts = _flatten(json.loads(config.to_json()))
    del facts["data.folder"]
    data = functools.cache(lambda: read_index(config.data.folder))
    for split in SPLITS:
        read = functools.partial(lambda name: data().digest(name), split)
        facts[f"digest of data ({split})"] = _digest(read)
    facts["digest of tokenizer"] = _digest(lambda: data().tokenizer.sha256)
    for name in ("plan", "profile"):
        if (path := getattr(config.attention, name)) is not None:
            digest = lambda path=path: hashlib.sha256(path.read_bytes()).hexdigest()
            facts[f"content of attention.{name}"] = _digest(digest)
    versions = installed_versions(_PACKAGES)
    facts |= {f"version of {name}": version for name, version in versions.items()}
    return {**facts, "source of xsake": source_digest()}


def list_differences(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each value that differs, with the processes by value.

    Example:
        >>> list_differences([{"data.seed": 1}, {"data.seed": 1}, {"data.seed": 2}])
        ['data.seed: processes 0, 1 have 1, process 2 has 2']
    """
    lines = []
    for name in sorted({name for each in facts for name in each}):
        owners: dict[str, list[int]] = {}
        for process, each in enumerate(facts):
            value = repr(each[name]) if name in each else "nothing"
            owners.setdefault(value, []).append(process)
        if len(owners) > 1:
            parts = (_format_owners(ranks, value) for value, ranks in owners.items())
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def _format_owners(ranks: Sequence[int], value: str) -> str:
    value = value if len(value) <= _MAX_VALUE else f"{value[:_MAX_VALUE]}..."
    if len(ranks) == 1:
        return f"process {ranks[0]} has {value}"
    runs: list[list[int]] = []
    for process in ranks:
        if runs and process == runs[-1][-1] + 1:
            runs[-1].append(process)
        else:
            runs.append([process])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"processes {', '.join(texts)} have {value}"


def _flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in document.items():
        values |= (
            _flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return values


def _digest(read: Callable[[], str]) -> str:
    """Return a digest or the error as text: raising here would leave other processes waiting."""
    try:
        return read()
    except XsakeError as error:
        return f"{error.what}: {error.got}"
    except OSError as error:
        return f"not readable: {error}"


# ---------- stragglers: processes that are persistently slower than the others ----------
# In synchronous training all processes have the same step time, because fast ones wait for slow
# ones. So a process measures its local time (data, Python, a busy host) separately from the time it
# waits for results. The shortest wait of all approximates the device time; local time plus that is
# the step time without other slow processes. A slow device makes all processes wait equally and is
# not detected.

INTERVAL, RATIO, ROUNDS = 50, 1.5, 3


@dataclasses.dataclass(frozen=True)
class StragglerReport:
    """Result of one comparison of all processes."""

    seconds: tuple[float, ...]  # step time of each process without waiting for others
    # number of consecutive slow rounds of each process, including this one
    slow_rounds: tuple[int, ...]
    flagged: tuple[int, ...] = ()  # processes with enough consecutive slow rounds

    def __str__(self) -> str:
        slow = ", ".join(
            f"process {process} takes {self.seconds[process]:.3g} s" for process in self.flagged
        )
        rounds = min((self.slow_rounds[process] for process in self.flagged), default=0)
        median = f"the median {_lower_median(self.seconds):.3g} s"
        return f"{slow} a step, {median}, {rounds} times in a row"


def compare_processes(
    local: Float[np.ndarray, " processes"],
    waiting: Float[np.ndarray, " processes"],
    before: StragglerReport | None = None,
    *,
    ratio: float = RATIO,
    rounds: int = ROUNDS,
) -> StragglerReport:
    """Compare the processes by seconds per step of local work and of waiting for results.

    Slow means more than `ratio` times the lower median; `rounds` consecutive slow rounds, counted
    from the report before, flag a process.

    Example:
        >>> local, waiting = np.array([0.1, 0.1, 2.1]), np.array([3.0, 3.0, 1.0])
        >>> compare_processes(local, waiting, rounds=1).flagged
        (2,)
    """
    seconds = tuple((local + waiting.min()).tolist())
    limit = ratio * _lower_median(seconds)
    earlier = before.slow_rounds if before is not None else (0,) * len(seconds)
    counts = tuple(
        count + 1 if each > limit else 0 for count, each in zip(earlier, seconds, strict=True)
    )
    flagged = tuple(process for process, count in enumerate(counts) if count >= rounds)
    return StragglerReport(seconds, counts, flagged)


class StragglerDetector:
    """Step times of this process, compared with the others every `interval` steps."""

    def __init__(self, *, interval: int = INTERVAL, rounds: int = ROUNDS):
        self._interval, self._rounds = interval, rounds
        self._times: list[tuple[float, float]] = []
        self._last: StragglerReport | None = None

    def add(self, local_seconds: float, waiting_seconds: float) -> StragglerReport | None:
        """Add a step; return a report every `interval` steps, otherwise None."""
        self._times.append((local_seconds, waiting_seconds))
        if len(self._times) < self._interval:
            return None
        means = np.mean(self._times, axis=0, dtype=np.float64).astype(np.float32)
        self._times.clear()
        local, waiting = gather(means).astype(np.float64).T
        self._last = compare_processes(local, waiting, self._last, rounds=self._rounds)
        return self._last


def _lower_median(seconds: Sequence[float]) -> float:
    """Return the lower median: a mean would hide the slower one of two processes."""
    return sorted(seconds)[(len(seconds) - 1) // 2]
