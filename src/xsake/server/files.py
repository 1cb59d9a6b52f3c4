"""Files of pages: found once at the start, served from memory; a request names no path."""

import base64
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from xsake.errors import ArgumentError
from xsake.server.registry import read_document

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".gz": "application/gzip",  # packed data, which pages unpack themselves
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".webp": "image/webp",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
_MOST_FILE, _MOST_ALL, _MOST_FILES = 2**24, 2**27, 5000
_INLINE = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL | re.IGNORECASE)
BUILT_IN = Path(__file__).parent / "page"


@dataclass(frozen=True)
class File:
    """A file of a page.

    Args:
        content: all of it.
        kind: its media type.
    """

    content: bytes
    kind: str


@dataclass(frozen=True)
class Site:
    """All files of a page, by address.

    Args:
        files: such as `/page/app.js`.
        script_hashes: of inline scripts, for the content security policy.
    """

    files: dict[str, File]
    script_hashes: tuple[str, ...] = ()


def read_site(folder: Path, prefix: str) -> Site:
    """Everything in a folder that pages are made of; links and other files are left out.

    Args:
        folder: with an index.html in it.
        prefix: of the addresses.
    """
    if not (folder / "index.html").is_file():
        raise ArgumentError("this is no page", got=folder, expected="a folder with an index.html")
    files: dict[str, File] = {}
    hashes: dict[str, None] = {}
    left = _MOST_ALL
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not (Path(parent) / name).is_symlink())
        for name in sorted(names):
            path = Path(parent) / name
            kind = _TYPES.get(path.suffix)
            if kind is None or path.is_symlink() or len(files) >= _MOST_FILES:
                continue
            content = read_document(path, _MOST_FILE)
            left -= len(content)
            if left < 0:
                raise ArgumentError("the page is too large", got=folder, expected=_MOST_ALL)
            where = path.relative_to(folder).as_posix()
            files[prefix + where] = File(content, kind)
            if kind.startswith("text/html"):
                hashes |= dict.fromkeys(map(_hash, _INLINE.findall(content)))
    for address in [address for address in files if address.endswith("index.html")]:
        files[address.removesuffix("index.html")] = files[address]
    return Site(files, tuple(hashes))


def _hash(script: bytes) -> str:
    return base64.b64encode(hashlib.sha256(script).digest()).decode()
