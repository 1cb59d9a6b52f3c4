"""Agreement of the processes of a run in one save or restore; one process exchanges nothing."""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax._src import distributed  # the key-value store has no public name
from jax.experimental import multihost_utils

from xsake.training.processes import is_primary
from xsake.training.verify import DamagedError

_POLL_SECONDS = 5  # a wait returns to Python this often, so that signals are handled


class PeerError(OSError):
    """Failure of another process, which the message names."""


def summarize(error: BaseException) -> str:
    """Describe an error in one line."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, PeerError) else f"{type(error).__name__}: {lines[0]}"
    return text[:500]


def broadcast(number: int) -> int:
    """Return the number of the primary process; all processes call this at the same point."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def draw_number() -> int:
    """Return a random positive ID for an exchange."""
    return 1 + secrets.randbelow(2**31 - 1)


class ProcessExchange:
    """Reports of the processes to the primary one, and its decisions, in one save or restore.

    They use the key-value store of `jax.distributed`, which needs neither a device nor the disk: it
    works in a background thread and with a full disk. Waits have no timeout: a process that dies
    ends all others by its missing heartbeat, and every living process reports success or failure.

    Args:
        number: random ID, the same on all processes.
    """

    def __init__(self, number: int):
        self._prefix = f"xsake/checkpoint/{number}/"

    def delete(self) -> None:
        """Delete all values; no process may need one any more."""
        if is_primary() and jax.process_count() > 1:
            _client().key_value_delete(self._prefix)

    def contribute(self, topic: str, work: Callable[[], str]) -> None:
        """Do this process's part and report it; a failure is reported and raised."""
        key = f"{topic}/{jax.process_index()}"
        try:
            value = work()
        except BaseException as error:
            self._set(key, [summarize(error), ""])
            raise
        self._set(key, [None, value])

    def collect(self, topic: str) -> list[str]:
        """Wait in the primary process for all others; raise `PeerError` if one has failed."""
        reports = [self._get(f"{topic}/{process}") for process in range(1, jax.process_count())]
        failures = [
            f"process {i}: {failure}" for i, (failure, _) in enumerate(reports, 1) if failure
        ]
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise PeerError(f"{failures[0]}{more}")
        return [value for _, value in reports]

    @contextlib.contextmanager
    def decide(self, topic: str) -> Iterator[None]:
        """Announce the outcome of the body in the primary process; the others call `follow`."""
        try:
            yield
        except BaseException as error:
            is_local = not isinstance(error, PeerError)
            self._set(topic, [f"process 0: {summarize(error)}" if is_local else str(error), ""])
            raise
        self._set(topic, [None, ""])

    def follow(self, topic: str) -> str:
        """Wait for a decision of the primary process; raise `PeerError` if it is a failure."""
        failure, value = self._get(topic)
        if failure is not None:
            raise PeerError(failure)
        return value

    def agree[Result](self, topic: str, work: Callable[[], Result]) -> Result:
        """Return this process's result; raise on all the damage that the lowest process detects."""
        result, damage, report = None, None, ""
        try:
            result = work()
        except DamagedError as error:
            damage, process = error, jax.process_index()
            note = f" (process {process})" if process else ""
            report = json.dumps([damage.reason, damage.file, f"{damage.got}{note}"])
        decision = report
        if jax.process_count() > 1 and is_primary():
            reports = [report, *self.collect(topic)]
            decision = next((each for each in reports if each), "")
            self._set(f"{topic}/decision", [None, decision])
        elif jax.process_count() > 1:
            self.contribute(topic, lambda: report)
            decision = self.follow(f"{topic}/decision")
        if damage is not None and decision == report:
            raise damage
        if decision:
            reason, file, got = json.loads(decision)
            raise DamagedError(reason, file, got=got)
        return result  # pyrefly: ignore[bad-return]

    def _set(self, key: str, value: list[str | None]) -> None:
        if jax.process_count() > 1:
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
