"""Safe access to a checkpoint's directory: plain files inside it, whole, and nothing pickled."""

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
MAX_HEADER_BYTES = 2**25  # of 100,000 tensors; the largest models have as many, in many files
MAX_DIMENSIONS = 8
MAX_VALUES = 2**20  # a safetensors header has about 9 for each tensor
READABLE = ("F32", "F16", "BF16", "F64")

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_AGAIN = "copy or download the file again; it is not what was saved"
_CONVERT = (
    "convert it once, where you trust it: transformers' "
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
    """A tensor as its file's header describes it; nothing of it is read yet."""

    name: str
    file: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]


Read = Callable[[StoredTensor], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Folder:
    """A directory of which only regular files are read, and none outside it.

    Args:
        path: where it is, links resolved.
    """

    path: Path

    @classmethod
    def at(cls, directory: str | Path) -> "Folder":
        """The directory, which must exist."""
        path = Path(directory)
        if path.is_dir():
            return cls(path.resolve())
        if path.suffix in _PICKLES:
            raise _pickled(path.name)
        raise CheckpointError(
            "there is no such checkpoint directory",
            got=repr(str(directory)),
            expected=f"a directory with {CONFIG} and {WEIGHTS} or {INDEX}",
            fix="give the directory itself, not a file in it or the name of a model on a hub",
        )

    def has(self, name: str) -> bool:
        """Whether there is anything of this name, even a link to nowhere."""
        return (self.path / name).exists() or (self.path / name).is_symlink()

    def file(self, name: str) -> Path:
        """Where a regular file of this name is, after every check on it."""
        if not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                "a file's name is not a plain one",
                got=repr(name)[:120],
                expected="letters, digits, '.', '-' and '_': a file of the directory itself",
                fix="do not use this checkpoint unless you know who wrote such a name into it",
            )
        path = self.path / name
        if path.is_symlink() and not _resolved(path).is_relative_to(self.path):
            raise CheckpointError(
                f"{name} is a link that leaves the checkpoint's directory",
                got=f"{name} -> {str(path.readlink())!r}",
                expected="files inside the directory",
                fix="copy the directory with links followed (`cp -rL from to`) and load the copy; "
                "the Hugging Face cache consists of such links",
            )
        if not path.exists():
            raise CheckpointError(
                f"{name} is missing from the checkpoint",
                got=f"the directory has {self._listing()}",
                expected=name,
                fix="finish the download or copy, all files of the checkpoint into one directory",
            )
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(
                f"{name} is not a regular file",
                got=stat.filemode(path.stat().st_mode),
                expected="a regular file",
                fix="put the file itself there",
            )
        return _resolved(path)

    def json(self, name: str, *, max_bytes: int) -> dict[str, Any]:
        """The JSON object in a file: no duplicate keys, no NaN, no more than `max_bytes`."""
        path = self.file(name)
        if path.stat().st_size > max_bytes:
            raise CheckpointError(
                f"{name} is too large to be what its name says",
                got=f"{path.stat().st_size} bytes",
                expected=f"at most {max_bytes}",
                fix=_AGAIN,
            )
        return parse_object(path.read_bytes(), name, max_bytes=max_bytes)

    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of the checkpoint by name, each from exactly one whole file."""
        if self.has(INDEX) and self.has(WEIGHTS):
            raise CheckpointError(
                "the checkpoint says twice where its tensors are",
                got=f"both {WEIGHTS} and {INDEX}",
                expected="one of them",
                fix=f"remove the stale one; {INDEX} belongs to files named in it",
            )
        if self.has(INDEX):
            return self._sharded()
        if self.has(WEIGHTS):
            return {tensor.name: tensor for tensor in self._header(WEIGHTS)}
        pickles = sorted(x.name for x in self.path.iterdir() if x.suffix in _PICKLES)
        if pickles:
            raise _pickled(", ".join(pickles[:5]))
        raise CheckpointError(
            "the directory has no weights",
            got=f"the directory has {self._listing()}",
            expected=f"{WEIGHTS}, or {INDEX} and the files it names",
            fix=f"save the model as safetensors; a single file must be named {WEIGHTS}",
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[Read]:
        """A function that reads a tensor; files stay open until the block ends."""
        with contextlib.ExitStack() as stack:
            opened: dict[str, Any] = {}

            def read(tensor: StoredTensor) -> np.ndarray:
                try:
                    if tensor.file not in opened:
                        file = safe_open(self.file(tensor.file), framework="numpy")
                        opened[tensor.file] = stack.enter_context(file)
                    return opened[tensor.file].get_tensor(tensor.name)
                except (SafetensorError, OSError) as broken:
                    raise _corrupt(tensor.file, f"{tensor.name}: {broken}") from broken

            yield read

    def _sharded(self) -> dict[str, StoredTensor]:
        places = self.json(INDEX, max_bytes=MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(
                f"{INDEX} does not say which tensor is where",
                got=f"weight_map: {type(places).__name__}",
                expected="an object from tensor names to file names",
                fix=_AGAIN,
            )
        for name, file in places.items():
            if isinstance(file, str) and file.endswith(_PICKLES):
                raise _pickled(f"{INDEX}, which puts {name!r} into {file!r}"[:300])
            if not (isinstance(file, str) and file.endswith(".safetensors")):
                raise CheckpointError(
                    f"{INDEX} puts a tensor into something that is no safetensors file",
                    got=f"{name!r}: {file!r}"[:300],
                    expected="the name of a *.safetensors file of the directory",
                    fix="correct weight_map, or save the checkpoint again",
                )
        found: dict[str, StoredTensor] = {}
        for file in sorted(set(places.values())):
            for tensor in self._header(file):
                if tensor.name in found:
                    raise CheckpointError(
                        "a tensor is stored twice, and it is not said which one counts",
                        got=f"{tensor.name} in {found[tensor.name].file} and in {file}",
                        expected="every tensor in one file",
                        fix="remove the files that belong to another version of the model",
                    )
                found[tensor.name] = tensor
        told = {(name, file) for name, file in places.items()}
        seen = {(tensor.name, tensor.file) for tensor in found.values()}
        if told != seen:
            name, file = min(told ^ seen)
            is_told = (name, file) in told
            raise CheckpointError(
                f"{INDEX} and the files it names disagree",
                got=f"{name!r} is {'not in' if is_told else 'in'} {file}",
                expected=f"{INDEX} puts it {'there' if is_told else 'elsewhere or nowhere'}",
                fix="take the index and all files from the same version of the model",
            )
        return found

    def _header(self, file: str) -> list[StoredTensor]:
        """The tensors of one file, after making sure that all of each one's bytes are there."""
        path = self.file(file)
        size = path.stat().st_size
        with path.open("rb") as opened:
            start = opened.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise _corrupt(file, _look_of(start, size, length))
            header = parse_object(opened.read(length), file, max_bytes=MAX_HEADER_BYTES)
        header.pop("__metadata__", None)
        tensors = [_described(file, name, entry) for name, entry in header.items()]
        for tensor, end in tensors:
            if end > size - 8 - length:
                raise CheckpointError(
                    f"{file} is truncated",
                    got=f"{tensor.name} ends at byte {8 + length + end}, the file at {size}",
                    expected="a file with all of its tensors' bytes",
                    fix=_AGAIN,
                )
        used = max((end for _, end in tensors), default=0)
        if used < size - 8 - length:
            raise _corrupt(file, f"{size - 8 - length - used} bytes that belong to no tensor")
        try:
            # Its own checks on top: no holes, no overlaps, nothing after the last tensor.
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as broken:
            raise _corrupt(file, str(broken)) from broken
        return [tensor for tensor, _ in tensors]

    def _listing(self) -> str:
        names = sorted(ascii(path.name)[1:-1] for path in self.path.iterdir())
        return (", ".join(names[:12]) or "no files") + (", ..." if len(names) > 12 else "")


