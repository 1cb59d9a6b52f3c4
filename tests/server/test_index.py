"""The index of a run says what its lines say, whatever happens to either of them."""

import contextlib
import json
import sqlite3

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.sample import values, write_run
from xsake.observability import MetricsFile, read_metrics
from xsake.server.api import round_values
from xsake.server.artifacts import open_regular
from xsake.server.cache import IndexCache
from xsake.server.metrics_index import COARSE, FINE, MetricsIndex
from xsake.server.metrics_lines import MAX_LINE, LineReader


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def open_index(folder):
    """The index, which is not in the folder of the run."""
    return MetricsIndex(folder / "metrics.jsonl", folder.with_name("index.sqlite"))


def feed_all(index, lines=10_000):
    index.feed(lines)
    while not index.is_at_end:
        index.feed(lines)
    return index


def write_lines(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def expected(folder, name, begin=0, end=2**50):
    """All numbers of a series, by the plain reader."""
    lines = read_metrics(folder / "metrics.jsonl")
    pairs = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return {step: float(value) for step, value in pairs if begin <= step < end}


def agree(index, folder, name="loss", begin=0, end=2**50, points=200):
    view = index.view([name], begin, end, points)
    numbers = expected(folder, name, begin, min(end, index.last_step + 1))
    assert len(view.steps) <= points and (np.diff(view.steps) > 0).all()
    if view.resolution == 1:
        shown = dict(zip(view.steps.tolist(), view.mean[:, 0].tolist(), strict=True))
        shown = {step: value for step, value in shown.items() if not np.isnan(value)}
        assert shown == pytest.approx(numbers)
        return view
    # Buckets at the ends may hold steps from outside; all others exactly those of their range.
    for i in range(1, len(view.steps) - 1):
        inside = [numbers[s] for s in range(view.steps[i], view.steps[i + 1]) if s in numbers]
        if not inside:
            assert np.isnan(view.mean[i, 0])
            continue
        shown = view.minimum[i, 0], view.maximum[i, 0], view.mean[i, 0]
        assert shown == pytest.approx((min(inside), max(inside), np.mean(inside)), rel=1e-5)
    return view


def test_every_width_of_view_says_what_the_lines_say(folder):
    write_run(folder, 5 * COARSE + 77)
    index = feed_all(open_index(folder))
    assert index.last_step == 5 * COARSE + 76
    for name in ("loss", "is_skipped", "drift"):
        assert agree(index, folder, name, points=4).resolution >= COARSE
        assert agree(index, folder, name, points=1000).resolution == FINE
        assert agree(index, folder, name, 1000, 1400, 500).resolution == 1
        agree(index, folder, name, 70, 3000, 37)
    assert index.count_skips() == pytest.approx(sum(expected(folder, "is_skipped").values()))
    heads = index.view(["entropy/1/3", "no such series"], 0, 2**50, 100)
    assert np.isfinite(heads.mean[:, 0]).any() and np.isnan(heads.mean[:, 1]).all()


def test_series_of_0_1_0_have_their_current_names(folder):
    old = [{"step": 0, "loss": 1.0, "skips": 2}, {"step": 0, "kept_mass": [[0.5, 0.75]]}]
    write_lines(folder, old)
    index = feed_all(open_index(folder))
    names = ["consecutive_skips", "attn_mass_recall/0/0", "attn_mass_recall/0/1"]
    assert index.state.names == ["loss", *names]
    assert index.view(names, 0, 10, 10).mean.tolist() == [[2.0, 0.5, 0.75]]


def test_an_index_continues_where_it_was_left(folder):
    write_run(folder, 3000)
    feed_all(open_index(folder))
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in range(3000, 3500):
        metrics.add(step, **values(step))
    index = open_index(folder)
    assert index.offset > 0.9 * (folder / "metrics.jsonl").stat().st_size * 3000 / 3500
    agree(feed_all(index), folder)


@settings(max_examples=8)
@given(
    attempts=st.lists(st.integers(1, 3 * COARSE), min_size=1, max_size=5),
    portion=st.integers(1, 3000),
    is_cut=st.booleans(),
)
def test_a_run_that_goes_back_is_shown_as_it_was_done_last(
    tmp_path_factory, attempts, portion, is_cut
):
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    index, begin = None, 0
    for number, end in enumerate(attempts):
        begin = min(begin, end - 1)
        metrics = MetricsFile(folder / "metrics.jsonl")
        metrics.start_attempt(begin)
        for step in range(begin, end):
            metrics.add(step, loss=step + number / 10)
        if is_cut:
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(b'{"step": 7, "loss"')
        if index is None or number % 2:
            index = open_index(folder)
        feed_all(index, portion)
        begin = end * 2 // 3
    assert index.last_step == max(expected(folder, "loss"))
    for points in (3, 50, 2000):
        agree(index, folder, points=points)


@pytest.mark.parametrize("first", [0, 1, 70])
def test_a_run_that_was_started_a_thousand_times_is_read_about_once(folder, first):
    lines = [{"step": step, "loss": float(step)} for step in range(first)]
    for number in range(1000):
        lines.append({"event": "began", "from_step": first})
        lines += [{"step": first + i, "loss": number + i} for i in range(2)]
    write_lines(folder, lines)
    index, num_read = open_index(folder), 0
    while not index.is_at_end:
        index.feed(1)
        num_read += 1
    assert num_read < 2 * len(lines)
    agree(index, folder)
    # Nothing is written for each of them.
    assert not folder.with_name("index.sqlite").exists() or first >= FINE


def test_another_file_under_the_same_name_is_read_anew(folder):
    write_run(folder, 500)
    index = feed_all(open_index(folder))
    (folder / "metrics.jsonl").unlink()
    write_run(folder, 100, name="another")
    feed_all(index)
    assert index.last_step == 99
    agree(index, folder)


def _set(name, value):
    return f"UPDATE state SET json = json_set(json, '$.{name}', json('{value}'))"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"\0" * 5000, lambda data: b"", lambda data: data[:-20_000],
        "DELETE FROM state", "UPDATE state SET json = '{'", "UPDATE state SET json = 7",
        f"UPDATE state SET json = '{'[' * 99_999}'", _set("version", "3"),
        _set("names", "7"), _set("names", json.dumps(["x" * 65])), _set("attempts", "[1]"),
        _set("offset", "-1"), _set("counted", "1000000000"), _set("identity", '"another"'),
    ],
    ids=lambda damage: damage[:60] if isinstance(damage, str) else None,
)  # fmt: skip
def test_a_damaged_index_is_built_again_and_counted(folder, damage):
    write_run(folder, 1000)
    feed_all(open_index(folder))
    path = folder.with_name("index.sqlite")
    if callable(damage):
        path.write_bytes(damage(path.read_bytes()))
    else:
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute(damage)
    index = feed_all(open_index(folder))
    assert index.num_rebuilt == 1
    agree(index, folder)


