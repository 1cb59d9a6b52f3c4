"""Compare settings, data and versions of all processes before training starts.

Every process reads its own copy of the run's files. A stale copy on one host would train replicas
that differ, without an error. `data.folder` may differ between hosts: the data is compared by its
digests. Everything else must be equal.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xsake._provenance import installed_versions, source_digest
from xsake.errors import ArgumentError, XsakeError
from xsake.training import processes
from xsake.training.config import TrainingConfig
from xsake.training.data import SPLITS, read_index

Facts = Mapping[str, Any]
Gather = Callable[[np.ndarray], np.ndarray]

_PACKAGES = ("xsake", "jax", "jaxlib")
_MAY_DIFFER = frozenset({"data.folder"})
_MAX_SHOWN = 8  # differences in one error
_MAX_VALUE = 80  # characters
_FLUSH_SECONDS = 1.0


def require(config: TrainingConfig, gather: Gather | None = processes.gather) -> None:
    """Raise on every process if any of them has other settings, data or code.

    Args:
        config: as this process has read it.
        gather: returns the arrays of all processes; None: there is one process.
    """
    if gather is None or jax.process_count() == 1:
        return
    facts = {**settings(config), **contents(config), **versions()}
    text = json.dumps(facts, sort_keys=True).encode()
    digests = gather(np.frombuffer(hashlib.sha256(text).digest(), np.uint8))
    if (digests == digests[0]).all():
        return
    lines = differences([json.loads(each) for each in _gather_texts(text, gather)])
    if processes.is_primary():
        # This process runs the coordinator; its exit aborts the others before they log their error.
        time.sleep(_FLUSH_SECONDS)
    raise disagreement_error(lines)


def settings(config: TrainingConfig) -> dict[str, Any]:
    """Return all settings by dotted name, without those that may differ between hosts."""
    values = _flatten(json.loads(config.to_json()))
    return {name: value for name, value in values.items() if name not in _MAY_DIFFER}


def contents(config: TrainingConfig) -> dict[str, str]:
    """Return digests of the files that the settings name, or why a file cannot be read."""
    data = functools.cache(lambda: read_index(config.data.folder))
    of_split = lambda split: _digest(lambda: data().digest(split))
    digests = {f"digest of data ({split})": of_split(split) for split in SPLITS}
    digests["digest of tokenizer"] = _digest(lambda: data().tokenizer.sha256)
    for name in ("plan", "profile"):
        if (path := getattr(config.attention, name)) is not None:
            digests[f"content of attention.{name}"] = _digest(lambda p=path: _hash(p.read_bytes()))
    return digests


def versions() -> dict[str, str]:
    """Return versions of the packages that compute, and a digest of this package's source."""
    packages = {f"version of {name}": each for name, each in installed_versions(_PACKAGES).items()}
    return {**packages, "source of xsake": source_digest()}


def differences(facts: Sequence[Facts]) -> list[str]:
    """Return a line for each value that differs, with the processes by value.

    Args:
        facts: of all processes, in their order.

    Example:
        >>> differences([{"data.seed": 1}, {"data.seed": 1}, {"data.seed": 2}])
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


def disagreement_error(lines: Sequence[str]) -> ArgumentError:
    """Return the error for processes that differ.

    Args:
        lines: from `differences`.
    """
    shortened = [*lines[:_MAX_SHOWN], f"and {len(lines) - _MAX_SHOWN} more"][: len(lines)]
    return ArgumentError(
        "the processes of this run do not have the same settings, data or code",
        got="\n".join(shortened),
        expected="equal values on every process; only data.folder may differ",
        fix="copy the run's files and install the same versions on every host",
    )


def _format_owners(ranks: Sequence[int], value: str) -> str:
    value = value if len(value) <= _MAX_VALUE else f"{value[:_MAX_VALUE]}..."
    if len(ranks) == 1:
        return f"process {ranks[0]} has {value}"
    return f"{_format_ranges(ranks)} have {value}"


def _format_ranges(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for process in ranks:
        if runs and process == runs[-1][-1] + 1:
            runs[-1].append(process)
        else:
            runs.append([process])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"processes {', '.join(texts)}"


def _flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            values |= _flatten(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def _gather_texts(text: bytes, gather: Gather) -> list[bytes]:
    """Return the texts of all processes; they are padded to the longest one for the transfer."""
    lengths = gather(np.array([len(text)], np.int32))[:, 0]
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return [bytes(row[:n]) for row, n in zip(gather(padded), lengths.tolist(), strict=True)]


def _digest(read: Callable[[], str]) -> str:
    """Return a digest or the error as text: raising here would leave other processes waiting."""
    try:
        return read()
    except XsakeError as error:
        return f"{error.what}: {error.got}"
    except OSError as error:
        return f"not readable: {error}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
