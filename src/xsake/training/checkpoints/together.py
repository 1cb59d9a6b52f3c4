"""Exchange of values between the processes of a run; a single process exchanges nothing."""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax._src import distributed  # the key-value store has no public name
from jax.experimental import multihost_utils

_POLL_SECONDS = 5  # a wait returns to Python this often, so that signals are handled


def is_primary() -> bool:
    """Return whether this is process 0, the only one that writes shared files."""
    return jax.process_index() == 0


def broadcast_from_primary(number: int) -> int:
    """Return the number of the primary process; all processes call this at the same point."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


class PeerError(OSError):
    """Failure of another process, which the message names."""


def draw_number() -> int:
    """Return a random positive ID for an exchange."""
    return 1 + secrets.randbelow(2**31 - 1)


def summarize(error: BaseException) -> str:
    """Describe an error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return (lines[0] if isinstance(error, PeerError) else f"{type(error).__name__}: {lines[0]}")[
        :500
    ]


class ProcessExchange:
    """Reports of the processes to the primary one, and its decisions, in one save or restore.

    They use the key-value store of `jax.distributed`, which needs neither a device nor the disk: it
    works in a background thread and with a full disk. Waits have no timeout: a process that dies
    ends all others by its missing heartbeat, and every living process reports success or failure.

    Args:
        number: from `draw_number` of the primary process; the same on all processes.
    """

    def __init__(self, number: int):
        self._prefix = f"xsake/checkpoint/{number}/"

    def delete(self) -> None:
        """Delete all values; no process may need one any more."""
        if is_primary() and jax.process_count() > 1:
            _client().key_value_delete(self._prefix)

    def report(self, topic: str, value: str = "", *, failure: str | None = None) -> None:
        """Report this process's part to the primary one, which calls `collect`.

        Args:
            topic: of the report; used once in an exchange.
            value: for the primary process.
            failure: in one line, of a part that failed.
        """
        self._set(f"{topic}/{jax.process_index()}", [failure, value])

    def contribute(self, topic: str, work: Callable[[], str]) -> None:
        """Do this process's part and report it; a failure is reported and raised.

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
        """Wait in the primary process for the reports of all others.

        Raises:
            PeerError: at least one of them failed; all have finished their part.
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
        """Announce the outcome of the body in the primary process; the others call `follow`."""
        try:
            yield
        except BaseException as error:
            is_local = not isinstance(error, PeerError)
            self.announce(topic, "", f"process 0: {summarize(error)}" if is_local else str(error))
            raise
        self.announce(topic, "")

    def announce(self, topic: str, value: str, failure: str | None = None) -> None:
        """Publish a decision of the primary process."""
        if jax.process_count() > 1:
            self._set(topic, [failure, value])

    def follow(self, topic: str) -> str:
        """Wait for a decision of the primary process.

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
