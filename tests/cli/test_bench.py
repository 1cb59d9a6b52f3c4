"""`xsake bench` as its user sees it."""

import gzip
import json
import os

import pytest

from xsake.benchmarking import append_rows, read_rows
from xsake.benchmarking.rows import PRODUCT


@pytest.fixture(scope="module")
def invoke(run):
    return lambda *words: run("bench", *words)


@pytest.fixture(scope="module")
def rows(invoke, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    asked = "attention --shape gemma-3-1b --tokens 48,64,80 --densities 60% --block 16 --repeats 2"
    shown = invoke(*asked.split(), "-o", path)
    assert shown.exit_code == 0, shown.output
    assert "xsake, 60%" in shown.output and "jax.nn" in shown.output
    return path


def test_rows_are_kept_shown_as_a_page_and_compared(invoke, rows, tmp_path):
    assert len(read_rows(rows)) == 9
    page = tmp_path / "page.html"
    assert invoke("report", rows, "-o", page).exit_code == 0
    assert "Growth" in page.read_text()
    same = invoke("compare", rows, rows)
    assert same.exit_code == 0 and "1.000" in same.output
    slower = [
        row.model_copy(update={"ratios": tuple(
            x.model_copy(update={name: 9 * getattr(x, name) for name in ("median", "q25", "q75")})
            for x in row.ratios if x.baseline == PRODUCT
        )})
        for row in read_rows(rows)
    ]  # fmt: skip
    append_rows(tmp_path / "slower.jsonl", slower)
    worse = invoke("compare", rows, tmp_path / "slower.jsonl")
    assert worse.exit_code == 1 and "slower" in worse.output


@pytest.mark.slow  # quicker: rows of the command
def test_a_trace_has_one_call_of_each_side(invoke, tmp_path):
    words = "backward --shape gemma-3-1b --tokens 48 --densities 60% --block 16 --repeats 1 --trace"
    shown = invoke(*words.split(), str(tmp_path))
    assert shown.exit_code == 0, shown.output
    [file] = tmp_path.rglob("perfetto_trace.json.gz")
    assert str(file) in shown.output and "backward_48" in file.parts
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"xsake, all blocks", "xsake, 60%", "jax.nn"} <= names


def test_the_process_keeps_to_the_cores_it_was_given(invoke):
    before = os.sched_getaffinity(0)
    try:
        words = "decode --shape gemma-3-1b --tokens 32 --repeats 1 --num-threads 1"
        shown = invoke(*words.split())
        assert shown.exit_code == 0 and "1 cores" in shown.output
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        os.sched_setaffinity(0, before)


RUN = """
[model]
preset = "tiny"
compute_dtype = "float32"
[data]
folder = "nowhere"
context = 64
batch = 2
[optimizer]
peak_learning_rate = 1e-3
[checkpoint]
folder = "elsewhere"
[run]
steps = 10
"""


@pytest.mark.slow  # a minute of training steps
def test_training_steps_of_several_runs_are_compared(invoke, tmp_path):
    (tmp_path / "dense.toml").write_text(RUN)
    (tmp_path / "window.toml").write_text(
        RUN + '[attention]\nkind = "mask"\nmask = "window(15, 0)"\n'
    )
    out = tmp_path / "rows.jsonl"
    paths = [str(tmp_path / f"{name}.toml") for name in ("dense", "window")]
    smaller = ["--set", "data.batch=1", "--set", "model.decoder.layers=1", "--repeats", "2"]
    shown = invoke("training", *paths, *smaller, "-o", str(out))
    assert shown.exit_code == 0, shown.output
    assert "window: " in shown.output and "tokens/s" in shown.output
    dense, window = read_rows(out)
    assert dense.ratios == () and window.ratio_to("dense").median > 0
    assert window.shape.batch == 1 and window.mask == "window(15, 0)" and window.temp_bytes > 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mesh.data=2", "steps are timed on one device"),
        ('attention={kind="plan",budget=0.5,block=4}', "has no plan before it calibrates"),
    ],
)
def test_a_step_that_cannot_be_timed_alone_is_refused(invoke, tmp_path, setting, message):
    (tmp_path / "run.toml").write_text(RUN)
    shown = invoke("training", str(tmp_path / "run.toml"), "--set", setting)
    assert shown.exit_code == 2 and message in shown.output
