"""Batches for training in a reproducible order that interruptions do not change."""

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
from xsake.training.data.order import positions_to_windows
from xsake.training.data.shards import Verify
from xsake.training.data.windows import Windows

MAX_POSITION = 2**62  # beyond any run; arithmetic on positions fits int64


class Batch(NamedTuple):
    """Batch of one process in one step.

    Args:
        tokens: a window of `context + 1` tokens per row.
        windows: indices of the windows in their split.
    """

    tokens: Int32[np.ndarray, "B n"]
    windows: Int64[np.ndarray, " B"]


class LoaderState(Frozen):
    """Position of a loader, and all settings that determine its batches except the processes."""

    version: Literal[1] = 1
    step: Count
    seed: int
    batch: Count
    context: Count
    split: Split
    data: str


class TokenLoader:
    """Endless iterator of batches from a data folder.

    The batch of a step is a function of files, seed and step only. Every epoch reads every window
    once, in a new order; a batch may span two epochs. Process p of n reads rows `p * batch / n` to
    `(p + 1) * batch / n` only.

    Args:
        folder: from `xsake data build`.
        context: input tokens per window.
        batch: windows per step, over all processes.
        seed: of the shuffle.
        process: index of this process.
        processes: number of processes.
        split: which documents.
        verify: `size` checks the sizes of all files; `full` also verifies the digest of a file on
            first use, see `Verifier`.
        vocabulary: size of the model's vocabulary; None: not checked.
        prefetch: number of batches to read ahead in a thread; 0: none.
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
            raise ArgumentError("prefetch is negative", got=prefetch, expected=">= 0")
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
        # One thread is fast enough and keeps the order of reads on the disk.
        options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        source = _Batches(self.windows, batch=batch, seed=seed, share=(process, processes))
        self._batches = iter(grain.MapDataset.source(source).to_iter_dataset(options))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            tokens, windows = next(self._batches)
        except BaseException:
            # Grain has dropped the failed batch; read it again next time.
            self._batches.set_state({"next_index": self._step})
            raise
        self._step += 1
        return Batch(tokens, windows)

    @property
    def epoch(self) -> int:
        """Epoch of the first window of the next batch, from 0."""
        return self._step * self._start.batch // len(self.windows)

    def window_ids(self, step: int) -> Int64[np.ndarray, " B"]:
        """Return the windows of a step's whole batch, over all processes.

        Args:
            step: its number.
        """
        positions = step * self._start.batch + np.arange(self._start.batch, dtype=np.int64)
        return positions_to_windows(positions, windows=len(self.windows), seed=self._start.seed)

    def state(self) -> dict[str, Any]:
        """Return the position as JSON: after n batches, batch n is next."""
        return self._start.model_copy(update={"step": self._step}).model_dump(mode="json")

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at the position of a loader of the same batches, with any number of processes.

        Args:
            state: from `state`.
        """
        try:
            restored = LoaderState.model_validate(state)
        except ValidationError as error:
            raise ArgumentError(
                "invalid state of a token loader",
                got=str(state)[:200],
                expected=f"such as {self.state()}",
            ) from error
        for name, expected in self._start:
            value = getattr(restored, name)
            if name != "step" and value != expected:
                raise ArgumentError(
                    f"the state is of other batches: {_LABELS.get(name, name)} differs",
                    got=f"{name} {value}",
                    expected=f"{name} {expected}",
                    fix="resume with the settings and the data of the interrupted run",
                )
        if restored.step > MAX_POSITION // self._start.batch:
            raise ArgumentError("the step of the loader is out of range", got=restored.step)
        self._batches.set_state({"next_index": restored.step})
        self._step = restored.step

    def close(self) -> None:
        """Stop reading ahead; there are no more batches."""
        self._batches.close()
        self.windows.close()


_LABELS = {"data": "the data", "context": "the context", "seed": "the seed"}


class _Batches:
    """Grain source of the batches of one process."""

    def __init__(self, windows: Windows, *, batch: int, seed: int, share: tuple[int, int]):
        process, processes = share
        rows = batch // processes
        self._windows, self._batch, self._seed = windows, batch, seed
        self._rows = np.arange(process * rows, (process + 1) * rows, dtype=np.int64)

    def __len__(self) -> int:
        return MAX_POSITION // self._batch

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        positions = step * self._batch + self._rows
        window_ids = positions_to_windows(positions, windows=len(self._windows), seed=self._seed)
        return self._windows.read(window_ids), window_ids


def _require_shares(batch: int, process: int, processes: int) -> None:
    if batch < 1 or processes < 1 or batch % processes:
        raise ArgumentError(
            "the batch is not divisible by the number of processes",
            got=f"a batch of {batch} windows for {processes} processes",
            expected=f"a multiple of {processes}",
        )
    if not 0 <= process < processes:
        raise ArgumentError(
            "the process index is out of range", got=process, expected=f"0 to {processes - 1}"
        )


def _grain() -> ModuleType:
    try:
        import grain
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            "the loader needs the package grain",
            got=missing.name,
            fix='pip install "xsake[train]"',
        ) from missing
    return grain
