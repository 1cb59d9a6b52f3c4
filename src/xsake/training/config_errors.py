"""What is wrong with a configuration, in words: settings by name, with the nearest right one."""

import difflib
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from xsake.errors import ArgumentError, XsakeError, escape_controls

MAX_PROBLEMS = 20  # in one message


def describe(error: ValidationError, config: type[BaseModel]) -> ArgumentError:
    """Return an error that lists everything wrong with a configuration, by setting.

    Args:
        error: of the validation.
        config: the type of the whole configuration.
    """
    problems = error.errors(include_url=False)
    own = problems[0].get("ctx", {}).get("error")
    if len(problems) == 1 and isinstance(own, XsakeError):
        place = ".".join(map(str, problems[0]["loc"]))
        what = f"{place}: {own.what}" if "." in place else own.what
        return ArgumentError(what, got=own.got, expected=own.expected, fix=own.fix)
    lines = [_describe_one(problem, config) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS:,} more")
    return ArgumentError("the configuration cannot be used", got="\n".join(lines))


def _describe_one(problem: Any, config: type[BaseModel]) -> str:
    place = tuple(problem["loc"])
    name = escape_controls(".".join(map(str, place))[:200]) or "the whole"
    own = problem.get("ctx", {}).get("error")
    match problem["type"]:
        case "extra_forbidden":
            return f"{name}: there is no such setting{_suggest(place, config)}"
        case "missing":
            return f"{name}: is needed"
        case "value_error" if isinstance(own, XsakeError):
            return f"{name}: {own.what} (got {own.got}, expected {own.expected})"
        case "value_error":
            return f"{name}: {own}"
    return f"{name}: {problem['msg']}, not {_shown(problem['input'])}"


def _suggest(place: tuple[Any, ...], config: type[BaseModel]) -> str:
    """Name the setting of a similar name in the same section, or of the same name elsewhere."""
    *parents, last = place
    kind: Any = config
    for step in parents:
        field = kind.model_fields.get(step)
        kinds = [] if field is None else (field.annotation, *typing.get_args(field.annotation))
        kind = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if kind is None:
            return ""
    found = difflib.get_close_matches(str(last)[:100], kind.model_fields, n=1, cutoff=0.5)
    if found:
        return f"; the nearest is {'.'.join([*map(str, parents), found[0]])}"
    sections = config.model_fields.items()
    elsewhere = [
        name for name, field in sections if last in getattr(field.annotation, "model_fields", ())
    ]
    if elsewhere:
        return f"; there is {' and '.join(f'{name}.{last}' for name in elsewhere)}"
    return f"; there are {', '.join(kind.model_fields)}"


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, Path) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