def _described(file: str, name: str, entry: Any) -> tuple[StoredTensor, int]:
    """A tensor from its entry in a header, and where its bytes end."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, end]} if (
            len(shape) <= MAX_DIMENSIONS
        ):
            counts = (*shape, start, end)
            # Names are printed, so they may not hold what a terminal obeys.
            if name.isprintable() and all(type(x) is int and 0 <= x < 2**63 for x in counts):
                if dtype in _BYTES and math.prod(shape) * _BYTES[dtype] != end - start:
                    raise _corrupt(file, f"{name}: {dtype} {shape} in {end - start} bytes")
                return StoredTensor(name, file, dtype, tuple(shape)), end
    raise _corrupt(file, f"{name[:100]!r} is described as {reprlib.repr(entry)}")


def _look_of(start: bytes, size: int, length: int) -> str:
    if start[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return "it begins like a pickle, whatever its name says; pickles are never read"
    return f"a header of {length} bytes in a file of {size}"


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as broken:
        raise CheckpointError(
            f"{path.name} is a link that leads nowhere",
            got=str(broken)[:200],
            expected="a regular file",
            fix="put the file itself there",
        ) from broken


def _corrupt(file: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not a sound safetensors file",
        got=got[:300],
        expected="what safetensors wrote: a header and the bytes of every tensor in it",
        fix=_AGAIN,
    )


def _pickled(got: str) -> CheckpointError:
    return CheckpointError(
        "the weights are pickled, and reading a pickle runs the code in it: safetensors only",
        got=got,
        expected=f"{WEIGHTS}, or {INDEX} and the files it names",
        fix=_CONVERT,
    )
