"""Masks as people type them: what is understood, and that nothing else gets through."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.masks import examples
from xsake.errors import MaskError
from xsake.masks import AbstractMask, BigBird, Causal, Sinks, Window, parse

NAMES = ["causal", "full", "window", "sinks", "chunked", "strided", "random", "bigbird", "Or"]
WORDS = [*NAMES, "left", "count", "None", "not", "and", "lambda", "import", "0", "7", "1.5", "9e99"]
MARKS = ["(", ")", "[", "]", "{", "}", ",", "=", "&", "|", "~", "-", "**", ".", ":", " ", "'", "\\"]


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", Causal()),
        ("  CAUSAL() ", Causal()),
        ("window(left=1023, right=0) | sinks(4)", Window(1023, 0) | Sinks(4)),
        ("causal & window(7, 0) | sinks(4)", (Causal() & Window(7, 0)) | Sinks(4)),
        ("causal & (window(7, None) | sinks(4))", Causal() & (Window(7, None) | Sinks(4))),
        ("~sinks(count=2)", ~Sinks(2)),
        ("bigbird(1, 2, keep=1, cell=8)", BigBird(1, 2, 1.0, cell=8)),
    ],
)
def test_it_means_what_python_would_mean(text, mask):
    assert parse(text) == mask


@given(mask=examples.formulas() | st.builds(lambda a, b, c: a & ~b | c, *[examples.formulas()] * 3))
def test_what_a_mask_prints_is_read_back(mask):
    assert parse(repr(mask)) == mask


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid mask expression"),
        ("causal &", "invalid mask expression"),
        ("causal\nfull", "invalid mask expression"),
        ("sinks(\0)", "invalid mask expression"),
        ("cosal", "one of bigbird, causal"),
        ("abstractmask", "unknown mask name"),
        ("explicit(1)", "unknown mask name"),
        ("from_dict(1)", "unknown mask name"),
        ("__import__('os')", "not a number"),
        ("causal.heads", "not a mask"),
        ("causal()()", "not a mask"),
        ("[causal for x in y]", "not a mask"),
        ("causal + full", "not a mask"),
        ("causal and full", "& for and"),
        ("not causal", "& for and"),
        ("window(3)", r"(?s)'right'.*window\(left, right\)"),
        ("sinks(1, count=1)", "multiple values"),
        ("sinks(count=1, count=2)", "duplicate keyword"),
        ("sinks(*causal)", "not a number"),
        ("sinks(**causal)", "not a number"),
        ("sinks(2**9**9)", "not a number"),
        ("sinks(-1)", "number >= 0"),
        ("sinks(True)", "not a number"),
        ("sinks(1.5)", "parameter's type"),
        ("random(2)", "a number in 0..1"),
        ("sinks(99999999999999999999)", "an integer in"),
        ("~" * 500 + "causal", "nested too deeply"),
        ("(" * 300 + "causal" + ")" * 300, "invalid mask expression"),
        ("causal" + " | causal" * 1000, "too long"),
    ],
)
def test_invalid_expressions_are_rejected_with_the_reason(text, message):
    with pytest.raises(MaskError, match=message):
        parse(text)


@given(text=st.text(max_size=60) | st.lists(st.sampled_from(WORDS + MARKS)).map("".join))
def test_any_text_gives_a_mask_or_a_mask_error(text):
    with contextlib.suppress(MaskError):
        assert isinstance(parse(text), AbstractMask)
