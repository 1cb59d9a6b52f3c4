"""Masses of documents that were measured already: packed, in memory or as files that stay."""

import hashlib
import io
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from xsake._io import atomic_write
from xsake.errors import ArgumentError


class DocumentMasses(NamedTuple):
    """What a document's attention looked at, all heads of all layers in one axis."""

    entropy: Float[np.ndarray, " X"]
    true: Float[np.ndarray, "X n n"]
    estimates: dict[str, Float[np.ndarray, "X n n"]]


class Shelf:
    """Keeps documents by key.

    Masses are kept as float16 and without the half that causality hides.

    Args:
        folder: None keeps them in memory.
        fresh: forget what the folder holds.
    """

    def __init__(self, folder: Path | None = None, *, fresh: bool = False):
        self._folder, self._is_fresh = folder, fresh
        self._memory: dict[str, dict[str, np.ndarray]] = {}

    def __contains__(self, key: str) -> bool:
        if self._folder is None or self._is_fresh:
            return key in self._memory
        return _arrays(self._path(key)) is not None

    def put(self, key: str, masses: DocumentMasses) -> None:
        """Keep a document; it is on the disk when this returns."""
        arrays = {"entropy": masses.entropy.astype(np.float32), "true": _packed(masses.true)}
        arrays |= {f"estimate {name}": _packed(m) for name, m in masses.estimates.items()}
        self._put(key, arrays)

    def get(self, key: str) -> DocumentMasses:
        """A document that was put."""
        arrays = self._get(key)
        marked = [name for name in arrays if name.startswith("estimate ")]
        return DocumentMasses(
            arrays["entropy"],
            _unpacked(arrays["true"]),
            {name.removeprefix("estimate "): _unpacked(arrays[name]) for name in marked},
        )

    def put_effects(self, key: str, effects: dict[str, Float[np.ndarray, "X levels"]]) -> None:
        """Keep a document's effects, by selector."""
        self._put(key, {name: each.astype(np.float32) for name, each in effects.items()})

    def effects(self, key: str) -> dict[str, Float[np.ndarray, "X levels"]]:
        """Effects that were put."""
        return self._get(key)

    def _put(self, key: str, arrays: dict[str, np.ndarray]) -> None:
        if self._folder is None:
            self._memory[key] = arrays
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path(key), _file_of(arrays))
        except OSError as error:
            raise ArgumentError(
                "what was measured cannot be kept",
                got=f"{self._folder}: {error.strerror}",
                expected="a folder that can be written to",
                fix="name another place with -o",
            ) from error

    def _get(self, key: str) -> dict[str, np.ndarray]:
        arrays = self._memory.get(key) if self._folder is None else _arrays(self._path(key))
        assert arrays is not None, "asked for a document that was never put"
        return arrays

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


def _packed(masses: Float[np.ndarray, "X n n"]) -> np.ndarray:
    rows, columns = np.tril_indices(masses.shape[-1])
    return masses[:, rows, columns].astype(np.float16)


def _unpacked(packed: np.ndarray) -> Float[np.ndarray, "X n n"]:
    n = int((np.sqrt(8 * packed.shape[-1] + 1) - 1) / 2 + 0.5)
    masses = np.zeros((len(packed), n, n), np.float32)
    rows, columns = np.tril_indices(n)
    masses[:, rows, columns] = packed
    return masses


def _file_of(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _arrays(path: Path) -> dict[str, np.ndarray] | None:
    """What a file holds; None if there is none, or one that a dying process left unfinished."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (FileNotFoundError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    except OSError as error:
        raise ArgumentError(
            "what an earlier run measured cannot be read", got=f"{path}: {error.strerror}"
        ) from error
