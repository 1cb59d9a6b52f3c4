"""Every second of a run is counted once, whatever crashes and however the clocks jump."""

import errno
import os
import warnings

import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st

from xsake.errors import ArgumentError
from xsake.observability import goodput
from xsake.observability.goodput import GoodputRecorder, read_goodput


class Clocks:
    """Time that passes when told to: one clock that never jumps, and one on the wall."""

    def __init__(self):
        self.steady, self.wall = 100.0, 1e9

    def take(self, seconds):
        self.steady += seconds
        self.wall += seconds

    def recorder(self, path):
        return GoodputRecorder(path, clock=lambda: self.steady, wall_clock=lambda: self.wall)


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "goodput.jsonl"


def walk(recorder, clocks, steps, seconds=2.0):
    for number in steps:
        with recorder.step(number):
            clocks.take(seconds)


def test_waiting_for_the_last_step_is_a_part_of_it_and_no_step_of_its_own(clocks, path):
    with clocks.recorder(path) as recorder:
        walk(recorder, clocks, range(3))
        with recorder.rest_of_step():
            clocks.take(5)
    assert read_goodput(path).seconds["step"] == pytest.approx(3 * 2 + 5)
    with clocks.recorder(path) as recorder:
        walk(recorder, clocks, [2])
        with recorder.rest_of_step():
            clocks.take(4)
    found = read_goodput(path)
    assert found.seconds["recompute"] == pytest.approx(2 + 4) and found.lost_steps == 1


def test_every_kind_gets_its_seconds(clocks, path):
    with clocks.recorder(path) as recorder:
        clocks.take(5)  # init
        with recorder.during("restore"):
            clocks.take(3)
        for number in (1, 2):
            with recorder.during("data"):
                clocks.take(0.5)
            with recorder.step(number):
                clocks.take(4)
            clocks.take(0.25)  # other
        with recorder.during("save"):
            clocks.take(1)
        with recorder.during("evaluation"):
            clocks.take(2)
    found = read_goodput(path)
    expected = {"init": 5, "restore": 3, "data": 1, "step": 8, "save": 1, "evaluation": 2}
    assert found.seconds == {**dict.fromkeys(goodput.MEANINGS, 0.0), **expected, "other": 0.5}
    assert found.total_seconds == 20.5
    assert found.share == pytest.approx(8 / 20.5)
    assert (found.attempts, found.last_step, found.lost_steps, found.unreadable) == (1, 2, 0, 0)


def test_what_interrupts_a_step_is_not_part_of_it(clocks, path):
    with clocks.recorder(path) as recorder, recorder.step(1):
        clocks.take(1)
        with recorder.during("evaluation"):
            clocks.take(10)
        clocks.take(1)
    assert read_goodput(path).seconds["step"] == 2
    assert read_goodput(path).seconds["evaluation"] == 10


def test_steps_that_were_lost_are_recomputed_and_the_pause_is_idle(clocks, path):
    walk(clocks.recorder(path), clocks, range(1, 8))  # killed: nobody closes it
    clocks.take(30)
    with clocks.recorder(path) as recorder:
        walk(recorder, clocks, range(5, 11), seconds=3)
    found = read_goodput(path)
    assert found.seconds["step"] == 7 * 2 + 3 * 3
    assert found.seconds["recompute"] == 3 * 3
    assert found.seconds["idle"] == 30
    assert (found.attempts, found.last_step, found.lost_steps) == (2, 10, 3)


def test_steps_lost_twice_count_twice(clocks, path):
    for first in (1, 3, 3):
        walk(clocks.recorder(path), clocks, range(first, 6))
    assert read_goodput(path).lost_steps == 6


def test_a_step_that_fails_is_not_done(clocks, path):
    recorder = clocks.recorder(path)
    with pytest.raises(ZeroDivisionError), recorder, recorder.step(1):
        clocks.take(1)
        _ = 1 / 0
    assert read_goodput(path).last_step is None
    assert read_goodput(path).seconds["step"] == 1


def test_a_crash_costs_a_second_at_most(clocks, path):
    walk(clocks.recorder(path), clocks, range(1, 1000), seconds=0.01)
    assert read_goodput(path).seconds["step"] == pytest.approx(9.99, abs=1.02)
    assert len(path.read_bytes().splitlines()) < 15


def test_a_clock_that_jumps_back_between_lives_gives_no_time(clocks, path):
    walk(clocks.recorder(path), clocks, [1])
    clocks.wall -= 1e6
    walk(clocks.recorder(path), clocks, [2])
    found = read_goodput(path)
    assert found.seconds["idle"] == 0
    assert found.total_seconds == 4


