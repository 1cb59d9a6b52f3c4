"""How a run stops: every process after the same step, saved, with a code that asks for a restart.

A step that hangs cannot be stopped so; it is made to say where it hangs.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

import jax
from jax.experimental import multihost_utils

from xsake.errors import ArgumentError, UnsupportedError

RESTART_ME = 75  # exit code, EX_TEMPFAIL: all is saved, start the same command again
INTERRUPTED = 130  # exit code of a second Ctrl-C


class StopRequest:
    """Turns SIGTERM and SIGINT into a stop that all processes agree on, a context manager.

    Enter it in the main thread, after `processes.start`, and ask `reached` after every step. A
    second SIGINT ends the process at once, even inside a step that hangs. With a file for
    stacks, SIGUSR1 writes what every thread is doing, and so does a step that takes too long.

    Args:
        hang_seconds: a step that takes longer writes all stacks, once; None: no limit.
        stacks: the file that they are added to, one per process.
        is_fatal: a step that takes too long ends the process too, so that it can be restarted.
        on_signal: told the name of each signal that comes, on a thread of its own.
    """

    def __init__(
        self,
        *,
        hang_seconds: float | None = None,
        stacks: Path | None = None,
        is_fatal: bool = False,
        on_signal: Callable[[str], None] | None = None,
    ):
        if hang_seconds is not None and not hang_seconds > 0:
            raise ArgumentError("hang_seconds must be positive", got=hang_seconds)
        if hang_seconds is not None and stacks is None:
            raise ArgumentError(
                "stacks of a step that hangs need a place", got="stacks=None", expected="a file"
            )
        self._hang_seconds, self._path, self._is_fatal = hang_seconds, stacks, is_fatal
        self._on_signal = on_signal
        self._is_requested = threading.Event()
        self._undo = contextlib.ExitStack()
        self._file: TextIO | None = None
        self._interrupts = 0
        self._step_began: float | None = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            raise UnsupportedError(
                "signals come to the main thread only", fix="enter StopRequest in the main thread"
            )
        with contextlib.ExitStack() as undo:
            self._open_stacks(undo)
            self._listen(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def reached(self, step: int) -> bool:
        """Whether this is the step after which to save and to exit with `RESTART_ME`.

        Every process gets the same answer at the same step. Once true, steps are over, and what
        follows may take its time.

        Args:
            step: that was just done; ask after each, without gaps, in every process.
        """
        self._disarm(step)
        if jax.distributed.is_initialized():
            is_last = bool(multihost_utils.reached_preemption_sync_point(step))
        else:
            is_last = self._is_requested.is_set()
        if not is_last:
            self._arm()
        return is_last

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """What happens in the body, such as an evaluation, is no step and may take its time."""
        was_armed = self._step_began is not None
        self._disarm(None)
        try:
            yield
        finally:
            if was_armed:
                self._arm()

    def _open_stacks(self, undo: contextlib.ExitStack) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = undo.enter_context(self._path.open("a", encoding="utf-8"))
        except OSError as error:
            raise ArgumentError(
                "stacks cannot be written", got=f"{self._path}: {error.strerror}"
            ) from error
        faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True)
        undo.callback(faulthandler.unregister, signal.SIGUSR1)
        undo.callback(self._disarm, None)

    def _listen(self, undo: contextlib.ExitStack) -> None:
        """A thread hears signals at once; the main thread may be inside a step for minutes."""
        ear, mouth = os.pipe()
        os.set_blocking(mouth, False)
        before = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._hear, args=(ear,), name="signals", daemon=True)
        listener.start()
        undo.callback(listener.join)
        undo.callback(os.close, mouth)  # the listener's file ends, and so does it
        undo.callback(signal.set_wakeup_fd, before)
        # With several processes, the preemption service of jax has SIGTERM.
        own = () if jax.distributed.is_initialized() else (signal.SIGTERM,)
        for name in (signal.SIGINT, *own):
            undo.callback(signal.signal, name, signal.signal(name, _do_nothing))

    def _hear(self, ear: int) -> None:
        with open(ear, "rb", buffering=0) as file:
            while numbers := file.read(64):
                for number in numbers:
                    if number in (signal.SIGINT, signal.SIGTERM):  # others have their own listeners
                        self._take(signal.Signals(number))

    def _take(self, name: signal.Signals) -> None:
        self._interrupts += name == signal.SIGINT
        if self._interrupts > 1:
            os._exit(INTERRUPTED)
        self._is_requested.set()
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)  # which tells the others
        if self._on_signal is not None:
            self._on_signal(name.name)

    def _arm(self) -> None:
        self._step_began = time.monotonic()
        if self._hang_seconds is not None and self._file is not None:
            faulthandler.dump_traceback_later(
                self._hang_seconds, file=self._file, exit=self._is_fatal
            )

    def _disarm(self, step: int | None) -> None:
        began, self._step_began = self._step_began, None
        if self._hang_seconds is None or self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        seconds = 0.0 if began is None else time.monotonic() - began
        if step is not None and seconds > self._hang_seconds:
            self._file.write(f"The stacks above: step {step}, which ended after {seconds:.1f} s.\n")
            self._file.flush()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Python passes on only signals that have a handler; the listener does the work."""
