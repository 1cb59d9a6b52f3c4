"""Error messages for invalid configurations: settings by name, with the nearest valid one."""

import difflib
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from xsake.errors import ArgumentError, XsakeError, escape_controls

MAX_PROBLEMS = 20  # in one message


def describe(error: ValidationError, config: type[BaseModel]) -> ArgumentError:
    """Return an error that lists all problems of a configuration by setting.

    Args:
        error: from pydantic.
        config: type of the whole configuration.
    """
    problems = error.errors(include_url=False)
    cause = problems[0].get("ctx", {}).get("error")
    if len(problems) == 1 and isinstance(cause, XsakeError):
        path = ".".join(map(str, problems[0]["loc"]))
        what = f"{path}: {cause.what}" if "." in path else cause.what
        return ArgumentError(what, got=cause.got, expected=cause.expected, fix=cause.fix)
    lines = [_describe_one(problem, config) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS:,} more")
    return ArgumentError("the configuration is not valid", got="\n".join(lines))


def _describe_one(problem: Any, config: type[BaseModel]) -> str:
    path = tuple(problem["loc"])
    name = escape_controls(".".join(map(str, path))[:200]) or "configuration"
    cause = problem.get("ctx", {}).get("error")
    match problem["type"]:
        case "extra_forbidden":
            return f"{name}: unknown setting{_suggest(path, config)}"
        case "missing":
            return f"{name}: is required"
        case "value_error" if isinstance(cause, XsakeError):
            return f"{name}: {cause.what} (got {cause.got}, expected {cause.expected})"
        case "value_error":
            return f"{name}: {cause}"
    return f"{name}: {problem['msg']}, not {_truncate(problem['input'])}"


def _suggest(path: tuple[Any, ...], config: type[BaseModel]) -> str:
    """Name the setting of a similar name in the section, or of the same name in another section."""
    *parents, last = path
    section: Any = config
    for step in parents:
        field = section.model_fields.get(step)
        types = [] if field is None else (field.annotation, *typing.get_args(field.annotation))
        section = next((k for k in types if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if section is None:
            return ""
    matches = difflib.get_close_matches(str(last)[:100], section.model_fields, n=1, cutoff=0.5)
    if matches:
        return f"; did you mean {'.'.join([*map(str, parents), matches[0]])}?"
    sections = config.model_fields.items()
    elsewhere = [
        name for name, field in sections if last in getattr(field.annotation, "model_fields", ())
    ]
    if elsewhere:
        return f"; did you mean {' or '.join(f'{name}.{last}' for name in elsewhere)}?"
    return f"; expected one of {', '.join(section.model_fields)}"


def _truncate(value: Any) -> str:
    text = str(value) if isinstance(value, Path) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
