"""Virtual environments of compilers, built atomically on first use."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from xsake._provenance import installed_versions
from xsake.certify.family import TargetFamily
from xsake.certify.record import CertifyError

# Dependencies of XSAKE except jax, whose version the family sets. A test compares this with the
# package metadata.
DEPENDENCIES = ("jaxtyping>=0.3.4", "numpy>=2.1", "pydantic>=2.10", "typer>=0.20")
BUILD_SECONDS = 1800


def default_folder() -> Path:
    """Return the default folder, in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or Path.home() / ".cache") / "xsake" / "environments"


def list_requirements(family: TargetFamily) -> tuple[str, ...]:
    """Return all requirements of a family's environment, for the installed jax version."""
    jax_version = installed_versions(("jax",))["jax"]
    return (*family.requirements(jax_version), *DEPENDENCIES)


def find_interpreter(family: TargetFamily, folder: Path, announce: Callable[[str], None]) -> Path:
    """Return the interpreter for a family: the running one if it has the packages, else build one.

    Args:
        family: target family.
        folder: folder of environments.
        announce: called with a message before a build.
    """
    if len(installed_versions(family.PACKAGES)) == len(family.PACKAGES):
        return Path(sys.executable)
    # Named by its packages: families with the same packages share one.
    return prepare(family.PACKAGES[0], list_requirements(family), folder, announce)


def prepare(
    name: str, requirements: tuple[str, ...], folder: Path, announce: Callable[[str], None]
) -> Path:
    """Return the interpreter of the environment with these requirements, building it if needed.

    An environment is `<name>-<digest>/`, and is complete once `<name>-<digest>.json` exists.
    """
    python_version = platform.python_version()
    digest = hashlib.sha256(json.dumps([python_version, requirements]).encode()).hexdigest()[:12]
    folder = folder.absolute()  # its interpreter runs in another folder
    path = folder / f"{name}-{digest}"
    marker = folder / f"{path.name}.json"
    if not (marker.exists() and _python(path).exists()):
        announce(f"building the {name} environment once: {', '.join(requirements)}")
        folder.mkdir(parents=True, exist_ok=True)
        _build(path, requirements)
        content = {"requirements": requirements, "python": python_version}
        marker.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return _python(path)


def _build(path: Path, requirements: tuple[str, ...]) -> None:
    """Build under a temporary name and rename, so that partial environments are never visible."""
    # Only `python -m ...` is used: a rename breaks the scripts in bin/.
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        bare = [] if requirements else ["--without-pip"]
        _call([sys.executable, "-m", "venv", *bare, str(scratch)])
        if requirements:
            pip = [str(_python(scratch)), "-m", "pip", "install", "--quiet", "--no-input"]
            _call([*pip, "--disable-pip-version-check", *requirements])
        _remove(path)
        scratch.replace(path)
    except OSError:
        # Another process was faster.
        if not _python(path).exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise CertifyError(
            "environment-timeout",
            "Building an environment timed out.",
            got=f"{' '.join(command[1:])}: more than {BUILD_SECONDS} s",
            expected="a response from the package index",
            fix="Check the network and pip's settings, and run again.",
        ) from error
    if done.returncode:
        raise CertifyError(
            "environment-build", "An environment could not be built.",
            got=(done.stderr or done.stdout).strip()[-2000:],
            expected=f"`python {' '.join(command[1:])}` to succeed",
            fix="Check the network and pip's settings, or run xsake in an environment that has it.",
        )  # fmt: skip


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _python(path: Path) -> Path:
    return path / "bin" / "python"
