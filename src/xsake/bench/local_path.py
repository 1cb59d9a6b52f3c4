"""Paths of this machine: addresses of object stores are refused instead of becoming folders."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from xsake.errors import ArgumentError

# `Path` joins the slashes of gs://bucket/run to gs:/bucket/run: both are recognised.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def require_local(*paths: str | Path | None) -> None:
    """Raise for a path that is an address such as `gs://bucket/run`.

    Args:
        paths: as they were given; None is left out.

    Example:
        >>> require_local("runs/one", None)
    """
    for path in paths:
        if path is not None and _ADDRESS.match(str(path)):
            scheme, _, rest = str(path).partition(":/")
            raise ArgumentError(
                f"{scheme}:// is not supported: data, checkpoints and metrics are local files",
                got=f"{scheme}://{rest.lstrip('/')}",
                expected="a folder that is mounted on this machine",
                fix="mount the storage and give the path of the mount; a local folder whose name "
                "ends with a colon needs an absolute path",
            )


def _check(value: Any) -> Any:
    if isinstance(value, str | Path):
        require_local(value)
    return value


LocalPath = Annotated[Path, BeforeValidator(_check)]
"""A path in a configuration, which `require_local` accepts."""
