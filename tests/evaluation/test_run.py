"""Whole evaluations, scored at once: what is computed, kept, resumed, left out and said."""

import io
import json

import jsonschema
import numpy as np
import pytest
from rich.console import Console

from tests.evaluation import sample
from xsake.errors import ArgumentError
from xsake.evaluation import (
    Candidate,
    EvaluationSettings,
    ResultCache,
    draw,
    evaluate,
    read_report,
    report_view,
    run,
    write_report,
)
from xsake.evaluation.score import Scores
from xsake.layout import BlockLayout
from xsake.masks import Causal, Sinks, Window
from xsake.schemas import schema_text

SETTINGS = EvaluationSettings((64, 128), gaps=(16, 32), passage=24, far_copy_samples=2)
TEXTS = sample.texts(300, 100, 200, 10)
NEAR = Candidate.of_mask(Window(15, 0) | Sinks(2))


class QuickScorer:
    """Dense: 2 nats at even positions, 3 at odd ones; the candidate adds 0.5 from 64 on."""

    asked = 0
    stops_at = None

    def __init__(self, model, candidate=None):
        self._has_candidate = candidate is not None

    def __call__(self, tokens):
        if QuickScorer.asked == QuickScorer.stops_at:
            raise KeyboardInterrupt
        QuickScorer.asked += 1
        place = np.arange(1, len(tokens))
        dense = (2.0 + place % 2).astype(np.float32)
        if not self._has_candidate:
            return Scores(dense)
        worse = np.where(place >= 64, 0.5, 0.0).astype(np.float32)
        return Scores(dense, dense + worse, worse / 10, worse == 0)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(run, "Scorer", QuickScorer)
    monkeypatch.setattr(QuickScorer, "asked", 0)
    monkeypatch.setattr(QuickScorer, "stops_at", None)
    return QuickScorer


def evaluated(settings=SETTINGS, texts=TEXTS, subject=None, **options):
    return evaluate(subject or sample.subject(), texts, settings, **options)


def test_perplexity_is_the_exponential_of_the_mean_over_all_predicted_tokens(quick):
    report = evaluated()
    short, long = report.contexts
    # 63 predictions at positions 1..63: 32 odd ones and 31 even ones.
    assert short.perplexity.value == pytest.approx(np.exp((32 * 3 + 31 * 2) / 63))
    assert (short.windows, len(short.documents), short.too_short) == (3, 3, 1)
    assert (long.windows, len(long.documents), long.too_short) == (2, 2, 2)
    assert short.comparison is None and report.candidate is None
    assert [span.tokens for span in long.by_position] == [2 * 127]


def test_a_candidate_is_compared_on_the_same_tokens(quick):
    report = evaluated(candidate=NEAR)
    short, long = (result.comparison for result in report.contexts)
    assert (short.nll_difference.value, short.kl.value, short.agreement.value) == (0, 0, 1)
    assert long.nll_difference.value == pytest.approx(0.5 * 64 / 127)
    assert long.kl.value == pytest.approx(0.05 * 64 / 127)
    assert long.agreement.value == pytest.approx(63 / 127)
    difference = long.perplexity.value - report.contexts[1].perplexity.value
    assert long.perplexity_difference.value == pytest.approx(difference)
    assert long.perplexity_difference.low == pytest.approx(difference)
    assert report.candidate.description == "Window(left=15, right=0) | Sinks(count=2)"


def test_far_copies_are_averaged_by_gap(quick):
    near, far = evaluated(candidate=NEAR).far_copy
    for result in (near, far):
        by_sample = [sample.second_candidate_nll for sample in result.samples]
        assert len(by_sample) == 2
        assert np.mean(by_sample) == pytest.approx(result.second.candidate_nll)
    assert (near.gap, far.gap, near.passage, len(near.samples)) == (16, 32, 24, 2)
    assert (near.second.start, near.second.end, near.second.tokens) == (41, 64, 46)
    assert (far.second.start, far.second.end) == (57, 80)
    assert near.second.candidate_nll == near.second.dense_nll
    # Positions 57..79, of which 64..79 are worse.
    assert far.second.candidate_nll - far.second.dense_nll == pytest.approx(0.5 * 16 / 23)


def test_what_was_left_out_is_in_the_report_and_on_the_screen(quick):
    report = evaluated(EvaluationSettings((64, 128, 4096), gaps=(16, 9999), passage=24))
    said = " ".join(report.notes)
    assert "context 64: skipped documents with too few tokens: 1 of 4" in report.notes
    assert "context 4096: no document is long enough, nothing was evaluated" in report.notes
    assert "skipped gap 9999" in said
    console = Console(width=200, file=io.StringIO())
    console.print(report_view(report))
    screen = console.file.getvalue()
    assert "3 (1 too short)" in screen and "nothing was evaluated" in screen


def outcome(report):
    """What must not depend on interruptions."""
    timed = ("made_at", "seconds")
    plain = report.model_dump(mode="json")
    for part in (plain, *plain["contexts"], *plain["far_copy"]):
        for name in timed:
            part.pop(name, None)
    return plain


def test_an_interrupted_run_goes_on_where_it_stopped(quick, tmp_path):
    whole = evaluated(candidate=NEAR)
    total, path = quick.asked, tmp_path / "deep" / "windows.jsonl"
    quick.asked, quick.stops_at = 0, 4
    with pytest.raises(KeyboardInterrupt):
        evaluated(candidate=NEAR, cache=ResultCache(path))
    # As a process leaves it that dies while it writes.
    path.write_bytes(path.read_bytes()[:-20])
    quick.asked, quick.stops_at, seen = 0, None, []
    resumed = evaluated(candidate=NEAR, cache=ResultCache(path), on_progress=seen.append)
    assert quick.asked == total - 3
    assert outcome(resumed) == outcome(whole)
    assert [progress.is_new for progress in seen] == [False] * 3 + [True] * (total - 3)
    quick.asked = 0
    again = evaluated(candidate=NEAR, cache=ResultCache(path))
    assert quick.asked == 0 and again.seconds == resumed.seconds
    evaluated(candidate=NEAR, cache=ResultCache(path, overwrite=True))
    assert quick.asked == total


