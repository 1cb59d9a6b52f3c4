"""Error messages quote files of strangers: nothing in them commands a terminal or floods it."""

import json

import pytest

from xsake.errors import MAX_PART_CHARS, PROSE, ArgumentError, escape_controls

HOSTILE = {
    "colour": "\x1b[31m",
    "title": "\x1b]0;pwned\x07",
    "c1 csi": "\x9b2J",
    "direction": "evil\u202egpj.exe",
    "isolate": "\u2066x\u2069",
    "separator": "a\u2028b",
    "return": "safe\rgone",
    "surrogate": "\udc80",
    "delete": "\x7f",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("part", ["what", "got", "expected", "fix"])
def test_no_part_of_a_message_holds_what_a_terminal_obeys(text, part):
    error = ArgumentError(**({"slug": "file", "what": "a file is wrong"} | {part: text}))
    assert all(line.isprintable() for line in str(error).split("\n"))
    assert getattr(error, part).isprintable()


def test_a_path_is_cleaned_like_text(tmp_path):
    assert (
        str(ArgumentError("no-file", "no such file", got=tmp_path / "\x1b[2J")).count("\\u001b[2J")
        == 1
    )


def test_a_quotation_cannot_pass_for_another_part_of_the_message():
    lines = str(ArgumentError("wrong", "wrong", got="x\n  fix:      rm -rf /", fix="none")).split(
        "\n"
    )
    assert [line for line in lines if line.startswith("  fix:")] == ["  fix:      none"]


def test_a_message_has_a_bounded_length():
    long = "key: unknown\n" * 10**6
    error = ArgumentError("long", long, got=long, expected=long, fix=long)
    assert len(str(error)) < 4 * (MAX_PART_CHARS + 20) and error.got.endswith("...")


def test_a_message_that_is_quoted_by_another_stays_the_same():
    first = ArgumentError("wrong", "wrong", got="\x1b[31m\na\nb" + "x" * 10**5)
    again = ArgumentError(first.slug, first.what, got=first.got)
    assert str(again) == str(first)


def test_running_text_keeps_its_lines_spaces_and_joiners():
    prose = "one\n\ttwo\u00a0three می\u200cخواهم 👩\u200d🔬\u3000end"
    assert escape_controls(prose, keep=PROSE) == prose
    assert escape_controls("\x1b[31m" + prose, keep=PROSE) == "\\u001b[31m" + prose


def test_json_text_stays_the_same_document():
    document = {"\x9b\U000e0001": '\u202e\x7f"\\'}
    text = escape_controls(json.dumps(document, ensure_ascii=False, indent=1), keep="\n")
    assert json.loads(text) == document and "\x9b" not in text
