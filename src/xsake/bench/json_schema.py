"""JSON Schemas of pydantic types: the text of a schema file, and the command that writes it."""

import json
import sys
from pathlib import Path

from pydantic import BaseModel


def text_of(kind: type[BaseModel]) -> str:
    """The exact content of the schema file of a type, as the type is written.

    Args:
        kind: what the file describes.

    Returns:
        JSON with sorted keys, so that a file changes only when the type does.

    Example:
        >>> from pydantic import BaseModel
        >>> class Point(BaseModel):
        ...     x: int
        >>> '"x"' in text_of(Point)
        True
    """
    schema = kind.model_json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def write_by_command(name: str, text: str, arguments: list[str]) -> int:
    """What `python -m <module of a schema> FOLDER` does; returns its exit code.

    Args:
        name: of the file.
        text: of the file.
        arguments: of the command: the folder and nothing else.
    """
    if len(arguments) != 1:
        sys.stderr.write(f"one argument is needed: the folder that {name} is written to\n")
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return 0
