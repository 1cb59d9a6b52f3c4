"""All that is asked of Orbax, whose interface is still called experimental: one place to change."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as orbax

STATE = "state"  # the tree of a step, by Orbax' own name
_RECORD = "xsake"  # of its custom metadata


Commit = Callable[[], object]
"""Returns when this process has done its part of a save, and raises if it cannot.

In the first process the step has its final name then; in the others their arrays are written.
"""


def begin(
    path: Path, arrays: dict[str, Any], record: str, wait_for_others: Callable[[], object]
) -> Commit:
    """Copy the arrays to the host and start to write them, all processes together.

    No process waits for another inside of Orbax. At its own barriers, which know nothing of
    failures, the others would wait 20 minutes for one that cannot write.

    Args:
        path: of the step; nothing may be there.
        arrays: by name, none of them empty.
        record: text that is committed together with them.
        wait_for_others: called in the first process, in a thread, before it merges what all have
            written and commits; raises if another one has failed.
    """
    state: Any = arrays
    metadata: Any = {_RECORD: record}
    context = orbax.Context()
    # A folder that cannot be made is an error here, before threads wait minutes for it.
    context.asynchronous.create_directories_asynchronously = False
    if jax.process_count() > 1:
        own = orbax.multihost.process_index()
        context.multiprocessing.active_processes = {own}
        if orbax.multihost.is_primary_host(0):
            registry = orbax.handlers.local_registry(include_global_registry=False)
            registry.add(_make_handler(wait_for_others), checkpointable_name=STATE)
            context.checkpointables.registry = registry
    with context:
        begun = orbax.save_async(
            str(path), state, checkpointable_name=STATE, custom_metadata=metadata
        )
    return begun.result


def locate_unfinished(path: Path) -> Path:
    """The folder that a step is written into before it is committed."""
    return path.with_name(f"{path.name}.orbax-checkpoint-tmp")


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


def _make_handler(wait_for_others: Callable[[], object]) -> type:
    """Make Orbax' handler of trees, with a wait between writing and merging."""

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

    # Orbax notes the name in its metadata: files are the same with and without the wait.
    Handler.__module__ = orbax.handlers.PyTreeHandler.__module__
    Handler.__qualname__ = orbax.handlers.PyTreeHandler.__qualname__
    return Handler


async def _finish_after(wait_for_others: Callable[[], object], written: Awaitable[None]) -> None:
    await asyncio.to_thread(wait_for_others)
    await written
