"""`xsake` with something that goes wrong inside of it.

python -m benchmarks.faults.injected JSON train ...

The JSON object says what:
- `poison`: `{"37": "nan"}` gives the batch of a step an invalid token, which makes its loss
  NaN; `"spike"` makes its loss, and so its gradients, 50 times as large.
- `flip`: `{"step": 7, "process": 1}` flips one bit of a parameter after a step, in one process, in
  its first life only: the file `marker` says that it was done.
- `slow`: `{"process": 1, "ratio": 3}` makes a process's steps `ratio` times as long.
- `pace`: seconds that every batch takes to come, so that steps are longer than saves.
- `clock`: seconds by which the wall clock jumps after every tenth batch.
- `times`: a file for the moments at which steps begin and end, by devices.
- `bug`: the name of a bug of `benchmarks.faults.planted`.
- `alone`: "network" takes the network away; "root" takes away the right to write everywhere.
"""

import contextlib
import itertools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPIKE = 50.0


def main() -> None:
    """Inject what the first argument says, then be `xsake`."""
    injections = json.loads(sys.argv.pop(1))
    if where := injections.pop("alone", None):
        leave(where)
    if "clock" in injections:
        jump(injections["clock"])  # before anything keeps the clock for itself
    from benchmarks.faults.planted import planted
    from xsake.cli import app

    with planted(injections.pop("bug", None)):
        for name, value in injections.items():
            INJECTIONS[name](value)
        app(prog_name="xsake")


@contextlib.contextmanager
def for_a_while(injections: dict[str, Any]) -> Iterator[None]:
    """Inject faults into this process and undo them afterwards.

    Args:
        injections: faults by name; none that changes the whole process.
    """
    from xsake.training import step as steps
    from xsake.training import train
    from xsake.training.data import TokenLoader

    places = (TokenLoader, "__next__"), (train, "compile_step"), (steps, "make_loss")
    before = [getattr(*place) for place in places]
    try:
        for name, value in injections.items():
            INJECTIONS[name](value)
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(*place, value)


def leave(where: str) -> None:
    """Enter a namespace without a network, or without the rights of root."""
    kinds = {"root": os.CLONE_NEWUSER, "network": os.CLONE_NEWUSER | os.CLONE_NEWNET}
    os.unshare(kinds[where])


def jump(seconds: float) -> None:
    """The wall clock of Python jumps whenever ten more batches were read."""
    real = time.time
    time.time = lambda: real() + seconds * (_Read.batches // 10)


class _Read:
    """Number of batches that the loaders of this process have read."""

    batches = 0


def _around_batches(change) -> None:
    """Let something happen to every batch: `change(step, batch)` gives the batch to use."""
    from xsake.training.data import TokenLoader

    real = TokenLoader.__next__

    def changed(self):
        step = self.state()["step"]
        return change(step, real(self))

    TokenLoader.__next__ = changed


def _around_steps(change) -> None:
    """Let something happen around a step: `change(call, state, tokens)` gives what it gives."""
    from xsake.training import train

    real = train.compile_step

    def changed(config, devices, attend, state, tokens):
        call = real(config, devices, attend, state, tokens)
        numbers = itertools.count(int(state.step))  # a compiled step is used without gaps
        return lambda state, tokens: change(next(numbers), call, state, tokens)

    train.compile_step = changed


def count_batches(_: Any) -> None:
    """For a clock that jumps."""

    def change(step, batch):
        _Read.batches = step
        return batch

    _around_batches(change)


def poison(kinds: dict[str, str]) -> None:
    """Batches that make a loss NaN or large; a first token below 0 marks the latter."""
    import jax.numpy as jnp

    from xsake.training import step as steps

    real = steps.make_loss

    def change(step, batch):
        kind = kinds.get(str(step))
        if kind is not None:
            batch.tokens[0, 0 if kind == "spike" else 1] = -1 if kind == "spike" else 2**30
        return batch

    def make_loss(*given):
        loss_of = real(*given)

        def larger(parameters, tokens):
            loss, count = loss_of(parameters, tokens)
            return loss * jnp.where((tokens[:, 0] < 0).any(), SPIKE, 1.0), count

        return larger

    if "spike" in kinds.values():  # otherwise the program stays the same, to the last bit
        steps.make_loss = make_loss
    _around_batches(change)


def flip(injections: dict[str, Any]) -> None:
    """One bit of one parameter, on the devices of one process."""
    import dataclasses

    import jax
    import numpy as np

    marker = Path(injections["marker"])

    def flipped(leaf):
        pieces = []
        for shard in leaf.addressable_shards:
            bits = np.array(shard.data)
            bits.view(np.uint32).reshape(-1)[5] ^= np.uint32(1 << 13)
            pieces.append(jax.device_put(bits, shard.device))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)

    def change(number, call, state, tokens):
        new, found = call(state, tokens)
        is_here = (number, jax.process_index()) == (injections["step"], injections["process"])
        if is_here and not marker.exists():
            marker.write_text(str(number))
            parameters = dict(new.parameters)
            parameters["embedding"] = flipped(parameters["embedding"])
            new = dataclasses.replace(new, parameters=parameters)
        return new, found

    _around_steps(change)


def slow(injections: dict[str, Any]) -> None:
    """A process that takes several times as long for everything between its steps."""
    import jax

    last: list[float] = []

    def change(step, batch):
        now = time.monotonic()
        if jax.process_index() == injections["process"] and last:
            # What came since the last sleep was a step at its own speed.
            time.sleep((injections["ratio"] - 1) * min(now - last[0], 1.0))
        last[:] = [time.monotonic()]
        return batch

    _around_batches(change)


def pace(seconds: float) -> None:
    """Batches that take their time."""

    def change(step, batch):
        time.sleep(seconds)
        return batch

    _around_batches(change)


def times(path: str) -> None:
    """A line per step: its number, and when devices began and ended it, by the wall clock."""
    import jax

    waiting: queue.Queue[tuple[int, float, Any]] = queue.Queue()

    def watch() -> None:
        ended = 0.0
        with Path(path).open("a", buffering=1) as file:
            while True:
                number, called, loss = waiting.get()
                jax.block_until_ready(loss)
                begin, ended = max(called, ended), time.time()
                file.write(f"{number} {begin:.6f} {ended:.6f}\n")

    threading.Thread(target=watch, daemon=True).start()

    def change(number, call, state, tokens):
        called = time.time()
        new, found = call(state, tokens)
        waiting.put((number, called, found.loss))
        return new, found

    _around_steps(change)


INJECTIONS = {
    "poison": poison,
    "flip": flip,
    "slow": slow,
    "pace": pace,
    "times": times,
    "clock": count_batches,
}

if __name__ == "__main__":
    main()
