"""Parent side of a worker process: start, send cases, and handle crashes."""

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import tempfile
from pathlib import Path

from xsake.certify.family import Target, load_family
from xsake.certify.record import CertifyError, CompileCase, CompileResult, sanitize

TAIL_LINES = 12  # of the log, in messages
START_SECONDS, END_SECONDS = 180.0, 5.0
# Variables of the user's shell must not affect certificates.
_CLEARED_PREFIXES = ("JAX_", "LIBTPU_", "MOSAIC_", "PYTHON", "TPU_", "XLA_")


class Worker:
    """Worker process of one target, a context manager; restarted after a crash."""

    def __init__(
        self, python: Path, module: str, target: Target, *, time_limit: float, figures: bool
    ):
        """`module` is that of the family; `figures` enables compiler dumps, which is slower."""
        self._python, self._module, self._target = python, module, target
        self._time_limit, self._figures = time_limit, figures
        self.device_kind, self.versions = "", {}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Worker":
        self._folder = tempfile.TemporaryDirectory(prefix="xsake-certify-")
        root = Path(self._folder.name)
        self._dump, self._packages, self._cwd = root / "dump", root / "packages", root / "cwd"
        for folder in (self._dump, self._packages, self._cwd):
            folder.mkdir()
        _link_packages(("xsake", self._module), self._packages)
        self._log = (root / "stderr").open("w+", encoding="utf-8", errors="replace")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(grace=END_SECONDS)
        self._log.close()
        self._folder.cleanup()

    def compile(self, case: CompileCase) -> CompileResult:
        """Compile one case; crashes and timeouts are results too."""
        if self._process is None:
            self._start()
        self._log.truncate(0)
        self._log.seek(0)
        line, error = self._exchange(case.model_dump_json(), self._time_limit)
        if line is None:
            self._stop()
            return CompileResult(verdict="crashed", message=self._sanitize(self._add_log(error)))
        result = CompileResult.model_validate_json(line)
        if result.message is None:
            return result
        return result.model_copy(update={"message": self._sanitize(result.message)})

    def _start(self) -> None:
        inherited = os.environ.items()
        variables = {name: x for name, x in inherited if not name.startswith(_CLEARED_PREFIXES)}
        dump = self._dump if self._figures else None
        variables |= load_family(self._module).process_variables(dump)
        variables |= {"PYTHONPATH": str(self._packages), "PYTHONNOUSERSITE": "1"}
        command = [str(self._python), "-m", "xsake.certify.worker", self._module]
        self._process = subprocess.Popen(
            [*command, self._target.name, str(self._dump)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            cwd=self._cwd, env=variables, text=True, bufsize=1,
            start_new_session=True,  # to kill subprocesses of the compiler with it
        )  # fmt: skip
        line, error = self._exchange(None, START_SECONDS)
        if line is None:
            self._stop()
            raise CertifyError(
                "worker-start", f"The worker for {self._target.name} does not start.",
                got=self._add_log(error),
                expected="a process that reports its device",
                fix=f"Run `{self._python} -c 'import jax'`; remove the environment if it fails.",
            )  # fmt: skip
        hello = json.loads(line)
        self.device_kind, self.versions = hello["device_kind"], hello["versions"]

    def _exchange(self, request: str | None, seconds: float) -> tuple[str | None, str]:
        """Send a line and wait for a reply; return None and an error if there is none."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            if request is not None:
                process.stdin.write(request + "\n")
            # A reply is one line, so a readable pipe has a whole one coming.
            ready, _, _ = select.select([process.stdout], [], [], seconds)
            line = process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = ""
        if line is None:
            return None, f"timed out after {seconds:g} s"
        if line:
            return line, ""
        code = process.wait()
        if code < 0:
            return None, f"the process was killed by {signal.Signals(-code).name}"
        return None, f"the process exited with code {code}"

    def _stop(self, grace: float = 0.0) -> None:
        """Kill the process group, after a grace period."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # end of input: the worker exits
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def _add_log(self, error: str) -> str:
        """Return the error with the last lines of the log."""
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()[-TAIL_LINES:]
        return "\n".join([error, *lines])

    def _sanitize(self, message: str) -> str:
        home = str(self._python.parent.parent)
        names = {str(self._packages): "", self._folder.name: "<scratch>", home: "<environment>"}
        return sanitize(message, names)


def _link_packages(modules: tuple[str, ...], folder: Path) -> None:
    """Link only the given top-level packages into a folder.

    Their own parent folder may hold libraries of another environment.
    """
    for package in {module.partition(".")[0] for module in modules}:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        (folder / package).symlink_to(Path(next(iter(spec.submodule_search_locations))).resolve())
