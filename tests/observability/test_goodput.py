"""Every second of a run is counted once, whatever crashes and however the clocks jump."""

import errno
import io
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
    """Time that passes on demand: one clock that never jumps, and one on the wall."""

    def __init__(self):
        self.steady, self.wall = 100.0, 1e9

    def take(self, seconds):
        self.steady += seconds
        self.wall += seconds

    def recorder(self, path):
        return GoodputRecorder(path, clock=lambda: self.steady, wall_clock=lambda: self.wall)

    def walk(self, recorder, steps, seconds=2.0):
        for number in steps:
            with recorder.step(number):
                self.take(seconds)

    def attempt(self, path, steps, seconds=2.0):
        """An attempt that is killed: it is never closed."""
        self.walk(self.recorder(path), steps, seconds)


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "goodput.jsonl"


def test_every_category_gets_its_seconds(clocks, path):
    with clocks.recorder(path) as recorder:
        clocks.take(5)  # init
        with recorder.during("restore"):
            clocks.take(3)
        for number in (1, 2):
            with recorder.during("data"):
                clocks.take(0.5)
            with recorder.step(number):
                clocks.take(3)
                with recorder.during("evaluation"):  # not a part of the step
                    clocks.take(1)
                clocks.take(1)
            clocks.take(0.25)  # other
        with recorder.during("save"):
            clocks.take(1)
    read = read_goodput(path)
    expected = {"init": 5, "restore": 3, "data": 1, "step": 8, "save": 1, "evaluation": 2}
    assert read.seconds == {**dict.fromkeys(goodput.MEANINGS, 0.0), **expected, "other": 0.5}
    assert read.total_seconds == 20.5 and read.share == pytest.approx(8 / 20.5)
    assert (read.attempts, read.last_step, read.lost_steps, read.unreadable) == (1, 2, 0, 0)


def test_waiting_for_the_last_step_is_a_part_of_it(clocks, path):
    for steps, category, seconds, lost in ((range(3), "step", 6 + 5, 0), ([2], "recompute", 7, 1)):
        with clocks.recorder(path) as recorder:
            clocks.walk(recorder, steps)
            with recorder.rest_of_step():
                clocks.take(5)
        read = read_goodput(path)
        assert read.seconds[category] == pytest.approx(seconds) and read.lost_steps == lost


def test_steps_that_were_lost_are_recomputed_and_the_pause_is_idle(clocks, path):
    clocks.attempt(path, range(1, 8))
    clocks.take(30)
    clocks.attempt(path, range(5, 11), seconds=3)
    read = read_goodput(path)
    assert (read.seconds["step"], read.seconds["recompute"]) == (7 * 2 + 3 * 3, 3 * 3)
    assert read.seconds["idle"] == 30
    assert (read.attempts, read.last_step, read.lost_steps) == (2, 10, 3)
    clocks.attempt(path, range(10, 11))
    assert read_goodput(path).lost_steps == 4


def test_a_step_that_fails_is_not_done(clocks, path):
    recorder = clocks.recorder(path)
    with pytest.raises(ZeroDivisionError), recorder, recorder.step(1):
        clocks.take(1)
        _ = 1 / 0
    assert read_goodput(path).last_step is None and read_goodput(path).seconds["step"] == 1


def test_a_crash_costs_a_second_at_most(clocks, path):
    clocks.attempt(path, range(1, 1000), seconds=0.01)
    assert read_goodput(path).seconds["step"] == pytest.approx(9.99, abs=1.02)
    assert len(path.read_bytes().splitlines()) < 15


