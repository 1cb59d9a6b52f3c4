"""Prompts and outputs of generation as .jsonl files: one object a line, resumable."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from xsake import _json
from xsake._io import JsonlLog, atomic_write
from xsake._schema import Count, Frozen, Number, validate
from xsake.errors import ArgumentError

MAX_INPUT_BYTES = 2**30  # held in memory, as is the output
MAX_LINE_VALUES = 2**22

Id = str | int | None
_TORN = b"~\n"  # the end of a line that `JsonlLog` did not complete


def _check_unicode(text: str) -> str:
    if not text.isascii():
        text.encode()  # raises ValueError for a lone surrogate
    return text


_Text = Annotated[str, AfterValidator(_check_unicode)]


class ChatMessage(Frozen):
    """A message of a chat."""

    role: _Text
    content: _Text


class PromptLine(Frozen):
    """A line of an input file: a text, or the messages of a chat."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    id: Id = Field(default=None, description="copied to the output")
    prompt: _Text | None = None
    messages: tuple[ChatMessage, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _check_kind(self) -> "PromptLine":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is required")
        return self

    @property
    def dialog(self) -> list[tuple[str, str]] | None:
        """Roles and contents of the messages; None for a text."""
        if self.messages is None:
            return None
        return [(message.role, message.content) for message in self.messages]

    @property
    def content(self) -> str:
        """The text, or that of the last message."""
        return self.messages[-1].content if self.messages else self.prompt or ""


class OutputLine(Frozen):
    """A line of an output file: what was generated for one line of the input."""

    index: Count = Field(description="number of the input's line that is not blank, from 0")
    id: Id = None
    text: str = Field(description="up to a stop string")
    tokens: tuple[Count, ...] = Field(description="without the end token")
    logprobs: tuple[Number, ...] | None = None
    finish: Literal["end", "length", "stop"]
    job: str = Field(description="digest of the model, the prompts and the options")


def read_prompts(path: Path) -> tuple[PromptLine, ...]:
    """Read the lines of an input file that are not blank.

    Args:
        path: of the file, with an object like `{"prompt": "..."}` or
            `{"messages": [{"role": "user", "content": "..."}]}` in each line.

    Example:
        >>> import pathlib
        >>> from xsake.model.prompt_file import read_prompts
        >>> _ = pathlib.Path("in.jsonl").write_text('{"id": 7, "prompt": "Once"}\\n')
        >>> read_prompts(pathlib.Path("in.jsonl"))[0].prompt
        'Once'
    """
    data = _json.read(path, max_bytes=MAX_INPUT_BYTES)
    if len(data) > MAX_INPUT_BYTES:
        raise ArgumentError(
            "prompts-size", "the file of prompts is too large", got=path,
            expected=f"at most {MAX_INPUT_BYTES:,} bytes", fix="split it",
        )  # fmt: skip
    lines = tuple(
        _parse(line, PromptLine, f"a file of prompts ({path.name}, line {number})")
        for number, line in enumerate(data.split(b"\n"), start=1)
        if line.strip()
    )
    if not lines:
        raise ArgumentError(
            "prompts-empty", "the file has no prompt", got=path,
            expected='lines like {"prompt": "Once upon a time"}',
        )  # fmt: skip
    return lines


class OutputFile:
    """Outputs in a file that grows by a line with each of them, in order when all are there.

    A process that is killed loses no line that was added.

    Args:
        path: of the file; lines of an earlier run of the same job are kept.
        job: digest of all that the outputs depend on.
        total: number of outputs.
        overwrite: delete an existing file.
    """

    def __init__(self, path: Path, job: str, total: int, *, overwrite: bool = False):
        self._path, self._job, self._total = path, job, total
        self._log, self._lines = JsonlLog(path), dict[int, str]()
        if overwrite:
            path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if line.endswith(b"\n") and not line.endswith(_TORN):
                self._keep(line)

    @property
    def missing(self) -> list[int]:
        """Numbers of the outputs that are not there."""
        return [number for number in range(self._total) if number not in self._lines]

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: OutputLine) -> None:
        """Add an output; it is on the disk when this returns."""
        text = line.model_dump_json(exclude_none=True)
        self._log.append(text, sync=True)
        self._lines[line.index] = text

    def finish(self) -> None:
        """Bring the lines of a complete file in order."""
        text = "".join(f"{self._lines[number]}\n" for number in range(self._total))
        if text.encode() != self._path.read_bytes():
            atomic_write(self._path, text)

    def _keep(self, data: bytes) -> None:
        line = _parse(data, OutputLine, f"an output of `xsake generate` ({self._path.name})")
        if line.job != self._job or line.index >= self._total:
            raise ArgumentError(
                "output-job", "the output belongs to another job",
                got=f"{self._path}: line {line.index} of job {line.job[:16]}",
                expected=f"job {self._job[:16]}: the same model, input and options",
                fix="choose another --output, or replace this one with --no-resume",
            )  # fmt: skip
        self._lines[line.index] = data.decode().rstrip("\n")


def _parse[Line: Frozen](data: bytes, kind: type[Line], what: str) -> Line:
    document = _json.loads(
        data, what=what, max_bytes=MAX_INPUT_BYTES, max_containers=MAX_LINE_VALUES
    )
    return validate(kind, document, what=what)
