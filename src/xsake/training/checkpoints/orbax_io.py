"""All that is asked of Orbax, whose interface is still called experimental: one place to change."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as orbax

STATE = "state"  # the tree of a step, by Orbax' own name
_RECORD = "xsake"  # of its custom metadata


Commit = Callable[[], object]
"""Returns when a step has its final name, and raises if it will never have it."""


def begin(path: Path, arrays: dict[str, Any], record: str) -> Commit:
    """Copy the arrays to the host and start to write them, all processes together.

    Args:
        path: of the step; nothing may be there.
        arrays: by name, none of them empty.
        record: text that is committed together with them.
    """
    state: Any = arrays
    metadata: Any = {_RECORD: record}
    begun = orbax.save_async(str(path), state, checkpointable_name=STATE, custom_metadata=metadata)
    return begun.result


def arrays(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of these names, on the devices that `wanted` names; others are not read."""
    if not wanted:
        return {}
    context = orbax.Context()
    context.pytree.loading.partial_load = True
    like: Any = wanted
    with context:
        found: Any = orbax.load(str(path), like, checkpointable_name=STATE)
    return found


def record(path: Path) -> str | None:
    """The text that was committed with a step; None or any error if Orbax did not commit it."""
    kept = orbax.checkpointables_metadata(str(path)).custom_metadata
    text = kept.get(_RECORD) if isinstance(kept, dict) else None
    return text if isinstance(text, str) else None


def meet(name: str) -> None:
    """Wait for all processes without a device, so that a thread beside training may do it.

    Args:
        name: of this meeting; no two have the same.
    """
    loop = asyncio.new_event_loop()
    try:
        barrier = orbax.multihost.sync_global_processes(name, operation_id="xsake")
        loop.run_until_complete(barrier)
    finally:
        loop.close()
