"""Batches for training: the same ones in the same order, however often a run is interrupted."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64
from pydantic import ValidationError

from xsake._schema import Count, Frozen
from xsake.errors import ArgumentError, MissingExtraError
from xsake.training.data.index import Split
from xsake.training.data.order import places_to_windows
from xsake.training.data.shards import Verify
from xsake.training.data.windows import Windows

LAST_PLACE = 2**62  # far beyond any run, and all arithmetic on places fits int64


class Batch(NamedTuple):
    """What one process reads in one step.

    Args:
        tokens: a window per row: `context` to read, and the same moved by one to predict.
        windows: numbers of the windows in their split, which identify what was read.
    """

    tokens: Int32[np.ndarray, "B n"]
    windows: Int64[np.ndarray, " B"]


class LoaderState(Frozen):
    """Where a loader is, and everything that decides what comes next but the processes."""

    version: Literal[1] = 1
    step: Count
    seed: int
    batch: Count
    context: Count
    split: Split
    data: str


class TokenLoader:
    """An endless iterator of batches from a data folder.

    The batch of a step is a function of files, seed and step alone. Every epoch reads every
    window once, in an order of its own; a batch may end one epoch and begin the next. Process p
    of n takes rows `p * batch / n` to `(p + 1) * batch / n` of the batch, and reads nothing else.

    Args:
        folder: as `xsake data build` makes it.
        context: tokens that a model reads of a window.
        batch: windows of a step, over all processes.
        seed: of the order.
        process: which process this is.
        processes: how many there are.
        split: which documents.
        verify: `size` checks that every file is there and has its size; `full` compares the digest
            of a file too when it is first used, see `Verifier`.
        vocabulary: tokens that the model knows; None: whatever the data has.
        prefetch: batches that a thread reads ahead; 0 reads when asked.
    """

    def __init__(
        self,
        folder: Path,
        *,
        context: int,
        batch: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
        split: Split = "train",
        verify: Verify = "size",
        vocabulary: int | None = None,
        prefetch: int = 2,
    ):
        _require_shares(batch, process, processes)
        if prefetch < 0:
            raise ArgumentError("nothing can be read so far ahead", got=prefetch, expected=">= 0")
        self.windows = Windows(
            folder, context=context, split=split, verify=verify, vocabulary=vocabulary
        )
        self._start = LoaderState(
            step=0,
            seed=seed,
            batch=batch,
            context=context,
            split=split,
            data=self.windows.index.digest(split),
        )
        self._step = 0
        grain = _grain()
        # One thread: more would not keep the order of reads on the disk, and one is fast enough.
        options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        source = _Batches(self.windows, batch=batch, seed=seed, share=(process, processes))
        self._batches = iter(grain.MapDataset.source(source).to_iter_dataset(options))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            tokens, windows = next(self._batches)
        except BaseException:
            # Grain has dropped the batch that could not be had; it stays the next one.
            self._batches.set_state({"next_index": self._step})
            raise
        self._step += 1
        return Batch(tokens, windows)

    @property
    def epoch(self) -> int:
        """The epoch that the first window of the next batch belongs to, from 0."""
        return self._step * self._start.batch // len(self.windows)

    def numbers(self, step: int) -> Int64[np.ndarray, " B"]:
        """The windows of a step's whole batch, whichever process this is.

        Args:
            step: its number.
        """
        places = step * self._start.batch + np.arange(self._start.batch, dtype=np.int64)
        return places_to_windows(places, windows=len(self.windows), seed=self._start.seed)

    def state(self) -> dict[str, Any]:
        """Where the loader is: after n batches, that batch n comes next. Plain JSON."""
        return self._start.model_copy(update={"step": self._step}).model_dump(mode="json")

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a loader of the same batches was, with any number of processes.

        Args:
            state: what `state` returned.
        """
        try:
            found = LoaderState.model_validate(state)
        except ValidationError as error:
            raise ArgumentError(
                "this is not the state of a token loader",
                got=str(state)[:200],
                expected=f"such as {self.state()}",
            ) from error
        for name, mine in self._start:
            theirs = getattr(found, name)
            if name != "step" and theirs != mine:
                raise ArgumentError(
                    f"the state belongs to other batches: {_MEANING.get(name, name)} is different",
                    got=f"{name} {theirs}",
                    expected=f"{name} {mine}, as this loader has it",
                    fix="go on with the settings and the data that the run was started with",
                )
        if found.step > LAST_PLACE // self._start.batch:
            raise ArgumentError("no run has so many steps", got=found.step)
        self._batches.set_state({"next_index": found.step})
        self._step = found.step

    def close(self) -> None:
        """Stop reading ahead; no batch comes after this."""
        self._batches.close()
        self.windows.close()


_MEANING = {"data": "the data itself", "context": "the context", "seed": "the seed"}


class _Batches:
    """Batch n of one process by its number, as Grain wants a source."""

    def __init__(self, windows: Windows, *, batch: int, seed: int, share: tuple[int, int]):
        process, processes = share
        rows = batch // processes
        self._windows, self._batch, self._seed = windows, batch, seed
        self._rows = np.arange(process * rows, (process + 1) * rows, dtype=np.int64)

    def __len__(self) -> int:
        return LAST_PLACE // self._batch

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        places = step * self._batch + self._rows
        numbers = places_to_windows(places, windows=len(self._windows), seed=self._seed)
        return self._windows.read(numbers), numbers


def _require_shares(batch: int, process: int, processes: int) -> None:
    if batch < 1 or processes < 1 or batch % processes:
        raise ArgumentError(
            "the processes cannot have equal shares of the batch",
            got=f"a batch of {batch} windows for {processes} processes",
            expected="a batch that the number of processes divides",
        )
    if not 0 <= process < processes:
        raise ArgumentError(
            "there is no such process", got=process, expected=f"0 to {processes - 1}"
        )


def _grain() -> ModuleType:
    try:
        import grain
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            "batches are read ahead by the package grain",
            got=missing.name,
            fix='pip install "xsake[train]"',
        ) from missing
    return grain
