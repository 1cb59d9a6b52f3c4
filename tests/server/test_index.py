"""The index of a run says what its lines say, whatever happens to either of them."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.sample import values, write_run
from xsake.observability import MetricsFile, read_metrics
from xsake.server.api import _round_values
from xsake.server.cache import IndexCache
from xsake.server.index import COARSE, FINE, MetricsIndex
from xsake.server.tail import MAX_LINE, LineReader, open_regular


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def index_folder(folder):
    """Where the test keeps the index: not in the folder of the run."""
    return folder.with_name(f"{folder.name}-index")


def feed_all(index, lines=10_000):
    while not index.is_at_end:
        index.feed(lines)
    return index


def fed(folder, lines=10_000):
    index = MetricsIndex(folder / "metrics.jsonl", index_folder(folder))
    return feed_all(index, lines)


def expected(folder, name, begin, end):
    """All numbers of a series, by the plain reader."""
    lines = read_metrics(folder / "metrics.jsonl")
    told = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return {step: float(value) for step, value in told if begin <= step < end}


def agree(index, folder, name, begin, end, points):
    view = index.view([name], begin, end, points)
    told = expected(folder, name, begin, min(end, index.last_step + 1))
    assert len(view.steps) <= points and (np.diff(view.steps) > 0).all()
    if view.resolution == 1:
        found = dict(zip(view.steps.tolist(), view.mean[:, 0].tolist(), strict=True))
        found = {step: value for step, value in found.items() if not np.isnan(value)}
        assert found == pytest.approx(told)
        return view
    # Buckets at the ends may hold steps from outside; all others exactly those of their range.
    for i in range(1, len(view.steps) - 1):
        inside = [told[s] for s in range(view.steps[i], view.steps[i + 1]) if s in told]
        if not inside:
            assert np.isnan(view.mean[i, 0])
            continue
        found = view.minimum[i, 0], view.maximum[i, 0], view.mean[i, 0]
        assert found == pytest.approx((min(inside), max(inside), np.mean(inside)), rel=1e-5)
    return view


def test_every_width_of_view_says_what_the_lines_say(folder):
    write_run(folder, 5 * COARSE + 77)
    index = fed(folder)
    assert index.last_step == 5 * COARSE + 76
    for name in ("loss", "is_skipped", "drift"):
        assert agree(index, folder, name, 0, 2**50, 4).resolution >= COARSE
        assert agree(index, folder, name, 0, 2**50, 1000).resolution == FINE
        assert agree(index, folder, name, 1000, 1400, 500).resolution == 1
        agree(index, folder, name, 70, 3000, 37)
    skipped = sum(expected(folder, "is_skipped", 0, 2**50).values())
    assert index.count_skips() == pytest.approx(skipped)
    heads = index.view(["entropy/1/3", "no such series"], 0, 2**50, 100)
    assert np.isfinite(heads.mean[:, 0]).any() and np.isnan(heads.mean[:, 1]).all()


def test_series_of_0_1_0_have_their_current_names(folder):
    folder.mkdir()
    lines = ['{"step": 0, "loss": 1.0, "skips": 2}', '{"step": 0, "kept_mass": [[0.5, 0.75]]}']
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    index = fed(folder)
    names = ["consecutive_skips", "attn_mass_recall/0/0", "attn_mass_recall/0/1"]
    assert index.columns.names == ["loss", *names]
    assert index.view(names, 0, 10, 10).mean.tolist() == [[2.0, 0.5, 0.75]]


def test_an_index_goes_on_where_it_was_left(folder):
    write_run(folder, 3000)
    fed(folder)
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in range(3000, 3500):
        metrics.add(step, **values(step))
    index = MetricsIndex(folder / "metrics.jsonl", index_folder(folder))
    left = index.offset
    assert left > 0.9 * (folder / "metrics.jsonl").stat().st_size * 3000 / 3500
    index.feed()
    feed_all(index)
    agree(index, folder, "loss", 0, 2**50, 200)


@settings(max_examples=8)
@given(
    lives=st.lists(st.integers(1, 3 * COARSE), min_size=1, max_size=5),
    portion=st.integers(1, 3000),
    is_cut=st.booleans(),
)
def test_a_run_that_goes_back_is_shown_as_it_was_done_last(
    tmp_path_factory, lives, portion, is_cut
):
    folder = tmp_path_factory.mktemp("runs") / "run"
    index, begin = None, 0
    for number, end in enumerate(lives):
        begin = min(begin, end - 1)
        folder.mkdir(exist_ok=True)
        metrics = MetricsFile(folder / "metrics.jsonl")
        metrics.start_attempt(begin)
        for step in range(begin, end):
            metrics.add(step, loss=step + number / 10)
        if is_cut:
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(b'{"step": 7, "loss"')
        if index is None or number % 2:
            index = MetricsIndex(folder / "metrics.jsonl", index_folder(folder))
        index.feed(portion)
        feed_all(index, portion)
        begin = end * 2 // 3
    assert index.last_step == max(expected(folder, "loss", 0, 2**50))
    for points in (3, 50, 2000):
        agree(index, folder, "loss", 0, 2**50, points)


def test_another_file_under_the_same_name_is_read_anew(folder):
    write_run(folder, 500)
    index = fed(folder)
    (folder / "metrics.jsonl").unlink()
    write_run(folder, 100, name="another")
    index.feed()
    feed_all(index)
    assert index.last_step == 99
    agree(index, folder, "loss", 0, 2**50, 200)


@pytest.mark.parametrize("damage", ["cut", "no json", "half a record", "gone"])
def test_an_index_that_is_damaged_is_made_again(folder, damage):
    write_run(folder, 1000)
    fed(folder)
    place = index_folder(folder)
    [fine] = place.glob("fine-*.buckets")
    if damage == "cut":
        (place / "index.json").write_bytes((place / "index.json").read_bytes()[:20])
    elif damage == "no json":
        (place / "index.json").write_bytes(b"\x00" * 100)
    elif damage == "half a record":
        fine.write_bytes(fine.read_bytes()[:-100])
    else:
        shutil.rmtree(place)
    agree(fed(folder), folder, "loss", 0, 2**50, 200)


def test_series_that_come_later_have_room(folder):
    folder.mkdir()
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in range(400):
        metrics.add(step, loss=1.0)
        if step >= 200:
            metrics.add(step, entropy=[[float(step)] * 40] * 5)
    index = fed(folder)
    view = index.view(["loss", "entropy/4/39"], 0, 2**50, 10)
    assert np.isnan(view.mean[0, 1]) and view.maximum[-1, 1] == 399


def test_hostile_lines_cost_nothing_and_are_not_shown(folder):
    folder.mkdir()
    odd = [
        {"step": 0, "loss": "NaN", "entropy": [[1], [1, 2]], "kl": [], "drift": [[1.0]]},
        {"step": 0, "loss": 1e300, "entropy": [["x"]], "kl": [[None, None]]},
        {"step": 0, "loss": 10**400},
        {"step": 0, "entropy": [[0.0] * 3000] * 3000},
        {"step": 2**60, "loss": 1.0},
        {"step": 1, "loss": 2.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd))
    index = fed(folder)
    assert index.last_step == 1 and len(index.columns.names) < 10
    view = index.view(["loss"], 0, 2**50, 10)
    assert view.steps.tolist() == [0, 1] and np.isnan(view.mean[0, 0]) and view.mean[1, 0] == 2


def test_numbers_keep_seven_digits_whatever_their_size():
    told = [[0.0, 1.0, -2.5, np.nan, 123456789.0, 1.23456789e-30, 3e38, -1e-45, 0.1]]
    [found] = _round_values(np.array(told, np.float32))
    assert found[3] is None
    for before, after in zip(told[0][:3] + told[0][4:], found[:3] + found[4:], strict=True):
        assert after == pytest.approx(np.float32(before), rel=1e-6, abs=0)
    assert json.dumps(found[-1]) == "0.1"


@pytest.mark.parametrize("portion", [1, 1000])
def test_a_line_without_an_end_is_skipped_and_read_once(folder, portion):
    folder.mkdir()
    path = folder / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + b"x" * (MAX_LINE + 2**21))
    index = feed_all(MetricsIndex(path, index_folder(folder)), portion)
    assert index.offset == path.stat().st_size  # no part of it is read again
    with path.open("ab") as file:
        file.write(b"x" * 2**20 + b'\n{"step": 1}\n{"st')
    index.feed(portion)
    feed_all(index, portion)
    assert (index.last_step, index.dropped_lines) == (1, 1)


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
