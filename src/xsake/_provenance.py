"""Where and with what a measurement was made: commit, versions, processor, time, load."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
PACKAGES = ("xsake", "jax", "jaxlib", "numpy")


@dataclass(frozen=True)
class Environment:
    """The part of a row that is the same for every measurement of one run."""

    cpu: str
    cores: int
    utc: str
    load_average: float
    commit: str | None
    dirty: bool | None
    versions: dict[str, str] = field(default_factory=dict)


def environment(root: Path | None = None) -> Environment:
    """Facts about this machine and, if `root` is a git checkout, about its commit.

    Args:
        root: folder of the code being measured; None when there is no checkout.

    Returns:
        An `Environment`; `commit` and `dirty` are None outside a checkout and before its first
        commit. Uncommitted result rows do not make a checkout dirty: they are what a run writes.

    Example:
        >>> environment().cores >= 1
        True
    """
    commit = _git(root, "rev-parse", "HEAD")
    measured = ":!benchmarks/results", ":!certificates"  # what a run writes does not make it dirty
    changes = _git(root, "status", "--porcelain", "--", ".", *measured)
    return Environment(
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        load_average=round(os.getloadavg()[0], 2),
        commit=commit,
        dirty=None if commit is None else bool(changes),
        versions={"python": platform.python_version()} | installed_versions(PACKAGES),
    )


def own_checkout() -> Path | None:
    """The folder of XSAKE's sources, if it is used from a checkout of its own."""
    root = PACKAGE.parents[1]
    is_checkout = PACKAGE.parent.name == "src" and (root / "pyproject.toml").exists()
    return root if is_checkout else None


def source_digest(*parts: str) -> str:
    """Names the code that ran, where version and commit do not.

    Args:
        parts: files and folders of the package; none: all of it.
    """
    total = hashlib.sha256()
    for place in [PACKAGE / part for part in parts] or [PACKAGE]:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            total.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]


def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Version by distribution name; packages that are not installed are left out."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_model() -> str:
    """The processor's own name for itself, as far as the system tells."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git(root: Path | None, *arguments: str) -> str | None:
    """Output of one git command inside `root`; None when there is no repository or no commit."""
    if root is None:
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