def test_counts_survive_a_restart_of_the_server(folder):
    write_run(folder, 300)
    for step in range(300, 600, 100):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": -1}\n')
        write_run(folder, step + 100, begin=step)
    for _ in range(2):
        assert feed_all(open_index(folder)).state.dropped_lines == 3
    write_run(folder, 350, begin=310)  # lines that are read again are not counted again
    assert feed_all(open_index(folder), 7).state.dropped_lines == 3


def test_series_that_come_later_have_room(folder):
    lines = [{"step": step, "loss": 1.0} for step in range(200)]
    for step in range(200, 400):
        lines.append({"step": step, "loss": 1.0})
        lines.append({"step": step, "entropy": [[float(step)] * 40] * 5})
    write_lines(folder, lines)
    view = feed_all(open_index(folder)).view(["loss", "entropy/4/39"], 0, 2**50, 10)
    assert np.isnan(view.mean[0, 1]) and view.maximum[-1, 1] == 399


def test_numbers_keep_seven_digits_whatever_their_size():
    given = [[0.0, 1.0, -2.5, np.nan, 123456789.0, 1.23456789e-30, 3e38, -1e-45, 0.1]]
    [rounded] = round_values(np.array(given, np.float32))
    assert rounded[3] is None
    for before, after in zip(given[0][:3] + given[0][4:], rounded[:3] + rounded[4:], strict=True):
        assert after == pytest.approx(np.float32(before), rel=1e-6, abs=0)
    assert json.dumps(rounded[-1]) == "0.1"


@pytest.mark.parametrize("portion", [1, 1000])
def test_a_line_without_an_end_is_skipped_and_read_once(folder, portion):
    path = folder / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + b"x" * (MAX_LINE + 2**21))
    index = feed_all(open_index(folder), portion)
    assert index.offset == path.stat().st_size  # no part of it is read again
    with path.open("ab") as file:
        file.write(b"x" * 2**20 + b'\n{"step": 1}\n{"st')
    feed_all(index, portion)
    assert (index.last_step, index.state.dropped_lines) == (1, 1)


def test_links_are_not_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "real" / "metrics.jsonl")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    for path in (tmp_path / "metrics.jsonl", tmp_path / "linked" / "metrics.jsonl"):
        with pytest.raises(OSError):
            open_regular(path)
    with open_regular(tmp_path / "real" / "metrics.jsonl") as file:
        assert LineReader(file, 0).next_line() == b'{"step": 1}'


def test_servers_that_share_a_cache_folder_have_a_part_each(tmp_path):
    first, second = IndexCache(tmp_path / "cache"), IndexCache(tmp_path / "cache")
    assert first.folder != second.folder
    first.close()
    third = IndexCache(tmp_path / "cache")
    assert third.folder == first.folder
    second.close()
    third.close()
