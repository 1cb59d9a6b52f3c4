"""The parent's side of a worker: starts it, asks it, and turns its death into an answer."""

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from xsake.certify.case import Case
from xsake.certify.errors import CertifyError
from xsake.certify.family import Family, Target
from xsake.certify.record import Answer
from xsake.certify.words import last_lines, tidy

START_SECONDS, END_SECONDS = 180.0, 5.0
# Settings of the user's own shell must not decide what a certificate says.
_FOREIGN = ("JAX_", "LIBTPU_", "MOSAIC_", "PYTHON", "TPU_", "XLA_")


@dataclass(frozen=True)
class Setting:
    """Where a worker runs.

    Args:
        python: interpreter of its environment.
        module: dotted name of the family's module.
        family: the same, loaded.
        target: what it compiles for.
        time_limit: seconds that a case may take.
        figures: let the compiler write about its work, which takes longer.
    """

    python: Path
    module: str
    family: Family
    target: Target
    time_limit: float
    figures: bool = True


class Worker:
    """The process of one target, a context manager; it starts again after a case that killed it."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.device_kind, self.versions = "", {}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Worker":
        self._folder = tempfile.TemporaryDirectory(prefix="xsake-certify-")
        root = Path(self._folder.name)
        self._dump, self._packages, self._cwd = root / "dump", root / "packages", root / "cwd"
        for folder in (self._dump, self._packages, self._cwd):
            folder.mkdir()
        _share_packages(("xsake", self.setting.module), self._packages)
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

    def ask(self, case: Case) -> Answer:
        """The answer to one case. A crash and a silence are answers too."""
        if self._process is None:
            self._start()
        self._log.truncate(0)
        self._log.seek(0)
        line, complaint = self._converse(case.model_dump_json(), self.setting.time_limit)
        if line is None:
            self._stop()
            words = last_lines(self._log)
            return Answer(verdict="crashed", message=self._tidy(f"{complaint}\n{words}".strip()))
        found = Answer.model_validate_json(line)
        if found.message is None:
            return found
        return found.model_copy(update={"message": self._tidy(found.message)})

    def _start(self) -> None:
        setting = self.setting
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)
        }
        variables |= setting.family.process_variables(self._dump if setting.figures else None)
        variables |= {"PYTHONPATH": str(self._packages), "PYTHONNOUSERSITE": "1"}
        command = [str(setting.python), "-m", "xsake.certify.worker", setting.module]
        self._process = subprocess.Popen(
            [*command, setting.target.name, str(self._dump)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            cwd=self._cwd, env=variables, text=True, bufsize=1,
            start_new_session=True,  # so that what a compiler starts can be ended with it
        )  # fmt: skip
        line, complaint = self._converse(None, START_SECONDS)
        if line is None:
            self._stop()
            raise CertifyError(
                f"The worker for {setting.target.name} does not start.",
                got=f"{complaint}\n{last_lines(self._log)}".strip(),
                expected="a process that knows its device",
                fix=f"Run `{setting.python} -c 'import jax'`; remove the environment if it fails.",
            )
        hello = json.loads(line)
        self.device_kind, self.versions = hello["device_kind"], hello["versions"]

    def _converse(self, request: str | None, seconds: float) -> tuple[str | None, str]:
        """Send a line, wait for a line; None and what happened if there is none."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            if request is not None:
                process.stdin.write(request + "\n")
            # An answer is one line and nothing follows unasked, so readiness means it is coming.
            ready, _, _ = select.select([process.stdout], [], [], seconds)
            line = process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = ""
        if line is None:
            return None, f"timed out after {seconds:g} s"
        return (line, "") if line else (None, _ending(process.wait()))

    def _stop(self, grace: float = 0.0) -> None:
        """End the process and whatever it started, at once or after some seconds of grace."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # no more cases: it ends by itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def _tidy(self, message: str) -> str:
        home = str(self.setting.python.parent.parent)
        names = {str(self._packages): "", self._folder.name: "<scratch>", home: "<environment>"}
        return tidy(message, names)


def _ending(code: int) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with code {code}"


def _share_packages(modules: tuple[str, ...], folder: Path) -> None:
    """Links to our own top-level packages and to nothing beside them.

    The folder that holds them may be full of libraries in versions of another environment.
    """
    for package in {module.partition(".")[0] for module in modules}:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        (folder / package).symlink_to(Path(next(iter(spec.submodule_search_locations))).resolve())
