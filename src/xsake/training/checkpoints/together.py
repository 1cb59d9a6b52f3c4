"""Values that the processes of a run exchange; one process alone exchanges nothing."""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax._src import distributed  # the key-value store has no public name
from jax.experimental import multihost_utils

_POLL_SECONDS = 5  # a wait returns to Python this often, so that signals are handled


def is_first() -> bool:
    """Whether this process is the one that writes what only one may write."""
    return jax.process_index() == 0


def first_says(number: int) -> int:
    """The number that the first process gave; all of them call this at the same point."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


class PeerError(OSError):
    """A failure of another process, which the message names."""


def draw_number() -> int:
    """Draw a positive number that no other exchange has."""
    return 1 + secrets.randbelow(2**31 - 1)


def summarize(error: BaseException) -> str:
    """Describe an error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return (lines[0] if isinstance(error, PeerError) else f"{type(error).__name__}: {lines[0]}")[
        :500
    ]


class Exchange:
    """Reports of the processes to the first one, and its decisions, in one save or restore.

    They go through the key-value store of `jax.distributed`, which needs neither a device nor
    the disk: a thread next to training may use it, and so may a process whose disk is full.
    Waiting has no limit of its own: a process that dies ends all others by its missing heartbeat,
    and every process that lives reports, whether its part worked or failed.

    Args:
        number: from `draw_number` of the first process; the same on all of them.
    """

    def __init__(self, number: int):
        self._prefix = f"xsake/checkpoint/{number}/"

    def delete(self) -> None:
        """Delete all values; no process may need one any more."""
        if is_first() and jax.process_count() > 1:
            _client().key_value_delete(self._prefix)

    def report(self, topic: str, value: str = "", *, failure: str | None = None) -> None:
        """Report this process's part to the first one, which is in `collect`.

        Args:
            topic: of the report; used once in an exchange.
            value: what the first process needs to know.
            failure: in one line, of a part that failed.
        """
        self._set(f"{topic}/{jax.process_index()}", [failure, value])

    def contribute(self, topic: str, work: Callable[[], str]) -> None:
        """Do this process's part and report it; a failure is reported, and raised.

        Args:
            topic: of the report.
            work: the part; returns the value to report.
        """
        try:
            value = work()
        except BaseException as error:
            self.report(topic, failure=summarize(error))
            raise
        self.report(topic, value)

    def collect(self, topic: str) -> list[str]:
        """Wait for the reports of all processes but the first, which calls this.

        Raises:
            PeerError: at least one of them failed; all have ended their part.
        """
        values, failures = [], []
        for process in range(1, jax.process_count()):
            failure, value = self._get(f"{topic}/{process}")
            values.append(value)
            if failure is not None:
                failures.append(f"process {process}: {failure}")
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise PeerError(f"{failures[0]}{more}")
        return values

    @contextlib.contextmanager
    def decide(self, topic: str) -> Iterator[None]:
        """Announce how the body ended, in the first process; the others are in `follow`."""
        try:
            yield
        except BaseException as error:
            is_own = not isinstance(error, PeerError)
            self.announce(topic, "", f"process 0: {summarize(error)}" if is_own else str(error))
            raise
        self.announce(topic, "")

    def announce(self, topic: str, value: str, failure: str | None = None) -> None:
        """Publish a decision of the first process."""
        if jax.process_count() > 1:
            self._set(topic, [failure, value])

    def follow(self, topic: str) -> str:
        """Wait for a decision of the first process.

        Raises:
            PeerError: it has failed, or has collected a failure.
        """
        failure, value = self._get(topic)
        if failure is not None:
            raise PeerError(failure)
        return value

    def _set(self, key: str, value: list[str | None]) -> None:
        _client().key_value_set(self._prefix + key, json.dumps(value))

    def _get(self, key: str) -> list:
        while True:
            try:
                text = _client().blocking_key_value_get(self._prefix + key, _POLL_SECONDS * 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            else:
                return json.loads(text)


def _client():
    client = distributed.global_state.client
    assert client is not None, "several processes, but jax.distributed was not initialized"
    return client