@pytest.mark.parametrize(("within", "between", "idle"), [(0, -1e6, 0), (3600, 7, 7)])
def test_a_wall_clock_that_jumps_gives_no_time(clocks, path, within, between, idle):
    recorder = clocks.recorder(path)
    clocks.walk(recorder, [1])
    clocks.wall += within
    clocks.walk(recorder, [2])
    clocks.wall += between
    clocks.attempt(path, [3])
    read = read_goodput(path)
    assert (read.seconds["idle"], read.total_seconds) == (idle, 6 + idle)


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
    path, clocks = tmp_path_factory.mktemp("runs") / "goodput.jsonl", Clocks()
    recorder, spent, number = clocks.recorder(path), 0.0, 0
    for what, seconds, jump in events:
        clocks.wall += jump
        if what == "restart":
            recorder.close()
            clocks.take(seconds)
            recorder = clocks.recorder(path)
            continue
        spent += seconds
        if what == "nothing":
            clocks.take(seconds)
        elif what == "step":
            number += 1
            clocks.walk(recorder, [number], seconds)
        else:
            with recorder.during("data" if what == "inside" else what):
                clocks.take(seconds / 2)
                with recorder.during("evaluation" if what == "inside" else what):
                    clocks.take(seconds / 2)
    recorder.close()
    read = read_goodput(path)
    assert all(seconds >= 0 for seconds in read.seconds.values())
    assert read.total_seconds - read.seconds["idle"] == pytest.approx(spent, abs=1e-3)
    assert 0 <= read.share <= 1
    assert (read.lost_steps, read.last_step) == (0, number or None)


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_costs_only_itself(clocks, path, cut):
    clocks.attempt(path, [1, 2])
    path.write_bytes(path.read_bytes()[:-cut])
    clocks.attempt(path, [2, 3])
    read = read_goodput(path)
    assert (read.attempts, read.last_step, read.lost_steps) == (2, 3, 0)
    assert read.unreadable == 1 and read.seconds["step"] == 6


def test_lines_of_anything_else_do_not_count(clocks, path):
    clocks.attempt(path, [1])
    with path.open("ab") as file:
        file.write(b'{"life": "goes on", "wall": 1.0, "seconds": {"step": -5.0}}\n')
        file.write(b'{"life": "goes on", "wall": 1.0, "seconds": {"step": 1e999}}\n')
        file.write(b"\0" * 10_000 + b"\n")
    assert read_goodput(path).seconds["step"] == 2 and read_goodput(path).unreadable >= 3


def test_a_full_disk_stops_nothing_and_what_was_spent_is_written_later(clocks, path):
    recorder = clocks.recorder(path)
    kept = path.rename(path.with_suffix(".kept"))
    path.symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning, match=os.strerror(errno.ENOSPC)):
        clocks.walk(recorder, [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        clocks.walk(recorder, [2])
    kept.replace(path)
    clocks.walk(recorder, [3])
    recorder.close()
    assert read_goodput(path).seconds["step"] == 6


def test_what_cannot_be_recorded_is_refused_at_once(clocks, tmp_path):
    with clocks.recorder(None) as recorder:  # writes nothing
        clocks.walk(recorder, [1, 2])
        with pytest.raises(Exception, match="lunch"), recorder.during("lunch"):
            pass
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="XSK-102.goodput-unwritable"):
        GoodputRecorder(tmp_path / "file" / "goodput.jsonl")


@pytest.mark.parametrize("content", [None, b"", b"no json\n"])
def test_a_file_without_an_attempt_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "goodput.jsonl").write_bytes(content)
    with pytest.raises(ArgumentError, match="cannot read goodput|no attempt"):
        read_goodput(tmp_path / "goodput.jsonl")


def test_the_table_has_the_share_and_every_category(clocks, path):
    clocks.recorder(path)
    assert (read_goodput(path).share, read_goodput(path).total_seconds) == (0.0, 0.0)
    clocks.attempt(path, [1, 2])
    path.write_bytes(path.read_bytes() + b"torn")
    clocks.attempt(path, [2])
    console = rich.console.Console(width=120, file=io.StringIO())
    console.print(goodput.goodput_table(read_goodput(path)))
    text = console.file.getvalue()
    assert "Goodput 66.7%: step 2, attempts: 3, lost steps: 1" in text
    assert all(f" {category} " in text for category in goodput.MEANINGS)
    assert "truncated lines: 1" in text