def test_a_wall_clock_that_jumps_within_a_life_changes_nothing(clocks, path):
    recorder = clocks.recorder(path)
    walk(recorder, clocks, [1])
    clocks.wall += 3600
    walk(recorder, clocks, [2])
    clocks.take(7)
    walk(clocks.recorder(path), clocks, [3])
    assert read_goodput(path).total_seconds == 13


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["data", "save", "step", "restart", "nothing", "inside"]),
            st.floats(0, 1e4),
            st.floats(-1e7, 1e7),
        ),
        max_size=30,
    )
)
def test_nothing_is_counted_twice_or_forgotten_or_negative(tmp_path_factory, events):
    path = tmp_path_factory.mktemp("runs") / "goodput.jsonl"
    clocks = Clocks()
    recorder, lived, number = clocks.recorder(path), 0.0, 0
    for what, seconds, jump in events:
        clocks.wall += jump
        if what == "restart":
            recorder.close()
            clocks.take(seconds)
            recorder = clocks.recorder(path)
            continue
        lived += seconds
        if what == "nothing":
            clocks.take(seconds)
        elif what == "step":
            number += 1
            walk(recorder, clocks, [number], seconds)
        else:
            with recorder.during("data" if what == "inside" else what):
                clocks.take(seconds / 2)
                with recorder.during("evaluation" if what == "inside" else what):
                    clocks.take(seconds / 2)
    recorder.close()
    found = read_goodput(path)
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert found.total_seconds - found.seconds["idle"] == pytest.approx(lived, abs=1e-3)
    assert 0 <= found.share <= 1
    assert (found.lost_steps, found.last_step) == (0, number or None)


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_costs_only_itself(clocks, path, cut):
    walk(clocks.recorder(path), clocks, [1, 2])
    path.write_bytes(path.read_bytes()[:-cut])
    walk(clocks.recorder(path), clocks, [2, 3])
    found = read_goodput(path)
    assert (found.attempts, found.last_step, found.lost_steps) == (2, 3, 0)
    assert found.unreadable == 1
    assert found.seconds["step"] == 6


def test_lines_of_anything_else_do_not_count(clocks, path):
    walk(clocks.recorder(path), clocks, [1])
    with path.open("ab") as file:
        file.write(b'{"life": "goes on", "wall": 1.0, "seconds": {"step": -5.0}}\n')
        file.write(b'{"life": "goes on", "wall": 1.0, "seconds": {"step": 1e999}}\n')
        file.write(b"\0" * 10_000 + b"\n")
    found = read_goodput(path)
    assert found.seconds["step"] == 2
    assert found.unreadable >= 3


def test_a_full_disk_stops_nothing_and_what_was_spent_is_written_later(clocks, path):
    recorder = clocks.recorder(path)
    kept = path.rename(path.with_suffix(".kept"))
    path.symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning, match=os.strerror(errno.ENOSPC)):
        walk(recorder, clocks, [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        walk(recorder, clocks, [2])
    kept.replace(path)
    walk(recorder, clocks, [3])
    recorder.close()
    assert read_goodput(path).seconds["step"] == 6


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot write goodput"):
        GoodputRecorder(tmp_path / "file" / "goodput.jsonl")


def test_without_a_path_nothing_is_written(clocks, tmp_path):
    with clocks.recorder(None) as recorder:
        walk(recorder, clocks, [1, 2])
    assert not list(tmp_path.iterdir())


def test_a_kind_that_does_not_exist_is_refused(clocks, path):
    recorder = clocks.recorder(path)
    with pytest.raises(Exception, match="lunch"), recorder.during("lunch"):
        pass
    recorder.close()


@pytest.mark.parametrize("content", [None, b"", b"no json\n"])
def test_a_file_of_no_life_is_refused(path, content):
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match="cannot read goodput|no attempt"):
        read_goodput(path)


def test_a_life_that_has_only_begun_has_no_share(clocks, path):
    clocks.recorder(path)
    assert (read_goodput(path).share, read_goodput(path).total_seconds) == (0.0, 0.0)


def test_the_table_tells_the_share_and_every_kind(clocks, path):
    walk(clocks.recorder(path), clocks, [1, 2])
    path.write_bytes(path.read_bytes() + b"torn")
    walk(clocks.recorder(path), clocks, [2])
    console = rich.console.Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(goodput.goodput_table(read_goodput(path)))
    console.file.close()
    text = console.export_text()
    assert "Goodput 66.7%: step 2, attempts: 2, lost steps: 1" in text
    assert all(f" {kind} " in text for kind in goodput.MEANINGS)
    assert "truncated lines: 1" in text
