"""Types of the files that XSAKE writes: a frozen pydantic base and bounded field types."""

import abc
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from xsake import _json
from xsake._io import require_local

Size = Annotated[int, Field(ge=1, le=2**24)]


class Frozen(BaseModel):
    """Immutable record without unknown fields and without non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def validate[Model: BaseModel](model: type[Model], document: dict[str, Any], *, what: str) -> Model:
    """Validate a parsed object; the error names the first field that does not fit.

    Args:
        model: type of the result.
        document: of JSON values.
        what: name of such a file, for messages.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _json.invalid_file(what, describe_first(error)) from error


class JsonDocument(Frozen, populate_by_name=True, serialize_by_alias=True):
    """Record that is saved as a JSON file, whose sizes are limited before it is parsed."""

    file_type: ClassVar[str]
    max_bytes: ClassVar[int]
    max_containers: ClassVar[int]

    @abc.abstractmethod
    def to_json(self) -> str:
        """Return the JSON text of the file."""

    @classmethod
    def from_json[Document: "JsonDocument"](cls: type[Document], data: bytes) -> Document:
        """Parse and validate a file."""
        document = _json.loads(
            data, what=cls.file_type, max_bytes=cls.max_bytes, max_containers=cls.max_containers,
            max_values=cls.max_bytes,
        )  # fmt: skip
        return validate(cls, document, what=cls.file_type)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        _json.write(path, self.to_json(), max_bytes=self.max_bytes)

    @classmethod
    def load[Document: "JsonDocument"](cls: type[Document], path: Path) -> Document:
        """Read a file."""
        return cls.from_json(_json.read(path, max_bytes=cls.max_bytes))


def describe_first(error: ValidationError) -> str:
    """Describe the first problem of a validation: its field and what is wrong with it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("letters that cannot be printed")
    return text


def _check_local(value: Any) -> Any:
    if isinstance(value, str | Path):
        require_local(value)
    return value


PRINTABLE = AfterValidator(_check_printable)
Count = Annotated[int, Field(ge=0, le=2**53, strict=True)]
Positive = Annotated[int, Field(ge=1, le=2**53, strict=True)]
Number = Annotated[float, Field(strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
Text = Annotated[str, Field(min_length=1, max_length=300), PRINTABLE]
LocalPath = Annotated[Path, BeforeValidator(_check_local)]
"""A path in a configuration, which `require_local` accepts."""
