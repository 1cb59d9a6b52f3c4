"""Malformed input: JSON documents damaged at random, and arguments of other types."""

import contextlib
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from jaxtyping import TypeCheckError

from xsake.errors import ArgumentError

ODD = [0, -1, 2**31, 2**64, 10**400, 1e-308, 1e300, -0.0, "", "\ud800", "kl", "silu"]
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(ODD)
    | st.floats(allow_nan=True)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def damaged(draw, document: Any, keys: tuple[str, ...] = ()) -> Any:
    """Delete or replace a few values of a document, nested ones too, in place.

    Args:
        draw: of hypothesis.
        document: an object, fresh for each example.
        keys: that are set as well if the document does not have them.
    """
    for _ in range(draw(st.integers(0, 4))):
        place = document
        while True:
            known = sorted({*place, *keys}) if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(known))
            value = place.get(key) if isinstance(place, dict) else place[key]
            if not (isinstance(value, dict | list) and value and draw(st.booleans())):
                break
            place, keys = value, ()
        if isinstance(place, dict) and draw(st.integers(0, 3)) == 0:
            place.pop(key, None)
        else:
            place[key] = draw(JUNK)
    return document


@contextlib.contextmanager
def refused_type(match: str) -> Iterator[None]:
    """Expect an `ArgumentError` for an argument of another type than its annotation.

    Where all types are checked, the check comes first.
    """
    with pytest.raises((ArgumentError, TypeCheckError)) as found:
        yield
    if isinstance(found.value, ArgumentError):
        found.match(match)
