"""Static files, loaded at startup and served from memory."""

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
    ".gz": "application/gzip",  # compressed data, decompressed by the page
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".webp": "image/webp",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
_MAX_FILE_BYTES, _MAX_TOTAL_BYTES, _MAX_FILES = 2**24, 2**27, 5000
_INLINE = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL | re.IGNORECASE)
BUILT_IN = Path(__file__).parent / "page"


@dataclass(frozen=True)
class PageFile:
    """Static file.

    Args:
        content: bytes of the file.
        media_type: of the response.
    """

    content: bytes
    media_type: str


@dataclass(frozen=True)
class Site:
    """Static files by path.

    Args:
        files: such as `/page/app.js`.
        script_hashes: of inline scripts, for the content security policy.
    """

    files: dict[str, PageFile]
    script_hashes: tuple[str, ...] = ()


def read_site(folder: Path, prefix: str) -> Site:
    """Load the static files of a folder; links and other types are skipped.

    Args:
        folder: with an index.html in it.
        prefix: of the paths.
    """
    if not (folder / "index.html").is_file():
        raise ArgumentError("the folder has no page", got=folder, expected="an index.html in it")
    files: dict[str, PageFile] = {}
    hashes: dict[str, None] = {}
    left = _MAX_TOTAL_BYTES
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not (Path(parent) / name).is_symlink())
        for name in sorted(names):
            path = Path(parent) / name
            media_type = _TYPES.get(path.suffix)
            if media_type is None or path.is_symlink() or len(files) >= _MAX_FILES:
                continue
            content = read_document(path, _MAX_FILE_BYTES)
            left -= len(content)
            if left < 0:
                raise ArgumentError("the page is too large", got=folder, expected=_MAX_TOTAL_BYTES)
            relative = path.relative_to(folder).as_posix()
            files[prefix + relative] = PageFile(content, media_type)
            if media_type.startswith("text/html"):
                hashes |= dict.fromkeys(map(_script_hash, _INLINE.findall(content)))
    for path_name in [path_name for path_name in files if path_name.endswith("index.html")]:
        files[path_name.removesuffix("index.html")] = files[path_name]
    return Site(files, tuple(hashes))


def _script_hash(script: bytes) -> str:
    return base64.b64encode(hashlib.sha256(script).digest()).decode()
