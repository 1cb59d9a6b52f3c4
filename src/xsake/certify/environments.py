"""Virtual environments by package name: built when first needed, whole or not at all, then kept."""

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
from xsake.certify.errors import CertifyError
from xsake.certify.family import Family

# What XSAKE itself imports beside jax, whose version is the family's business. A test compares
# this with the package's own dependencies.
BESIDE_JAX = ("jaxtyping>=0.3.4", "numpy>=2.1", "pydantic>=2.10", "typer>=0.20")
BUILD_SECONDS = 1800


def default_folder() -> Path:
    """Where environments are kept: the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or Path.home() / ".cache") / "xsake" / "environments"


def requirements_of(family: Family) -> tuple[str, ...]:
    """Everything that an environment of the family needs, for the jax that runs here."""
    jax_version = installed_versions(("jax",))["jax"]
    return (*family.requirements(jax_version), *BESIDE_JAX)


def interpreter(family: Family, folder: Path, announce: Callable[[str], None]) -> Path:
    """The Python that compiles for a family: the running one if it can, else one built for it.

    Args:
        family: whose compiler is needed.
        folder: where environments are kept.
        announce: told what is done if it takes long.
    """
    if len(installed_versions(family.PACKAGES)) == len(family.PACKAGES):
        return Path(sys.executable)
    # Named by what is in it: families that need the same packages share one.
    return prepared(family.PACKAGES[0], requirements_of(family), folder, announce)


def prepared(
    name: str, requirements: tuple[str, ...], folder: Path, announce: Callable[[str], None]
) -> Path:
    """The Python of the environment with these requirements, built if it is not there.

    An environment is `<name>-<digest>/`, and is complete once `<name>-<digest>.json` is beside it.
    """
    python_version = platform.python_version()
    digest = hashlib.sha256(json.dumps([python_version, requirements]).encode()).hexdigest()[:12]
    folder = folder.absolute()  # its Python is started from elsewhere
    place = folder / f"{name}-{digest}"
    marker = folder / f"{place.name}.json"
    if not (marker.exists() and _python(place).exists()):
        announce(f"building the {name} environment once: {', '.join(requirements)}")
        folder.mkdir(parents=True, exist_ok=True)
        _build(place, requirements)
        content = {"requirements": requirements, "python": python_version}
        marker.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return _python(place)


def _build(place: Path, requirements: tuple[str, ...]) -> None:
    """Make it under another name first: whoever looks meanwhile sees nothing, not half of it."""
    # A rename keeps `python -m ...` working, which is all we use; scripts in bin/ would break.
    scratch = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}-"))
    try:
        bare = [] if requirements else ["--without-pip"]
        _call([sys.executable, "-m", "venv", *bare, str(scratch)])
        if requirements:
            pip = [str(_python(scratch)), "-m", "pip", "install", "--quiet", "--no-input"]
            _call([*pip, "--disable-pip-version-check", *requirements])
        _remove(place)
        scratch.replace(place)
    except OSError:
        # Someone else was faster, and theirs is as good.
        if not _python(place).exists():
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
            "Building an environment took too long.",
            got=f"{' '.join(command[1:])}: more than {BUILD_SECONDS} s",
            expected="an answer from the package index",
            fix="Check the network and pip's settings, and run again.",
        ) from error
    if done.returncode:
        raise CertifyError(
            "An environment could not be built.",
            got=(done.stderr or done.stdout).strip()[-2000:],
            expected=f"`python {' '.join(command[1:])}` to work",
            fix="Check the network and pip's settings, or run xsake in an environment that has it.",
        )


def _remove(place: Path) -> None:
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)


def _python(place: Path) -> Path:
    return place / "bin" / "python"
