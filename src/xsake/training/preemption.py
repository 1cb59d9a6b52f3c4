"""Graceful preemption: all processes stop after the same step, save, and exit with a restart code.

A step that exceeds its timeout dumps the stacks of all threads.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import jax
from jax.experimental import multihost_utils

from xsake.errors import ArgumentError, UnsupportedError

EXIT_RESTART = 75  # EX_TEMPFAIL: the state is saved, start the same command again
EXIT_INTERRUPTED = 130  # exit code of a second Ctrl-C


class PreemptionHandler:
    """Context manager that turns SIGTERM and SIGINT into a stop that all processes agree on.

    Enter it in the main thread, after `processes.start`, and call `should_stop` after every step. A
    second SIGINT ends the process immediately, even during a step. With `stack_file`, SIGUSR1 and
    steps that exceed the timeout append the stacks of all threads to it.

    Args:
        step_timeout_s: a longer step dumps all stacks once; None: no limit.
        stack_file: file for stacks, one per process.
        is_fatal: whether a timeout also ends the process, so that it can be restarted.
        on_signal: called in a separate thread with the name of each signal.
    """

    def __init__(
        self,
        *,
        step_timeout_s: float | None = None,
        stack_file: Path | None = None,
        is_fatal: bool = False,
        on_signal: Callable[[str], None] = lambda name: None,
    ):
        if step_timeout_s is not None and not step_timeout_s > 0:
            raise ArgumentError(
                "step-timeout", "step_timeout_s must be positive", got=step_timeout_s
            )
        if step_timeout_s is not None and stack_file is None:
            what, expected = "a step timeout needs a file for stacks", "a path"
            raise ArgumentError("stack-file", what, got="stack_file=None", expected=expected)
        self._step_timeout_s, self._path, self._is_fatal = step_timeout_s, stack_file, is_fatal
        self._on_signal, self._is_requested, self._num_interrupts = on_signal, threading.Event(), 0
        self._cleanup = contextlib.ExitStack()
        self._file: IO[str] | None = None
        self._step_began: float | None = None

    def __enter__(self) -> "PreemptionHandler":
        if threading.current_thread() is not threading.main_thread():
            fix = "enter PreemptionHandler there"
            raise UnsupportedError("signal-thread", "signal handlers need the main thread", fix=fix)
        with contextlib.ExitStack() as cleanup:
            if self._path is not None:
                self._open_stack_file(self._path, cleanup)
            self._install_handlers(cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def should_stop(self, step: int) -> bool:
        """Return whether to save and exit with `EXIT_RESTART` after this step.

        All processes get the same answer at the same step. After True the step timeout is off.

        Args:
            step: that just finished; call this after each step in every process.
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
    def without_timeout(self) -> Iterator[None]:
        """Suspend the step timeout, for evaluation, compilation and saves."""
        was_armed = self._step_began is not None
        self._disarm(None)
        try:
            yield
        finally:
            if was_armed:
                self._arm()

    def _open_stack_file(self, path: Path, cleanup: contextlib.ExitStack) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = cleanup.enter_context(path.open("a", encoding="utf-8"))
        except OSError as error:
            got = f"{path}: {error.strerror}"
            raise ArgumentError(
                "stack-file-unwritable", "cannot write the file for stacks", got=got
            ) from error
        faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True)
        cleanup.callback(faulthandler.unregister, signal.SIGUSR1)
        cleanup.callback(self._disarm, None)

    def _install_handlers(self, cleanup: contextlib.ExitStack) -> None:
        """Read signals in a thread: the main thread may be inside a step for minutes."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._read_signals, args=(read_fd,), daemon=True)
        listener.start()
        cleanup.callback(listener.join)
        cleanup.callback(os.close, write_fd)  # ends the listener
        cleanup.callback(signal.set_wakeup_fd, before)
        # With several processes, the preemption service of jax handles SIGTERM.
        signals = () if jax.distributed.is_initialized() else (signal.SIGTERM,)
        ignore = lambda number, frame: None  # Python writes the signal to the wakeup fd
        for name in (signal.SIGINT, *signals):
            cleanup.callback(signal.signal, name, signal.signal(name, ignore))

    def _read_signals(self, read_fd: int) -> None:
        with open(read_fd, "rb", buffering=0) as file:
            while number := file.read(1):
                if (name := signal.Signals(number[0])) in (signal.SIGINT, signal.SIGTERM):
                    self._handle_signal(name)

    def _handle_signal(self, name: signal.Signals) -> None:
        self._num_interrupts += name == signal.SIGINT
        if self._num_interrupts > 1:
            os._exit(EXIT_INTERRUPTED)
        self._is_requested.set()
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)  # the service notifies the other processes
        self._on_signal(name.name)

    def _arm(self) -> None:
        self._step_began = time.monotonic()
        if self._step_timeout_s is not None and self._file is not None:
            faulthandler.dump_traceback_later(
                self._step_timeout_s, file=self._file, exit=self._is_fatal
            )

    def _disarm(self, step: int | None) -> None:
        began, self._step_began = self._step_began, None
        if self._step_timeout_s is None or self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        seconds = 0.0 if began is None else time.monotonic() - began
        if step is not None and seconds > self._step_timeout_s:
            self._file.write(f"Stacks above: step {step}, which took {seconds:.1f} s.\n")
            self._file.flush()
