"""Bugs that are planted on purpose: a check that does not notice its bug proves nothing.

python -m benchmarks.faults --planted
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Bug(NamedTuple):
    """A bug, and the fault whose check must fail with it.

    Args:
        fault: its number.
        replace: returns the owner and the name of a function, and what takes its place.
    """

    fault: str
    replace: Callable[[], tuple[Any, str, Callable[..., Any]]]


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant a bug in this process while the block runs.

    Args:
        name: of `BUGS`; None: no bug.
    """
    if name is None:
        yield
        return
    owner, attribute, wrong = BUGS[name].replace()
    right = getattr(owner, attribute)
    setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        setattr(owner, attribute, right)


def digests_ignored():
    """Checkpoint files are compared by size only."""
    from xsake.training import verify

    real = verify.verify_files
    less = lambda mode: "size" if mode == "full" else mode
    weaker = lambda folder, found, mode, *x: real(folder, found, less(mode), *x)
    return verify, "verify_files", weaker


def lock_ignored():
    """Every holder of a lock counts as dead."""
    from xsake.training import lock

    return lock, "_is_dead", lambda *_: True


def updates_unfiltered():
    """Every update is applied, finite or not."""
    import jax.numpy as jnp

    from xsake.training import step

    return step, "should_update", lambda *_: jnp.ones((), bool)


def resumed_one_batch_late():
    """A resumed run skips one batch."""
    from xsake.training.data import TokenLoader

    real = TokenLoader.restore
    late = lambda self, state: real(self, {**state, "step": state["step"] + 1})
    return TokenLoader, "restore", late


def settings_uncompared():
    """Processes do not compare their settings."""
    from xsake.training import train

    return train, "require_agreement", lambda *_, **__: None


BUGS = {
    "digests ignored": Bug("F2", digests_ignored),
    "lock ignored": Bug("F16", lock_ignored),
    "updates unfiltered": Bug("F13", updates_unfiltered),
    "resumed one batch late": Bug("F11", resumed_one_batch_late),
    "settings uncompared": Bug("F22", settings_uncompared),
}
