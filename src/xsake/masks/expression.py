"""Owns how masks are typed by hand: `window(1023, 0) | sinks(4)`; executes nothing of the text."""

import ast
import inspect
import warnings

from xsake.errors import MaskError
from xsake.masks.base import AbstractMask
from xsake.masks.description import from_dict
from xsake.masks.structured import AbstractStructured

LONGEST, DEEPEST = 2000, 100  # characters, and expressions inside expressions
_GRAMMAR = "formulas such as causal, window(left=1023, right=0) or sinks(4), joined by & | ~"


def parse(text: str) -> AbstractMask:
    """The mask that a person wrote; anything that is no mask raises MaskError.

    The formulas of this package by name, in any case, their numbers by place or by name, joined
    by `&`, `|`, `~` and parentheses as in Python: `&` binds more tightly than `|`. What Python
    prints for such a mask can be read back.

    Args:
        text: one line, such as "causal & window(left=1023, right=0) | sinks(4)".

    Returns:
        The mask.

    Example:
        >>> from xsake.masks import parse
        >>> parse("causal & (window(left=1023, right=0) | sinks(4))")
        Causal() & (Window(left=1023, right=0) | Sinks(count=4))
    """
    if len(text) > LONGEST:
        raise MaskError(
            "the expression is too long",
            got=f"{len(text)} characters",
            expected=f"at most {LONGEST}",
            fix="write the mask to a file with to_dict",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's remarks on odd literals are not for users
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise _refused("this is not an expression", text) from error
    return _mask(tree.body, text, 0)


def _mask(node: ast.expr, text: str, depth: int) -> AbstractMask:
    if depth > DEEPEST:
        raise _refused("the expression is nested too deeply", text, f"at most {DEEPEST} levels")
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left, text, depth + 1) & _mask(right, text, depth + 1)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left, text, depth + 1) | _mask(right, text, depth + 1)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand, text, depth + 1)
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            wanted = "& for and, | for or, ~ for not"
            raise _refused("masks are joined by symbols", _source(node, text), wanted)
        case ast.Name(id=name):
            return _formula(name, (), {}, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            places = tuple(_number(argument, text) for argument in args)
            names = {str(keyword.arg): _number(keyword.value, text) for keyword in keywords}
            if len(names) < len(keywords):
                raise _refused("a number is given twice", _source(node, text))
            return _formula(name, places, names, _source(node, text))
    raise _refused("this part is no mask", _source(node, text))


def _formula(name: str, places: tuple, names: dict, source: str) -> AbstractMask:
    """A formula by its name; `from_dict` checks the numbers."""
    kinds = _formulas()
    kind = kinds.get(name.lower())
    if kind is None:
        known = ", ".join(sorted(kinds))
        raise _refused("there is no formula of this name", name, f"one of {known}")
    signature = inspect.signature(kind)
    try:
        bound = signature.bind(*places, **names)
    except TypeError as error:
        expected = f"{name}{tuple(signature.parameters)}".replace("'", "").replace(",)", ")")
        raise _refused(f"{name} is given other numbers: {error}", source, expected) from error
    bound.apply_defaults()
    return from_dict({"mask": kind.__name__, **bound.arguments})


def _formulas() -> dict[str, type[AbstractMask]]:
    """The public formulas: what `xsake.masks` exports that is made of a few numbers alone."""
    from xsake import masks  # which imports this module

    public = {name.lower(): getattr(masks, name) for name in masks.__all__}
    return {
        name: kind
        for name, kind in public.items()
        if isinstance(kind, type) and issubclass(kind, AbstractStructured)
    }


def _number(node: ast.expr, text: str) -> int | float | None:
    """A literal number, or None where a limit may be absent."""
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() | None as value):
            return value
    raise _refused("this argument is no number", _source(node, text), "a number from 0 on, or None")


def _source(node: ast.expr, text: str) -> str:
    return ast.get_source_segment(text.strip(), node) or text


def _refused(what: str, got: str, expected: str = _GRAMMAR) -> MaskError:
    return MaskError(what, got=got if len(got) <= 200 else f"{got[:200]}...", expected=expected)
