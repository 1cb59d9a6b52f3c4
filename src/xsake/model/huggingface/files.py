"""Safe access to a checkpoint directory: validated regular files, and no pickles."""

import contextlib
import dataclasses
import math
import re
import reprlib
import stat
from collections.abc import Iterator
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

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PICKLE_STARTS = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_COPY_AGAIN = "copy or download the file again"
_REPLACE = "replace it by a regular file"


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
        data, what=f"valid JSON: {name}", max_bytes=max_bytes, max_containers=max_values,
        max_keys=None, error_type=CheckpointError,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Header entry of a tensor in an open file."""

    name: str
    file: str
    dtype: str  # safetensors name
    shape: tuple[int, ...]
    opened: Any  # of safetensors.safe_open

    def read(self) -> np.ndarray:
        """Read the data."""
        try:
            return self.opened.get_tensor(self.name)
        except (SafetensorError, OSError) as broken:
            raise _corrupt_error(self.file, f"{self.name}: {broken}") from broken


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoint directory; only regular files inside it are read."""

    path: Path  # resolved path

    @classmethod
    def open(cls, directory: str | Path) -> "CheckpointFolder":
        """Open an existing directory."""
        path = Path(directory)
        if path.is_dir():
            return cls(path.resolve())
        if path.suffix in _PICKLES:
            raise _pickle_error(path.name)
        raise CheckpointError(
            "no-directory", "the checkpoint directory does not exist", got=repr(str(directory)),
            expected=f"a directory with {CONFIG} and {WEIGHTS} or {INDEX}",
            fix="pass the directory, not a file in it or a model name of a hub",
        )  # fmt: skip

    def has(self, name: str) -> bool:
        """Whether a file of this name exists, broken links included."""
        return (self.path / name).exists() or (self.path / name).is_symlink()

    def file(self, name: str) -> Path:
        """Return the path of a regular file after validation."""
        if not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                "file-name", "invalid file name", got=repr(name)[:120],
                expected="letters, digits, '.', '-' and '_'; no subdirectories",
                fix="do not use this checkpoint unless you trust its source",
            )  # fmt: skip
        path = self.path / name
        try:
            resolved = path.resolve()
            mode = path.stat().st_mode if path.exists() else None
        except (OSError, RuntimeError) as broken:
            raise CheckpointError(
                "broken-link", f"{name} is a broken link",
                got=str(broken)[:200], expected="a regular file",
                fix=_REPLACE,
            ) from broken  # fmt: skip
        if path.is_symlink() and not resolved.is_relative_to(self.path):
            raise CheckpointError(
                "outside-link", f"{name} is a link to a file outside of the checkpoint directory",
                got=f"{name} -> {str(path.readlink())!r}", expected="files inside the directory",
                fix="copy the directory with `cp -rL from to` and load the copy; the Hugging Face "
                "cache consists of such links",
            )  # fmt: skip
        if mode is None:
            raise CheckpointError(
                "missing-file", f"{name} is missing from the checkpoint",
                got=self._listing(), expected=name,
                fix="complete the download, with all files of the checkpoint in one directory",
            )  # fmt: skip
        if not stat.S_ISREG(mode):
            raise CheckpointError(
                "not-regular", f"{name} is not a regular file", got=stat.filemode(mode),
                expected="a regular file", fix=_REPLACE,
            )  # fmt: skip
        return resolved

    def json(self, name: str, *, max_bytes: int) -> dict[str, Any]:
        """Read a JSON object; duplicate keys, NaN and more than `max_bytes` are rejected."""
        path = self.file(name)
        if (size := path.stat().st_size) > max_bytes:
            raise CheckpointError(
                "file-size", f"{name} is too large",
                got=f"{size} bytes", expected=f"at most {max_bytes}",
                fix=_COPY_AGAIN,
            )  # fmt: skip
        return parse_object(path.read_bytes(), name, max_bytes=max_bytes)

    @contextlib.contextmanager
    def open_tensors(self) -> Iterator[dict[str, StoredTensor]]:
        """Yield all tensors by name; files stay open until the block ends."""
        if self.has(INDEX) and self.has(WEIGHTS):
            raise CheckpointError(
                "single-and-index", "the checkpoint has both a single file and an index",
                got=f"both {WEIGHTS} and {INDEX}", expected="one of them",
                fix=f"remove the stale one; {INDEX} belongs to the files it lists",
            )  # fmt: skip
        with contextlib.ExitStack() as stack:
            if self.has(INDEX):
                yield self._open_indexed(stack)
            elif self.has(WEIGHTS):
                yield {tensor.name: tensor for tensor in self._open_file(WEIGHTS, stack)}
            else:
                pickles = sorted(x.name for x in self.path.iterdir() if x.suffix in _PICKLES)
                if pickles:
                    raise _pickle_error(", ".join(pickles[:5]))
                raise CheckpointError(
                    "no-weights", "the directory has no weights", got=self._listing(),
                    expected=f"{WEIGHTS}, or {INDEX} and the files it lists",
                    fix=f"save the model as safetensors; a single file must be named {WEIGHTS}",
                )  # fmt: skip

    def _open_indexed(self, stack: contextlib.ExitStack) -> dict[str, StoredTensor]:
        weight_map = self.json(INDEX, max_bytes=MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                "weight-map", f"{INDEX} has no valid weight_map",
                got=f"a {type(weight_map).__name__}",
                expected="an object from tensor names to file names", fix=_COPY_AGAIN,
            )  # fmt: skip
        for name, file in weight_map.items():
            if isinstance(file, str) and file.endswith(_PICKLES):
                raise _pickle_error(f"{INDEX}: {name!r} is in {file!r}"[:300])
            if not (isinstance(file, str) and file.endswith(".safetensors")):
                raise CheckpointError(
                    "index-entry", f"{INDEX} has an entry that is not a safetensors file",
                    got=f"{name!r}: {file!r}"[:300],
                    expected="the name of a *.safetensors file of the directory",
                    fix="correct weight_map, or save the checkpoint again",
                )  # fmt: skip
        tensors: dict[str, StoredTensor] = {}
        for file in sorted(set(weight_map.values())):
            for tensor in self._open_file(file, stack):
                if tensor.name in tensors:
                    raise CheckpointError(
                        "duplicate-tensor", "a tensor is stored twice",
                        got=f"{tensor.name} in {tensors[tensor.name].file} and in {file}",
                        expected="every tensor in one file",
                        fix="remove the files that belong to another version of the model",
                    )  # fmt: skip
                tensors[tensor.name] = tensor
        stored = {(tensor.name, tensor.file) for tensor in tensors.values()}
        if weight_map.items() != stored:
            name, file = min(weight_map.items() ^ stored)
            is_indexed = weight_map.get(name) == file
            raise CheckpointError(
                "index-files", f"{INDEX} and the files it lists disagree",
                got=f"{name!r} is {'not in' if is_indexed else 'in'} {file}",
                expected=f"{INDEX} has it {'there' if is_indexed else 'elsewhere or nowhere'}",
                fix="use the index and all files of the same version of the model",
            )  # fmt: skip
        return tensors

    def _open_file(self, file: str, stack: contextlib.ExitStack) -> list[StoredTensor]:
        """Parse the bounded header of a file, then open it: safetensors checks it for holes."""
        path = self.file(file)
        size = path.stat().st_size
        with path.open("rb") as opened:
            start = opened.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                header = f"a header of {length} bytes in a file of {size}"
                is_pickle = start[:2] in _PICKLE_STARTS
                pickle = "the file is a pickle; pickles are not supported"
                raise _corrupt_error(file, pickle if is_pickle else header)
            header = parse_object(opened.read(length), file, max_bytes=MAX_HEADER_BYTES)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            _check_entry(file, name, entry)
        last = max(header, key=lambda name: header[name]["data_offsets"][1], default=None)
        used = 0 if last is None else header[last]["data_offsets"][1]
        if used > size - 8 - length:
            raise CheckpointError(
                "truncated", f"{file} is truncated",
                got=f"{last} ends at byte {8 + length + used} of {size}",
                expected="a file with the data of all tensors", fix=_COPY_AGAIN,
            )  # fmt: skip
        if used < size - 8 - length:  # before the file is mapped
            raise _corrupt_error(file, f"{size - 8 - length - used} unused bytes")
        try:
            handle = stack.enter_context(safe_open(path, framework="numpy"))
        except (SafetensorError, OSError) as broken:
            raise _corrupt_error(file, str(broken)) from broken
        return [
            StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), handle)
            for name, entry in header.items()
        ]

    def _listing(self) -> str:
        names = sorted(ascii(path.name)[1:-1] for path in self.path.iterdir())
        listed = (", ".join(names[:12]) or "no files") + (", ..." if len(names) > 12 else "")
        return f"the directory has {listed}"


