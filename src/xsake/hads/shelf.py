"""Cache of measured block masses, in memory or as .npz files."""

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
    """Attention masses of a document; X: heads of all layers."""

    entropy: Float[np.ndarray, " X"]
    true: Float[np.ndarray, "X n n"]
    estimates: dict[str, Float[np.ndarray, "X n n"]]


class MassCache:
    """Cache of document masses by key, stored as the causal triangle in float16.

    Args:
        folder: of the files; None: in memory.
        overwrite: ignore existing files.
    """

    def __init__(self, folder: Path | None = None, *, overwrite: bool = False):
        self._folder, self._overwrite = folder, overwrite
        self._memory: dict[str, dict[str, np.ndarray]] = {}

    def __contains__(self, key: str) -> bool:
        if self._folder is None or self._overwrite:
            return key in self._memory
        return _load_arrays(self._path(key)) is not None

    def put(self, key: str, masses: DocumentMasses) -> None:
        """Store a document; the file is complete when this returns."""
        arrays = {"entropy": masses.entropy.astype(np.float32), "true": _pack(masses.true)}
        arrays |= {f"estimate {name}": _pack(m) for name, m in masses.estimates.items()}
        self._put(key, arrays)

    def get(self, key: str) -> DocumentMasses:
        """Return a stored document."""
        arrays = self._get(key)
        estimates = [name for name in arrays if name.startswith("estimate ")]
        return DocumentMasses(
            arrays["entropy"],
            _unpack(arrays["true"]),
            {name.removeprefix("estimate "): _unpack(arrays[name]) for name in estimates},
        )

    def put_effects(self, key: str, effects: dict[str, Float[np.ndarray, "X levels"]]) -> None:
        """Store the effects of a document, by selector."""
        self._put(key, {name: each.astype(np.float32) for name, each in effects.items()})

    def effects(self, key: str) -> dict[str, Float[np.ndarray, "X levels"]]:
        """Return stored effects."""
        return self._get(key)

    def _put(self, key: str, arrays: dict[str, np.ndarray]) -> None:
        if self._folder is None:
            self._memory[key] = arrays
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path(key), _npz_bytes(arrays))
        except OSError as error:
            raise ArgumentError(
                "cannot write the calibration cache",
                got=f"{self._folder}: {error.strerror}",
                expected="a writable folder",
                fix="choose another path with -o",
            ) from error

    def _get(self, key: str) -> dict[str, np.ndarray]:
        arrays = self._memory.get(key) if self._folder is None else _load_arrays(self._path(key))
        assert arrays is not None, "key not in the cache"
        return arrays

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


def _pack(masses: Float[np.ndarray, "X n n"]) -> np.ndarray:
    rows, columns = np.tril_indices(masses.shape[-1])
    return masses[:, rows, columns].astype(np.float16)


def _unpack(packed: np.ndarray) -> Float[np.ndarray, "X n n"]:
    n = int((np.sqrt(8 * packed.shape[-1] + 1) - 1) / 2 + 0.5)
    masses = np.zeros((len(packed), n, n), np.float32)
    rows, columns = np.tril_indices(n)
    masses[:, rows, columns] = packed
    return masses


def _npz_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _load_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file; None if it is missing or incomplete."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (FileNotFoundError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    except OSError as error:
        raise ArgumentError(
            "cannot read the calibration cache", got=f"{path}: {error.strerror}"
        ) from error
