"""Parse mask expressions such as `window(1023, 0) | sinks(4)` without executing them."""

import ast
import inspect
import warnings

from xsake.errors import MaskError
from xsake.masks.base import AbstractMask
from xsake.masks.patterns import PARAMETRIC
from xsake.masks.serialization import from_dict

MAX_CHARS, MAX_DEPTH = 2000, 100  # of the text, and of nested expressions
_GRAMMAR = "masks such as causal, window(left=1023, right=0) or sinks(4), combined by & | ~"


def parse(text: str) -> AbstractMask:
    """Parse a mask expression of one line; invalid text raises MaskError.

    Mask names are case-insensitive and take positional or keyword numbers. Operators are `&`, `|`,
    `~` and parentheses with Python's precedence. The repr of a parametric mask can be parsed back.

    Example:
        >>> from xsake.masks import parse
        >>> parse("causal & (window(left=1023, right=0) | sinks(4))")
        Causal() & (Window(left=1023, right=0) | Sinks(count=4))
    """
    if len(text) > MAX_CHARS:
        raise MaskError(
            "expression-length",
            "the expression is too long",
            got=f"{len(text)} characters",
            expected=f"at most {MAX_CHARS}",
            fix="serialize the mask with to_dict",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarnings on literals
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise _parse_error("expression", "invalid mask expression", text) from error
    return _parse_node(tree.body, text, 0)


def _parse_node(node: ast.expr, text: str, depth: int) -> AbstractMask:
    if depth > MAX_DEPTH:
        raise _parse_error(
            "expression-nesting",
            "the expression is nested too deeply",
            text,
            f"at most {MAX_DEPTH} levels",
        )
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _parse_node(left, text, depth + 1) & _parse_node(right, text, depth + 1)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _parse_node(left, text, depth + 1) | _parse_node(right, text, depth + 1)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_parse_node(operand, text, depth + 1)
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            operators = "& for and, | for or, ~ for not"
            raise _parse_error(
                "keyword-operator",
                "masks are combined by operators, not keywords",
                _source(node, text),
                operators,
            )
        case ast.Name(id=name):
            return _build_mask(name, (), {}, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            positional = tuple(_parse_number(argument, text) for argument in args)
            named = {str(keyword.arg): _parse_number(keyword.value, text) for keyword in keywords}
            if len(named) < len(keywords):
                raise _parse_error(
                    "duplicate-keyword", "duplicate keyword argument", _source(node, text)
                )
            return _build_mask(name, positional, named, _source(node, text))
    raise _parse_error("not-a-mask", "not a mask", _source(node, text))


def _build_mask(name: str, positional: tuple, named: dict, source: str) -> AbstractMask:
    """Build a mask by name; `from_dict` checks the numbers."""
    mask_types = {key.lower(): mask_type for key, mask_type in PARAMETRIC.items()}
    mask_type = mask_types.get(name.lower())
    if mask_type is None:
        options = ", ".join(sorted(mask_types))
        raise _parse_error("unknown-mask", "unknown mask name", name, f"one of {options}")
    signature = inspect.signature(mask_type)
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        expected = f"{name}{tuple(signature.parameters)}".replace("'", "").replace(",)", ")")
        raise _parse_error(
            "mask-arguments", f"invalid arguments of {name}: {error}", source, expected
        ) from error
    bound.apply_defaults()
    return from_dict({"mask": mask_type.__name__, **bound.arguments})


def _parse_number(node: ast.expr, text: str) -> int | float | None:
    """Return a literal number or None."""
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() | None as value):
            return value
    raise _parse_error(
        "not-a-number", "not a number", _source(node, text), "a number >= 0, or None"
    )


def _source(node: ast.expr, text: str) -> str:
    return ast.get_source_segment(text.strip(), node) or text


def _parse_error(slug: str, what: str, got: str, expected: str = _GRAMMAR) -> MaskError:
    got = got if len(got) <= 200 else f"{got[:200]}..."
    return MaskError(
        slug, what, got=got, expected=expected, fix="see xsake.masks for names and numbers"
    )
