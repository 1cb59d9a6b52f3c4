"""Safe access to a checkpoint directory: validated regular files, and no pickles."""

import contextlib
import dataclasses
import math
import re
import reprlib
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from xsake import _json
from xsake.errors import CheckpointError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_CONFIG_BYTES, MAX_INDEX_BYTES = 2**20, 2**26
MAX_HEADER_BYTES = 2**25  # 100,000 tensors
MAX_DIMENSIONS = 8
MAX_VALUES = 2**20  # a safetensors header has about 9 per tensor
READABLE = ("F32", "F16", "BF16", "F64")

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_COPY_AGAIN = "copy or download the file again"
_CONVERT = (
    "convert it once, if you trust it: transformers' "
    "AutoModelForCausalLM.from_pretrained(directory).save_pretrained(other) writes safetensors"
)


def parse_object(
    data: bytes, name: str, *, max_bytes: int, max_values: int = MAX_VALUES
) -> dict[str, Any]:
    """Parse a JSON object of a checkpoint.

    Args:
        data: UTF-8.
        name: of the file, for messages.
        max_bytes: of the data.
        max_values: arrays, objects and strings, and likewise commas.
    """
    return _json.loads(
        data,
        what=f"valid JSON: {name}",
        max_bytes=max_bytes,
        max_containers=max_values,
        max_keys=None,
        error_type=CheckpointError,
    )


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Header entry of a tensor; its data is not read yet."""

    name: str
    file: str
    dtype: str  # safetensors name
    shape: tuple[int, ...]


TensorReader = Callable[[StoredTensor], np.ndarray]


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoint directory; only regular files inside it are read.

    Args:
        path: resolved path.
    """

    path: Path

    @classmethod
    def open(cls, directory: str | Path) -> "CheckpointFolder":
        """Open an existing directory."""
        path = Path(directory)
        if path.is_dir():
            return cls(path.resolve())
        if path.suffix in _PICKLES:
            raise _pickle_error(path.name)
        raise CheckpointError(
            "the checkpoint directory does not exist",
            got=repr(str(directory)),
            expected=f"a directory with {CONFIG} and {WEIGHTS} or {INDEX}",
            fix="pass the directory, not a file in it or a model name of a hub",
        )

    def has(self, name: str) -> bool:
        """Whether a file of this name exists, broken links included."""
        return (self.path / name).exists() or (self.path / name).is_symlink()

    def file(self, name: str) -> Path:
        """Return the path of a regular file after validation."""
        if not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                "invalid file name",
                got=repr(name)[:120],
                expected="letters, digits, '.', '-' and '_'; no subdirectories",
                fix="do not use this checkpoint unless you trust its source",
            )
        path = self.path / name
        if path.is_symlink() and not _resolve(path).is_relative_to(self.path):
            raise CheckpointError(
                f"{name} is a link to a file outside of the checkpoint directory",
                got=f"{name} -> {str(path.readlink())!r}",
                expected="files inside the directory",
                fix="copy the directory with `cp -rL from to` and load the copy; the Hugging Face "
                "cache consists of such links",
            )
        if not path.exists():
            raise CheckpointError(
                f"{name} is missing from the checkpoint",
                got=f"the directory has {self._listing()}",
                expected=name,
                fix="complete the download, with all files of the checkpoint in one directory",
            )
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(
                f"{name} is not a regular file",
                got=stat.filemode(path.stat().st_mode),
                expected="a regular file",
                fix="replace it by a regular file",
            )
        return _resolve(path)

    def json(self, name: str, *, max_bytes: int) -> dict[str, Any]:
        """Read a JSON object; duplicate keys, NaN and more than `max_bytes` are rejected."""
        path = self.file(name)
        if path.stat().st_size > max_bytes:
            raise CheckpointError(
                f"{name} is too large",
                got=f"{path.stat().st_size} bytes",
                expected=f"at most {max_bytes}",
                fix=_COPY_AGAIN,
            )
        return parse_object(path.read_bytes(), name, max_bytes=max_bytes)

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the header entries of all tensors by name."""
        if self.has(INDEX) and self.has(WEIGHTS):
            raise CheckpointError(
                "the checkpoint has both a single file and an index",
                got=f"both {WEIGHTS} and {INDEX}",
                expected="one of them",
                fix=f"remove the stale one; {INDEX} belongs to the files it lists",
            )
        if self.has(INDEX):
            return self._read_index()
        if self.has(WEIGHTS):
            return {tensor.name: tensor for tensor in self._read_header(WEIGHTS)}
        pickles = sorted(x.name for x in self.path.iterdir() if x.suffix in _PICKLES)
        if pickles:
            raise _pickle_error(", ".join(pickles[:5]))
        raise CheckpointError(
            "the directory has no weights",
            got=f"the directory has {self._listing()}",
            expected=f"{WEIGHTS}, or {INDEX} and the files it lists",
            fix=f"save the model as safetensors; a single file must be named {WEIGHTS}",
        )

    @contextlib.contextmanager
    def open_reader(self) -> Iterator[TensorReader]:
        """Yield a function that reads a tensor; files stay open until the block ends."""
        with contextlib.ExitStack() as stack:
            opened: dict[str, Any] = {}

            def read(tensor: StoredTensor) -> np.ndarray:
                try:
                    if tensor.file not in opened:
                        file = safe_open(self.file(tensor.file), framework="numpy")
                        opened[tensor.file] = stack.enter_context(file)
                    return opened[tensor.file].get_tensor(tensor.name)
                except (SafetensorError, OSError) as broken:
                    raise _corrupt_error(tensor.file, f"{tensor.name}: {broken}") from broken

            yield read

    def _read_index(self) -> dict[str, StoredTensor]:
        weight_map = self.json(INDEX, max_bytes=MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{INDEX} has no valid weight_map",
                got=f"weight_map: {type(weight_map).__name__}",
                expected="an object from tensor names to file names",
                fix=_COPY_AGAIN,
            )
        for name, file in weight_map.items():
            if isinstance(file, str) and file.endswith(_PICKLES):
                raise _pickle_error(f"{INDEX}: {name!r} is in {file!r}"[:300])
            if not (isinstance(file, str) and file.endswith(".safetensors")):
                raise CheckpointError(
                    f"{INDEX} has an entry that is not a safetensors file",
                    got=f"{name!r}: {file!r}"[:300],
                    expected="the name of a *.safetensors file of the directory",
                    fix="correct weight_map, or save the checkpoint again",
                )
        tensors: dict[str, StoredTensor] = {}
        for file in sorted(set(weight_map.values())):
            for tensor in self._read_header(file):
                if tensor.name in tensors:
                    raise CheckpointError(
                        "a tensor is stored twice",
                        got=f"{tensor.name} in {tensors[tensor.name].file} and in {file}",
                        expected="every tensor in one file",
                        fix="remove the files that belong to another version of the model",
                    )
                tensors[tensor.name] = tensor
        indexed = {(name, file) for name, file in weight_map.items()}
        stored = {(tensor.name, tensor.file) for tensor in tensors.values()}
        if indexed != stored:
            name, file = min(indexed ^ stored)
            is_indexed = (name, file) in indexed
            raise CheckpointError(
                f"{INDEX} and the files it lists disagree",
                got=f"{name!r} is {'not in' if is_indexed else 'in'} {file}",
                expected=f"{INDEX} has it {'there' if is_indexed else 'elsewhere or nowhere'}",
                fix="use the index and all files of the same version of the model",
            )
        return tensors

    def _read_header(self, file: str) -> list[StoredTensor]:
        """Read the header of one file and check that the data of all tensors is present."""
        path = self.file(file)
        size = path.stat().st_size
        with path.open("rb") as opened:
            start = opened.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise _corrupt_error(file, _describe_header(start, size, length))
            header = parse_object(opened.read(length), file, max_bytes=MAX_HEADER_BYTES)
        header.pop("__metadata__", None)
        tensors = [_parse_entry(file, name, entry) for name, entry in header.items()]
        for tensor, end in tensors:
            if end > size - 8 - length:
                raise CheckpointError(
                    f"{file} is truncated",
                    got=f"{tensor.name} ends at byte {8 + length + end}, the file at {size}",
                    expected="a file with the data of all tensors",
                    fix=_COPY_AGAIN,
                )
        used = max((end for _, end in tensors), default=0)
        if used < size - 8 - length:
            raise _corrupt_error(file, f"{size - 8 - length - used} unused bytes")
        try:
            # Checks of the library: no holes, no overlaps, no trailing data.
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as broken:
            raise _corrupt_error(file, str(broken)) from broken
        return [tensor for tensor, _ in tensors]

    def _listing(self) -> str:
        names = sorted(ascii(path.name)[1:-1] for path in self.path.iterdir())
        return (", ".join(names[:12]) or "no files") + (", ..." if len(names) > 12 else "")


def _parse_entry(file: str, name: str, entry: Any) -> tuple[StoredTensor, int]:
    """Parse a header entry; return the tensor and the end of its data."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, end]} if (
            len(shape) <= MAX_DIMENSIONS
        ):
            counts = (*shape, start, end)
            # Names are printed, so control characters are rejected.
            if name.isprintable() and all(type(x) is int and 0 <= x < 2**63 for x in counts):
                if dtype in _BYTES and math.prod(shape) * _BYTES[dtype] != end - start:
                    raise _corrupt_error(file, f"{name}: {dtype} {shape} in {end - start} bytes")
                return StoredTensor(name, file, dtype, tuple(shape)), end
    raise _corrupt_error(file, f"{name[:100]!r} has the invalid entry {reprlib.repr(entry)}")


def _describe_header(start: bytes, size: int, length: int) -> str:
    if start[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return "the file is a pickle; pickles are not supported"
    return f"a header of {length} bytes in a file of {size}"


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as broken:
        raise CheckpointError(
            f"{path.name} is a broken link",
            got=str(broken)[:200],
            expected="a regular file",
            fix="replace it by a regular file",
        ) from broken


def _corrupt_error(file: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not a valid safetensors file",
        got=got[:300],
        expected="a header and the data of all tensors",
        fix=_COPY_AGAIN,
    )


def _pickle_error(got: str) -> CheckpointError:
    return CheckpointError(
        "pickled weights are not supported, as loading a pickle executes code",
        got=got,
        expected=f"{WEIGHTS}, or {INDEX} and the files it lists",
        fix=_CONVERT,
    )
