"""All calls of Orbax, whose v1 interface is experimental."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as orbax

STATE = "state"  # checkpointable name of the tree
_RECORD = "xsake"  # key of the custom metadata


Commit = Callable[[], object]
"""Waits for this process's part of a save, and raises if it fails.

Afterwards the primary process has committed the step; the others have written their arrays.
"""


def start_save(
    path: Path, arrays: dict[str, Any], record: str, wait_for_others: Callable[[], object]
) -> Commit:
    """Copy the arrays to the host and start to write them, on all processes.

    Processes do not wait for each other inside Orbax: its barriers do not propagate failures, and
    the others would wait 20 minutes for a process that cannot write.

    Args:
        path: of the step; must not exist.
        arrays: by name, none of them empty.
        record: text that is committed with the arrays.
        wait_for_others: called in a thread of the primary process before it merges all parts and
            commits; raises if another process has failed.
    """
    state: Any = arrays
    metadata: Any = {_RECORD: record}
    context = orbax.Context()
    # Create the folder here: threads would wait minutes for a folder that cannot be created.
    context.asynchronous.create_directories_asynchronously = False
    if jax.process_count() > 1:
        process = orbax.multihost.process_index()
        context.multiprocessing.active_processes = {process}
        if orbax.multihost.is_primary_host(0):
            registry = orbax.handlers.local_registry(include_global_registry=False)
            registry.add(_make_handler(wait_for_others), checkpointable_name=STATE)
            context.checkpointables.registry = registry
    with context:
        response = orbax.save_async(
            str(path), state, checkpointable_name=STATE, custom_metadata=metadata
        )
    return response.result


def temporary_path(path: Path) -> Path:
    """Return the folder that a step is written to before it is committed."""
    return path.with_name(f"{path.name}.orbax-checkpoint-tmp")


def load_arrays(path: Path, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Load the arrays named in `like` with its shardings; others are not read."""
    if not like:
        return {}
    context = orbax.Context()
    context.pytree.loading.partial_load = True
    abstract: Any = like
    with context:
        loaded: Any = orbax.load(str(path), abstract, checkpointable_name=STATE)
    return loaded


def read_record(path: Path) -> str | None:
    """Return the text that was committed with a step; None or any error if there is none."""
    metadata = orbax.checkpointables_metadata(str(path)).custom_metadata
    text = metadata.get(_RECORD) if isinstance(metadata, dict) else None
    return text if isinstance(text, str) else None


def _make_handler(wait_for_others: Callable[[], object]) -> type:
    """Build Orbax' pytree handler with a wait between writing and merging."""

    class Handler:
        def __init__(self):
            self._handler = orbax.handlers.PyTreeHandler()

        def is_handleable(self, tree: Any) -> bool:
            return self._handler.is_handleable(tree)

        def is_abstract_handleable(self, tree: Any) -> bool | None:
            return self._handler.is_abstract_handleable(tree)

        async def save(self, directory: Any, tree: Any) -> Awaitable[None]:
            written = await self._handler.save(directory, tree)
            return _finish_after(wait_for_others, written)

    # Orbax stores the class name: files must be the same with and without the wait.
    Handler.__module__ = orbax.handlers.PyTreeHandler.__module__
    Handler.__qualname__ = orbax.handlers.PyTreeHandler.__qualname__
    return Handler


async def _finish_after(wait_for_others: Callable[[], object], written: Awaitable[None]) -> None:
    await asyncio.to_thread(wait_for_others)
    await written
