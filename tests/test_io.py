"""Files: atomic replacement, and logs that survive a crash in the middle of an append."""

import json
import os

import hypothesis
import hypothesis.strategies as st
import pytest

from xsake import _io, _json
from xsake.errors import ArgumentError, CheckpointError

LINES = [json.dumps({"number": number}) for number in range(4)]


@hypothesis.given(st.data())
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_a_log_cut_anywhere_loses_its_last_line_only(tmp_path, data):
    path = tmp_path / "log.jsonl"
    path.unlink(missing_ok=True)
    _io.JsonlLog(path).append(*LINES[:3])
    whole = path.read_bytes()
    begin = whole.rindex(b"\n", 0, -1) + 1
    cut = data.draw(st.integers(begin, len(whole) - 1))
    os.truncate(path, cut)
    _io.JsonlLog(path).append(LINES[3])
    parsed = []
    for line in path.read_bytes().split(b"\n"):
        try:
            parsed.append(json.loads(line)["number"])
        except ValueError:
            continue
    assert parsed == [0, 1, 3]


def test_a_line_can_be_appended_again_after_a_full_disk(tmp_path):
    path = tmp_path / "log.jsonl"
    path.symlink_to("/dev/full")
    log = _io.JsonlLog(path)
    with pytest.raises(OSError):
        log.append(LINES[0])
    path.unlink()
    log.append(LINES[0], sync=True)
    assert LINES[0] in path.read_text().splitlines()


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    _io.atomic_write(path, "old")
    monkeypatch.setattr(_io.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        _io.atomic_write(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[1]", "not an object"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": NaN}', "not a finite number"),
        (b'{"a": 1e999}', "not a finite number"),
        (b'{"a": ' + b"[" * 17 + b"]" * 17 + b"}", "deep"),
        (b'{"a": "' + b"x" * 200 + b'"}', "more than 100 bytes"),
        (b'{"a": [1, 2, 3, 4, 5, 6]}', "more than 4 values"),
        (b"\xff", "utf-8"),
    ],
)
def test_an_object_outside_the_limits_is_an_error_of_the_given_type(text, words):
    with pytest.raises(CheckpointError, match="the file is not a test") as caught:
        _json.loads(
            text, what="a test", max_bytes=100, max_containers=30, max_values=4,
            error_type=CheckpointError,
        )  # fmt: skip
    assert words in caught.value.got


def test_a_file_that_could_not_be_read_back_is_not_written(tmp_path):
    with pytest.raises(ArgumentError, match="XSK-102.file-too-large-to-write"):
        _json.write(tmp_path / "file", "x" * 11, max_bytes=10)
    assert not any(tmp_path.iterdir())