def _check_entry(file: str, name: str, entry: Any) -> None:
    """Check a header entry; names are printed, so control characters are rejected."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, end]} if (
            len(shape) <= MAX_DIMENSIONS
            and name.isprintable()
            and all(type(x) is int and 0 <= x < 2**63 for x in (*shape, start, end))
        ):
            if dtype in _BYTES and math.prod(shape) * _BYTES[dtype] != end - start:
                raise _corrupt_error(file, f"{name}: {dtype} {shape} in {end - start} bytes")
        case _:
            invalid = f"{name[:100]!r} has the invalid entry {reprlib.repr(entry)}"
            raise _corrupt_error(file, invalid)


def _corrupt_error(file: str, got: str) -> CheckpointError:
    return CheckpointError(
        "safetensors", f"{file} is not a valid safetensors file", got=got[:300],
        expected="a header and the data of all tensors", fix=_COPY_AGAIN,
    )  # fmt: skip


def _pickle_error(got: str) -> CheckpointError:
    return CheckpointError(
        "pickle", "pickled weights are not supported, as loading a pickle executes code", got=got,
        expected=f"{WEIGHTS}, or {INDEX} and the files it lists",
        fix="convert it once, if you trust it: transformers' AutoModelForCausalLM.from_pretrained"
        "(directory).save_pretrained(other) writes safetensors",
    )  # fmt: skip
