"""Reads one step: judged first, then loaded into what the caller asks for, then compared."""

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
from xsake.training.checkpoints.damage import DamagedError, of_system


@dataclass(frozen=True)
class Judged:
    """A step that may be loaded.

    Attributes:
        record: what it holds.
        has_manifest: whether its files were judged by a manifest; without one only the
            fingerprints can tell whether the arrays are right.
    """

    record: manifests.Record
    has_manifest: bool


def judge(path: Path, mode: manifests.Verify) -> Judged:
    """What a step holds, or a `DamagedError`; each process reads a share of the files.

    Args:
        path: of the step.
        mode: how closely files are compared with the manifest.
    """
    manifest = None
    if not path.is_symlink():
        if not path.is_dir():
            raise DamagedError("absent", path.name, got="no folder", expected="a folder")
        manifest = manifests.read(path)
    if manifest is None:
        manifests.listing(path)
        return Judged(_record_of_orbax(path), has_manifest=False)
    manifests.verify(path, manifest, mode, jax.process_index(), jax.process_count())
    return Judged(manifest, has_manifest=True)


def agree_on_damage(
    exchange: together.Exchange, topic: str, damage: DamagedError | None
) -> DamagedError | None:
    """Return the damage that the process of the lowest number has found, on all of them.

    Args:
        exchange: of the processes.
        topic: used once in it.
        damage: that this process has found.
    """
    if jax.process_count() == 1:
        return damage
    process = jax.process_index()
    note = "" if process == 0 else f" (process {process})"
    own = "" if damage is None else json.dumps([damage.reason, damage.file, f"{damage.got}{note}"])
    if together.is_first():
        reports = [own, *exchange.collect(topic)]
        decision = next((report for report in reports if report), "")
        exchange.announce(f"{topic}/decision", decision)
    else:
        exchange.contribute(topic, lambda: own)
        decision = exchange.follow(f"{topic}/decision")
    if not decision or decision == own:
        return damage if decision else None
    reason, file, got = json.loads(decision)
    return DamagedError(reason, file, got=got)


def fill(path: Path, record: manifests.Record, like: Any, part: str | None) -> Any:
    """The tree of a step that was judged, its bits compared with those that were saved.

    Args:
        path: of the step.
        record: what it holds.
        like: a tree of `jax.ShapeDtypeStruct`, placed as the result shall be.
        part: of the saved tree that `like` stands for; None: all of it.
    """
    start = "" if part is None else f"{part}{leaves.SEPARATOR}"
    wanted = {start + name: _placed(name, leaf) for name, leaf in leaves.named(like).items()}
    saved = {leaf.name: leaf for leaf in record.leaves if leaf.name.startswith(start)}
    leaves.check_alike(
        {name: (leaf.dtype, leaf.shape) for name, leaf in saved.items()},
        wanted,
        where=f"step {record.step}" if part is None else f"{part!r} of step {record.step}",
    )
    loaded = _loaded(path, {name: leaf for name, leaf in wanted.items() if leaf.size})
    for name, fingerprint in leaves.fingerprints(loaded).items():
        if fingerprint != saved[name].fingerprint:
            raise DamagedError(
                "fingerprint", name, got=fingerprint, expected=saved[name].fingerprint
            )
    # Orbax keeps no arrays without elements.
    whole = [loaded[name] if leaf.size else _empty(leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), whole)


def _record_of_orbax(path: Path) -> manifests.Record:
    """The record that was committed together with the arrays."""
    try:
        text = orbax_io.record(path)
    except OSError as error:
        raise of_system(error, path, path) from error
    except Exception as error:  # broken metadata makes Orbax raise anything
        raise DamagedError("record", path.name, got=_first_line(error)) from error
    if text is None:
        raise DamagedError("record", path.name, got="no record of what was saved")
    try:
        record = manifests.unsealed(manifests.Record, text.encode())
    except (ArgumentError, UnicodeEncodeError) as error:
        raise DamagedError("record", path.name, got=_first_line(error)) from error
    if str(record.step) != path.name:
        raise DamagedError("record", path.name, got=f"a record of step {record.step}")
    return record


def _loaded(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    try:
        return orbax_io.arrays(path, wanted)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # says something about this machine, and nothing about the step
    except OSError as error:
        if error.errno in (None, errno.ENOENT):
            raise DamagedError("load", orbax_io.STATE, got=_first_line(error)) from error
        raise of_system(error, path / orbax_io.STATE, path) from error
    except Exception as error:  # broken files make Orbax raise anything
        raise DamagedError("load", orbax_io.STATE, got=_first_line(error)) from error


def _placed(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf to fill, on devices that are said: Orbax would take those of the run that saved."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise ArgumentError(
            f"the leaf {name!r} does not say what it should be filled with",
            got=type(leaf).__name__,
            expected="a jax.ShapeDtypeStruct with a sharding, or an array",
            fix="make `like` with jax.eval_shape and give the leaves shardings",
        )
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        if jax.process_count() > 1:
            raise CheckpointError(
                f"the leaf {name!r} does not say which devices it goes to",
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
