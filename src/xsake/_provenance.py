"""Provenance of measurements: commit, versions, CPU, time, load, source digest."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
PACKAGES = ("xsake", "jax", "jaxlib", "numpy")


@dataclass(frozen=True)
class Environment:
    """Provenance fields shared by all rows of one run."""

    cpu: str
    cores: int
    utc: str
    load_average: float
    commit: str | None
    dirty: bool | None
    versions: dict[str, str] = field(default_factory=dict)

    def fields(self, *names: str) -> dict[str, Any]:
        """Return fields by name; default: those of a benchmark row."""
        row = "versions", "commit", "dirty", "utc", "cpu", "load_average"
        return {name: getattr(self, name) for name in names or row}


def environment(root: Path | None = None) -> Environment:
    """Collect facts about this machine and the git commit of `root`.

    Args:
        root: root of the measured checkout; None outside of one.

    Returns:
        An `Environment`; `commit` and `dirty` are None without a commit. Uncommitted result rows do
        not count as dirty.

    Example:
        >>> environment().cores >= 1
        True
    """
    commit = _git(root, "rev-parse", "HEAD")
    measured = ":!benchmarks/results", ":!certificates"  # written by runs
    changes = _git(root, "status", "--porcelain", "--", ".", *measured)
    return Environment(
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        utc=utc_now(),
        load_average=round(os.getloadavg()[0], 2),
        commit=commit,
        dirty=None if commit is None else bool(changes),
        versions={"python": platform.python_version()} | installed_versions(PACKAGES),
    )


def utc_now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def checkout_root() -> Path | None:
    """Return the root of XSAKE's checkout; None if it is installed as a package."""
    root = PACKAGE.parents[1]
    is_checkout = PACKAGE.parent.name == "src" and (root / "pyproject.toml").exists()
    return root if is_checkout else None


def source_digest(*parts: str) -> str:
    """Return a digest of the package's source files.

    Args:
        parts: files and folders of the package; default: all.
    """
    digest = hashlib.sha256()
    for path in [PACKAGE / part for part in parts] or [PACKAGE]:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = file.relative_to(PACKAGE).as_posix()
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return versions by distribution name; packages that are not installed are omitted."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def cpu_model() -> str:
    """Return the CPU model name."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git(root: Path | None, *arguments: str) -> str | None:
    """Return the output of a git command in `root`; None if it fails."""
    if root is None:
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
