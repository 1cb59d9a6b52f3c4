"""Restore of one step: validate its files, load its arrays, compare their fingerprints."""

import errno
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from xsake.errors import ArgumentError, CheckpointError
from xsake.training.checkpoints import leaves, orbax_io, together
from xsake.training.checkpoints import manifest as manifests
from xsake.training.checkpoints.damage import DamagedError, from_os_error


@dataclass(frozen=True)
class ValidatedStep:
    """Step that may be loaded.

    Attributes:
        record: of the step.
        has_manifest: whether its files were verified; otherwise only fingerprints detect damage.
    """

    record: manifests.CheckpointRecord
    has_manifest: bool


def validate(path: Path, mode: manifests.Verify) -> ValidatedStep:
    """Return the record of a step, or raise `DamagedError`; each process reads a share of files.

    Args:
        path: of the step.
        mode: how files are compared with the manifest.
    """
    manifest = None
    if not path.is_symlink():
        if not path.is_dir():
            raise DamagedError("absent", path.name, got="no folder", expected="a folder")
        manifest = manifests.read(path)
    if manifest is None:
        manifests.list_files(path)
        return ValidatedStep(_read_orbax_record(path), has_manifest=False)
    manifests.verify(path, manifest, mode, jax.process_index(), jax.process_count())
    return ValidatedStep(manifest, has_manifest=True)


def agree_on_damage(
    exchange: together.ProcessExchange, topic: str, damage: DamagedError | None
) -> DamagedError | None:
    """Return the damage that the process of the lowest index has detected, on all processes.

    Args:
        exchange: of the processes.
        topic: used once in the exchange.
        damage: that this process has detected.
    """
    if jax.process_count() == 1:
        return damage
    process = jax.process_index()
    note = "" if process == 0 else f" (process {process})"
    report = ""
    if damage is not None:
        report = json.dumps([damage.reason, damage.file, f"{damage.got}{note}"])
    if together.is_primary():
        reports = [report, *exchange.collect(topic)]
        decision = next(filter(None, reports), "")
        exchange.announce(f"{topic}/decision", decision)
    else:
        exchange.contribute(topic, lambda: report)
        decision = exchange.follow(f"{topic}/decision")
    if not decision or decision == report:
        return damage if decision else None
    reason, file, got = json.loads(decision)
    return DamagedError(reason, file, got=got)


def load(path: Path, record: manifests.CheckpointRecord, like: Any, part: str | None) -> Any:
    """Load the tree of a validated step and compare fingerprints with the saved ones.

    Args:
        path: of the step.
        record: of the step.
        like: a tree of `jax.ShapeDtypeStruct` with the shardings of the result.
        part: part of the saved tree that `like` describes; None: all of it.
    """
    prefix = "" if part is None else f"{part}{leaves.SEPARATOR}"
    requested = {
        prefix + name: _with_sharding(name, leaf)
        for name, leaf in leaves.leaves_by_name(like).items()
    }
    saved = {leaf.name: leaf for leaf in record.leaves if leaf.name.startswith(prefix)}
    leaves.check_same_tree(
        {name: (leaf.dtype, leaf.shape) for name, leaf in saved.items()},
        requested,
        where=f"step {record.step}" if part is None else f"{part!r} of step {record.step}",
    )
    loaded = _load_arrays(path, {name: leaf for name, leaf in requested.items() if leaf.size})
    for name, fingerprint in leaves.fingerprints(loaded).items():
        if fingerprint != saved[name].fingerprint:
            raise DamagedError(
                "fingerprint", name, got=fingerprint, expected=saved[name].fingerprint
            )
    # Orbax does not save empty arrays.
    all_leaves = [loaded[name] if leaf.size else _empty(leaf) for name, leaf in requested.items()]
    return jax.tree.unflatten(jax.tree.structure(like), all_leaves)


def _read_orbax_record(path: Path) -> manifests.CheckpointRecord:
    """Return the record that was committed with the arrays."""
    try:
        text = orbax_io.read_record(path)
    except OSError as error:
        raise from_os_error(error, path, path) from error
    except Exception as error:  # Orbax raises any type for broken metadata
        raise DamagedError("record", path.name, got=_first_line(error)) from error
    if text is None:
        raise DamagedError("record", path.name, got="no record")
    try:
        record = manifests.unseal(manifests.CheckpointRecord, text.encode())
    except (ArgumentError, UnicodeEncodeError) as error:
        raise DamagedError("record", path.name, got=_first_line(error)) from error
    if str(record.step) != path.name:
        raise DamagedError("record", path.name, got=f"a record of step {record.step}")
    return record


def _load_arrays(path: Path, requested: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    try:
        return orbax_io.load_arrays(path, requested)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # a problem of this host, not of the step
    except OSError as error:
        if error.errno in (None, errno.ENOENT):
            raise DamagedError("load", orbax_io.STATE, got=_first_line(error)) from error
        raise from_os_error(error, path / orbax_io.STATE, path) from error
    except Exception as error:  # Orbax raises any type for broken files
        raise DamagedError("load", orbax_io.STATE, got=_first_line(error)) from error


def _with_sharding(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """Return a leaf with a sharding: Orbax would default to that of the run that saved."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise ArgumentError(
            f"the leaf {name!r} has no shape and dtype",
            got=type(leaf).__name__,
            expected="a jax.ShapeDtypeStruct with a sharding, or an array",
            fix="build `like` with jax.eval_shape and add shardings",
        )
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        if jax.process_count() > 1:
            raise CheckpointError(
                f"the leaf {name!r} has no sharding",
                got="no sharding, in a run of several processes",
                expected="a jax.sharding.NamedSharding",
                fix="give every leaf of `like` a sharding",
            )
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0]}"[:300]
