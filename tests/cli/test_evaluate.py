"""`xsake evaluate` as its user sees it, with a tiny checkpoint on disk."""

import json

import numpy as np
import pytest

from tests.cli import tiny
from tests.evaluation.tasks import corpus
from xsake import masks
from xsake.cli.load import bos_prefix
from xsake.evaluation import read_report, read_task_report
from xsake.evaluation import run as evaluation
from xsake.evaluation.score import Scores
from xsake.layout import BlockLayout
from xsake.masks import Causal, Sinks, Window

NEAR = "window(left=15, right=0) | sinks(2)"


@pytest.fixture
def invoke(run, checkpoint, texts, tmp_path):
    def call(*arguments, probe=("--no-far-copy",)):
        always = "--text", texts, "--context", 32, *probe, "-o", tmp_path / "r.json"
        return run("evaluate", checkpoint, *always, *arguments)

    return call


@pytest.fixture
def quick(monkeypatch):
    """Every token costs 2 nats, and one more with a candidate."""

    class QuickScorer:
        stops = False

        def __init__(self, model, candidate=None):
            self._has_candidate = candidate is not None

        def __call__(self, tokens):
            if self.stops:
                raise KeyboardInterrupt
            ones = np.ones(len(tokens) - 1, np.float32)
            candidate = (3 * ones, ones, ones > 2) if self._has_candidate else ()
            return Scores(2 * ones, *candidate)

    monkeypatch.setattr(evaluation, "Scorer", QuickScorer)
    return QuickScorer


def test_a_checkpoint_is_evaluated_from_end_to_end(invoke, tmp_path):
    picture = tmp_path / "r.png"
    done = invoke("--mask", NEAR, "--plot", picture)
    assert done.exit_code == 0, done.output
    report = read_report(tmp_path / "r.json")
    (result,) = report.contexts
    assert (result.windows, result.too_short) == (2, 1)
    assert result.comparison.kl.value > 0 and 0 < result.comparison.agreement.value <= 1
    assert result.perplexity.value == pytest.approx(np.exp(result.by_position[0].dense_nll))
    assert report.model.name == "tiny" and len(report.model.weights[0].sha256) == 64
    assert "1 of 2: 32 tokens, texts.txt#1-" in done.output
    assert f"{result.perplexity.value:.2f}" in done.output
    assert "candidate: Window(left=15, right=0) | Sinks(count=2)" in done.output
    assert "context 32: skipped documents with too few tokens: 1 of 3" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_far_copies_are_shown_and_can_be_left_out(quick, invoke, tmp_path, texts):
    texts.write_text("the cat sat on the mat. " * 100)
    done = invoke("--mask", NEAR, probe=("--gaps", "16,64", "--far-copy-samples", "3"))
    assert "Far copy: 512 tokens repeated after a gap" in done.output and "lost" in done.output
    report = read_report(tmp_path / "r.json")
    assert [(one.gap, len(one.samples)) for one in report.far_copy] == [(16, 3), (64, 3)]
    invoke("--mask", NEAR)
    assert not read_report(tmp_path / "r.json").far_copy


def test_json_is_all_that_is_printed(quick, invoke, tmp_path):
    done = invoke("--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "r.json").read_text())


def test_ctrl_c_leaves_with_130_and_the_same_command_goes_on(quick, invoke, tmp_path):
    quick.stops = True
    done = invoke()
    assert done.exit_code == 130 and "Run the same command without --no-resume" in done.stderr
    assert not (tmp_path / "r.json").exists()
    quick.stops = False
    assert invoke().exit_code == 0
    quick.stops = True
    done = invoke()
    assert done.exit_code == 0 and "cached" in done.output
    assert invoke("--no-resume").exit_code == 130


def test_a_mask_and_a_layout_may_come_from_files(quick, invoke, tmp_path):
    mask, layout = tmp_path / "mask.json", tmp_path / "layout.json"
    mask.write_text(json.dumps(masks.to_dict(Window(15, 0) | Sinks(2))))
    assert invoke("--mask", mask).exit_code == 0
    assert read_report(tmp_path / "r.json").candidate.description.startswith("Window(left=15")
    layout.write_text(BlockLayout.from_mask(Causal(), q_tokens=32).to_json())
    assert invoke("--layout", layout).exit_code == 0
    assert read_report(tmp_path / "r.json").candidate.tokens == 32


@pytest.mark.parametrize(("before", "after"), [([], []), ([1], [2]), ([], [2])])
def test_the_prefix_is_what_the_tokenizer_adds_before_a_text(before, after):
    def encode(text, add_special_tokens=False):
        return np.array([*before, 65, *after] if add_special_tokens else [65], np.int32)

    assert bos_prefix(encode) == tuple(before)


@pytest.fixture
def invoke_tasks(run, tmp_path):
    """Calls with a longer context, and with texts that prompts can be made of."""
    checkpoint = tiny.save_checkpoint(tmp_path, context=2048)
    text = tmp_path / "texts.txt"
    text.write_text("\n".join(document.text for document in corpus.documents()))

    def call(tasks, *arguments):
        always = "--text", text, "--context", 600, "--samples", 2, "-o", tmp_path / "t.json"
        return run("evaluate", checkpoint, *always, "--tasks", tasks, *arguments)

    return call


def test_tasks_are_evaluated_from_end_to_end(invoke_tasks, tmp_path):
    picture = tmp_path / "t.png"
    done = invoke_tasks("niah_single_1,vt", "--mask", NEAR, "--greedy", 1, "--plot", picture)
    assert done.exit_code == 0, done.output
    report = read_task_report(tmp_path / "t.json")
    assert [cell.task for cell in report.cells] == ["niah_single_1", "vt"]
    assert report.cells[0].nll.difference.value != 0
    assert [prompt.dense.output is None for prompt in report.prompts] == [False, True] * 2
    assert "12 of 12: 600 tokens" in done.output and "niah_single_1" in done.output
    assert "dense, candidate: Window(left=15, right=0) | Sinks(count=2)" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = invoke_tasks("niah_single_1,vt", "--mask", NEAR, "--greedy", 1, "--json")
    stored = json.loads((tmp_path / "t.json").read_text())
    assert json.loads(again.stdout) == stored
    assert stored["seconds"] == report.seconds  # nothing was computed again
    assert stored["averages"] == [] and len(stored["cells"]) == 2


def test_wrong_options_of_tasks_are_refused_before_the_model_is_loaded(invoke_tasks, invoke):
    unknown = invoke_tasks("niah_single_1,needle")
    assert unknown.exit_code == 2 and "unknown-task" in unknown.stderr
    assert "niah_multikey_3" in unknown.stderr and "find_definition" in unknown.stderr
    other = invoke_tasks("vt", "--gaps", "16", "--windows-per-document", 2)
    assert other.exit_code == 2 and "--windows-per-document, --gaps" in other.stderr
    alone = invoke("--samples", 3, "--chat")
    assert alone.exit_code == 2 and "only with --tasks" in alone.stderr
    assert invoke_tasks("vt", "--chat").exit_code == 2  # the checkpoint has no template
    pages = invoke_tasks("vt", "--page-budget", "20%")
    assert pages.exit_code == 2 and "task-page-budget" in pages.stderr
    missing = invoke_tasks("find_definition", "--code", "/none")
    assert missing.exit_code == 2 and "code-not-found" in missing.stderr