OTHER_MODEL = sample.IDENTITY.model_copy(update={"digest": "1"})
CHANGES = {
    "model": {"subject": sample.subject(identity=OTHER_MODEL)},
    "dtype": {"subject": sample.subject(dtype="bfloat16")},
    "text": {"texts": sample.texts(300, 100, 200)},
    "candidate": {"candidate": NEAR},
    "source_digest": "other",
    "installed_versions": {"flax": "0"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_answers_are_not_kept_once_something_changed(quick, tmp_path, monkeypatch, what):
    path, settings = tmp_path / "w.jsonl", EvaluationSettings((64,), gaps=())
    changes = CHANGES[what]
    for _ in range(2):
        evaluated(settings, cache=ResultCache(path))
        assert quick.asked == 3
    if hasattr(run, what):
        monkeypatch.setattr(run, what, lambda *_: CHANGES[what])
        changes = {}
    evaluated(settings, cache=ResultCache(path), **changes)
    assert quick.asked == 6


def test_progress_knows_what_is_to_come_and_the_shortest_texts_come_first(quick):
    seen, whole = [], evaluated()
    settings = EvaluationSettings((128, 64), gaps=(16, 32), passage=24, far_copy_samples=2)
    report = evaluated(settings, on_progress=seen.append)
    assert [progress.done for progress in seen] == list(range(1, 10))
    assert {progress.total for progress in seen} == {9}
    assert seen[0].remaining_seconds > 0 and seen[-1].remaining_seconds == 0
    assert seen[0].label == "64 tokens, text#0, window 1" and "NLL 2.508" in seen[0].detail
    lengths = [int(x.label.split()[0]) for x in seen if x.label[0].isdigit()]
    assert lengths == sorted(lengths) and len(set(lengths)) == 2
    assert [context.context for context in report.contexts] == [128, 64]
    assert outcome(report)["contexts"] == outcome(whole)["contexts"][::-1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contexts": ()}, "no context to evaluate"),
        ({"contexts": (1,)}, "contexts"),
        ({"contexts": (64, 64)}, "no duplicates"),
        ({"documents": 0}, "documents=0"),
        ({"windows_per_document": 0}, "windows_per_document"),
        ({"gaps": (-1,)}, "gaps"),
        ({"far_copy_samples": 0}, "samples"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, words):
    with pytest.raises(ArgumentError, match=words):
        EvaluationSettings(**{"contexts": (64,)} | changes)


def test_what_cannot_be_evaluated_is_refused_before_anything_is_computed(quick):
    with pytest.raises(ArgumentError, match="at least 4096 tokens"):
        evaluated(EvaluationSettings((4096,)))
    layout = BlockLayout.from_mask(Causal(), q_tokens=128)
    with pytest.raises(ArgumentError, match="(?s)one length only.*contexts 64.*context 128"):
        evaluated(candidate=Candidate.of_layout(layout))
    learned = sample.subject(model=sample.model(has_learned_positions=True, context=100))
    with pytest.raises(ArgumentError, match="(?s)position embeddings.*at most 100"):
        evaluated(subject=learned)
    assert quick.asked == 0


def test_limits_of_the_model_are_said_and_kept(quick):
    report = evaluated(subject=sample.subject(model=sample.model(context=100)))
    assert "context 128 exceeds the training context of 100" in report.notes
    learned = sample.subject(model=sample.model(has_learned_positions=True, context=100))
    report = evaluated(EvaluationSettings((64,), gaps=(16, 64), passage=24), subject=learned)
    assert [result.gap for result in report.far_copy] == [16]


def test_a_layout_is_evaluated_at_its_length(quick):
    layout = BlockLayout.from_mask(Causal(), q_tokens=128, block_q=32, block_kv=32)
    settings = EvaluationSettings((128,), gaps=(16, 100), passage=24)
    report = evaluated(settings, candidate=Candidate.of_layout(layout))
    assert report.contexts[0].comparison.budget == 1.0
    assert [result.gap for result in report.far_copy] == [16]
    assert any("skipped gap 100" in note for note in report.notes)


def test_the_file_is_the_report_and_fits_the_schema(quick, tmp_path):
    for candidate in (None, NEAR):
        report = evaluated(candidate=candidate)
        path = tmp_path / "new" / "report.json"
        write_report(report, path)
        assert read_report(path) == report
        jsonschema.validate(
            json.loads(path.read_text()), json.loads(schema_text("evaluation.schema.json"))
        )
        assert list(path.parent.iterdir()) == [path]
    path.write_text("{}")
    with pytest.raises(ArgumentError, match=r"report.json"):
        read_report(path)


@pytest.mark.parametrize(("candidate", "gaps"), [(None, ()), (NEAR, (16,))])
def test_pictures_are_drawn(quick, tmp_path, candidate, gaps):
    report = evaluated(EvaluationSettings((64, 128), gaps=gaps, passage=24), candidate=candidate)
    draw(report, tmp_path / "new" / "report.png")
    assert (tmp_path / "new" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_journal_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="(?s)cannot write the results.*-o"):
        ResultCache(tmp_path / "file" / "windows.jsonl")
