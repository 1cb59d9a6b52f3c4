"""Evaluations of tasks: scores against a plain forward pass, resuming, averages, report, views."""

import io
import json
import pathlib

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from rich.console import Console

from tests.evaluation import sample
from tests.evaluation.tasks import corpus
from xsake.errors import ArgumentError
from xsake.evaluation import (
    Candidate,
    ResultCache,
    TaskSettings,
    Texts,
    draw_tasks,
    evaluate_tasks,
    read_code,
    read_task_report,
    task_view,
    write_report,
)
from xsake.evaluation.tasks import run
from xsake.evaluation.tasks.prompt import PromptEncoder
from xsake.evaluation.tasks.record import PromptResult, PromptScore
from xsake.evaluation.tasks.registry import build_prompt
from xsake.evaluation.tasks.score import AnswerScorer, generate_answer, match_strings
from xsake.evaluation.tasks.summary import averages, group_cells, shares_by_depth
from xsake.layout import BlockLayout
from xsake.masks import Causal, Sinks, Window
from xsake.model import DenseAttention, MaskedAttention
from xsake.schemas import schema_text

TOKENIZER = corpus.tokenizer("bytes")
SUBJECT = sample.subject(
    encode=TOKENIZER.encode, tokenizer=TOKENIZER, model=sample.model(context=2048)
)
TEXTS = Texts(corpus.documents(), sample.texts(8).files)
CODE = Texts(corpus.code(), ())
NEAR = Candidate.of_mask(Window(15, 0) | Sinks(2))
SETTINGS = TaskSettings(("niah_single_2", "vt"), (700, 1000), samples=3, greedy=1)


def evaluated(settings=SETTINGS, subject=SUBJECT, **options):
    return evaluate_tasks(subject, TEXTS, settings, **{"code": CODE} | options)


def prompt_of(name="niah_multivalue", context=600):
    encoder = PromptEncoder(TOKENIZER.encode, 256)
    return build_prompt(name, corpus.material(), encoder, context, 0, 0)


@pytest.mark.parametrize(
    "attend", [DenseAttention(), MaskedAttention(Window(63, 0) | Sinks(2))], ids=["dense", "near"]
)
def test_scores_are_those_of_a_plain_forward_pass(attend):
    prompt, model = prompt_of(), SUBJECT.model
    logits = np.asarray(model(jnp.asarray(prompt.tokens)[None], attend=attend)[0], np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    places = np.arange(1, prompt.context)
    nll = -log_p[places - 1, prompt.tokens[places]]
    is_top = logits[places - 1].argmax(-1) == prompt.tokens[places]
    sums = AnswerScorer(model, attend)(prompt)
    spans = (prompt.answer, *prompt.answer_spans)
    assert len(spans) == 5
    expected = [nll[a - 1 : b - 1].sum() for a, b in spans]
    np.testing.assert_allclose(sums["nll"], expected, rtol=1e-5)
    assert sums["top"] == [is_top[a - 1 : b - 1].sum() for a, b in spans]


def test_a_model_that_knows_the_answer_is_exact():
    """The scores of an answer that the model itself wrote."""
    prompt, model = prompt_of("niah_single_2"), SUBJECT.model
    tokens = prompt.tokens.copy()
    for place in range(prompt.answer.start, prompt.context):
        logits = model(jnp.asarray(tokens)[None])  # later tokens change nothing
        tokens[place] = int(jnp.argmax(logits[0, place - 1]))
    known = type(prompt)(**{**vars(prompt), "tokens": tokens})
    sums = AnswerScorer(model, DenseAttention())(known)
    assert sums["top"][0] == prompt.context - prompt.answer.start
    text = generate_answer(model, TOKENIZER, known, DenseAttention(), None)
    assert text.startswith(TOKENIZER.decode(tokens[prompt.answer.start :])[:-1])


def test_strings_are_matched_without_regard_to_case():
    assert match_strings("Abc, then 12", ("abc", "12", "13", "x")) == 0.5


def test_a_report_has_every_cell_and_prompt_and_pairs_both_attentions():
    report = evaluated(candidate=NEAR)
    assert [(x.task, x.context, x.samples) for x in report.cells] == [
        (name, context, 3) for name in SETTINGS.tasks for context in SETTINGS.contexts
    ]
    assert len(report.prompts) == 12 and not report.code
    for cell in report.cells:
        prompts = [x for x in report.prompts if (x.task, x.context) == (cell.task, cell.context)]
        dense, near = (
            np.array([getattr(x, y).nll for x in prompts]) for y in ("dense", "candidate")
        )
        assert cell.nll.dense.value == pytest.approx(dense.mean())
        assert cell.nll.difference.value == pytest.approx((near - dense).mean())
        assert cell.nll.difference.low < cell.nll.difference.high
        assert cell.greedy_samples == 1 and cell.greedy.candidate.low is None
        written = [x.dense.output is not None for x in prompts]
        assert written == [True, False, False]
    depths = [x.depth for x in report.prompts[:3]]
    assert depths == [0.5, 0.0, 1.0] and report.prompts[-1].depth is None


def result(task, context, number, dense, candidate, depth=0.5):
    score = lambda exact: PromptScore(nll=1.0 - exact, exact=exact, strings=exact)
    return PromptResult(
        task=task, context=context, sample=number, depth=depth, answers=("x",),
        dense=score(dense), candidate=score(candidate),
    )  # fmt: skip


def test_cells_where_dense_attention_fails_are_not_averaged():
    exact = {  # dense, candidate
        ("easy", 64): [(1, 1), (1, 0), (1, 1), (1, 1)],
        ("easy", 128): [(1, 1), (0, 1), (1, 1), (0, 0)],  # at the limit: kept
        ("hard", 64): [(1, 1), (0, 0), (0, 1), (0, 1)],
        ("hard", 128): [(0, 1)] * 4,
    }
    results = [
        result(*place, number, *map(bool, pair))
        for place, pairs in exact.items()
        for number, pair in enumerate(pairs)
    ]
    cells = group_cells(results, seed=0)
    assert [cell.is_excluded for cell in cells] == [False, False, True, True]
    assert [cell.exact.difference.value for cell in cells] == [-0.25, 0.25, 0.5, 1.0]
    short, long, both = averages(cells, results, seed=0)
    assert (short.context, long.context, both.context) == (64, 128, None)
    assert (short.excluded, long.excluded, both.excluded) == (1, 1, 2)
    assert both.tasks == ("easy",) and both.samples == 8 and both.greedy is None
    assert both.exact.dense.value == 0.75 and both.exact.difference.value == 0
    assert both.exact.difference.low < 0 < both.exact.difference.high
    hard = [x for x in results if x.task == "hard"]
    assert averages(cells[2:], hard, seed=0) == []


def test_depths_are_those_of_tasks_that_dense_attention_can_do(knowing):
    report = evaluated(
        TaskSettings(("niah_single_1", "vt"), (700, 1000), samples=6), candidate=NEAR
    )
    depths = shares_by_depth(report)
    assert depths["dense"].depths == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert depths["dense"].contexts == (700, 1000)
    assert (depths["dense"].shares == 1).all()
    np.testing.assert_array_equal(
        depths["candidate"].shares, 1.0 * np.tile(np.arange(5)[:, None] < 4, 2)
    )
    knowing.knows = False
    assert shares_by_depth(evaluated(candidate=NEAR)) is None


class QuickScorer:
    """Dense attention knows every answer, the candidate none of a needle at the end."""

    asked, stops_at, knows = 0, None, True

    def __init__(self, model, attend):
        self._is_dense = isinstance(attend, DenseAttention)

    def __call__(self, prompt):
        if QuickScorer.asked == QuickScorer.stops_at:
            raise KeyboardInterrupt
        QuickScorer.asked += 1
        sizes = [float(b - a) for a, b in (prompt.answer, *prompt.answer_spans)]
        is_known = QuickScorer.knows and (self._is_dense or prompt.depth != 1.0)
        return {"nll": [x / 4 for x in sizes], "top": sizes if is_known else [0.0 for _ in sizes]}


@pytest.fixture
def knowing(monkeypatch):
    monkeypatch.setattr(run, "AnswerScorer", QuickScorer)
    monkeypatch.setattr(run, "generate_answer", lambda model, tokenizer, prompt, *_: prompt.task)
    for name, value in {"asked": 0, "stops_at": None, "knows": True}.items():
        monkeypatch.setattr(QuickScorer, name, value)
    return QuickScorer


def outcome(report):
    """What must not depend on interruptions."""
    plain = report.model_dump(mode="json")
    return {name: value for name, value in plain.items() if name not in ("made_at", "seconds")}


def test_an_interrupted_run_resumes_and_dense_results_serve_every_candidate(knowing, tmp_path):
    whole = evaluated(candidate=NEAR)
    total, path = knowing.asked, tmp_path / "prompts.jsonl"
    assert total == 24
    knowing.asked, knowing.stops_at = 0, 5
    with pytest.raises(KeyboardInterrupt):
        evaluated(candidate=NEAR, cache=ResultCache(path))
    path.write_bytes(path.read_bytes()[:-20])  # as a process leaves it that dies while it writes
    knowing.asked, knowing.stops_at, seen = 0, None, []
    resumed = evaluated(candidate=NEAR, cache=ResultCache(path), on_progress=seen.append)
    assert knowing.asked < total and sum(x.is_new for x in seen) < len(seen) == 32
    assert outcome(resumed) == outcome(whole)
    assert "700 tokens, niah_single_2, sample 1, dense" in [x.label for x in seen]
    knowing.asked = 0
    assert evaluated(candidate=NEAR, cache=ResultCache(path)).seconds == resumed.seconds
    assert knowing.asked == 0
    evaluated(candidate=Candidate.of_mask(Window(31, 0)), cache=ResultCache(path))
    assert knowing.asked == total / 2
    evaluated(cache=ResultCache(path), settings=TaskSettings(("vt",), (700,), samples=4))
    assert knowing.asked == total / 2 + 1


def test_prompts_of_a_chat_and_source_code_are_in_the_report(knowing):
    settings = TaskSettings(("find_definition",), (1500,), samples=1)
    pairs = corpus.tokenizer("pairs")
    subject = sample.subject(
        encode=pairs.encode, tokenizer=pairs, model=sample.model(vocab_size=512, context=2048)
    )
    plain, chat = (evaluated(settings, subject, template=x) for x in (None, corpus.TEMPLATE))
    assert (plain.is_chat, chat.is_chat) == (False, True)
    assert chat.prompts[0].answers[0].startswith("lib/")
    library = evaluated(settings, code=None)
    assert library.code[0].documents > 100 and library.prompts[0].answers[0].endswith(".py")


def test_what_is_left_out_is_noted(knowing):
    short = sample.subject(
        encode=TOKENIZER.encode, tokenizer=TOKENIZER, model=sample.model(context=800)
    )
    report = evaluated(subject=short)
    assert "context 1000 exceeds the training context of 800" in report.notes
    assert "greedy decoding: skipped above 800 tokens" in report.notes
    assert [cell.greedy_samples for cell in report.cells] == [1, 0, 1, 0]
    report = evaluated(
        subject=sample.subject(encode=TOKENIZER.encode, model=sample.model(context=2048))
    )
    assert report.notes == ("greedy decoding: skipped without a tokenizer",)
    layout = Candidate.of_layout(BlockLayout.from_mask(Causal(), q_tokens=700))
    report = evaluated(TaskSettings(("vt",), (700,), samples=2), candidate=layout)
    assert report.notes == ("greedy decoding: skipped with a layout, which has one length",)
    assert report.cells[0].greedy.candidate is None


def test_the_file_is_the_report_and_fits_the_schema(knowing, tmp_path):
    for candidate in (None, NEAR):
        report, path = evaluated(candidate=candidate), tmp_path / "new" / "report.json"
        write_report(report, path)
        assert read_task_report(path) == report
        schema = json.loads(schema_text("task_report.schema.json"))
        jsonschema.validate(json.loads(path.read_text()), schema)
    path.write_text("{}")
    with pytest.raises(ArgumentError, match=r"(?s)task-report.*report.json"):
        read_task_report(path)


@pytest.mark.parametrize("candidate", [None, NEAR])
@pytest.mark.parametrize("knows", [True, False])
def test_tables_and_pictures_are_drawn(knowing, tmp_path, candidate, knows):
    knowing.knows = knows
    report = evaluated(
        TaskSettings(("niah_single_2", "vt"), (700,), samples=5), candidate=candidate
    )
    console = Console(width=100, file=io.StringIO())
    console.print(task_view(report))
    screen = console.file.getvalue()
    assert "niah_single_2" in screen and "700" in screen
    assert ("Average of tasks" in screen) == ("by depth" in screen) == knows
    assert ("excluded from averages: 2 of 2 cells" in screen) == (not knows)
    assert ("100, 80" in screen) == (knows and candidate is not None)
    draw_tasks(report, tmp_path / "new" / "report.png")
    assert (tmp_path / "new" / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tasks": ("niah",)}, "unknown-task"),
        ({"tasks": ()}, "task-settings"),
        ({"tasks": ("vt", "vt")}, "task-settings"),
        ({"contexts": ()}, "task-settings"),
        ({"contexts": (10,)}, "contexts"),
        ({"samples": 0}, "samples=0"),
        ({"greedy": -1}, "greedy"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, words):
    with pytest.raises(ArgumentError, match=words):
        TaskSettings(**changes)


def test_pages_need_a_plan():
    with pytest.raises(ArgumentError, match="task-page-budget"):
        evaluated(TaskSettings(("vt",), (700,), page_budget=0.2), candidate=NEAR)


def test_source_code_is_read_from_files_and_folders(tmp_path):
    (tmp_path / "lib" / "deep").mkdir(parents=True)
    (tmp_path / "lib" / ".hidden").mkdir()
    for name in ("a.py", "deep/b.py", ".hidden/c.py", "notes.txt"):
        (tmp_path / "lib" / name).write_text(f"# {name}\r\n")
    one = read_code([tmp_path / "lib"])
    assert [x.name for x in one.documents] == ["a.py", "deep/b.py"]
    assert one.documents[0].text == "# a.py\n" and one.files[0].documents == 2
    both = read_code([tmp_path / "lib", tmp_path / "lib" / "a.py"])
    assert [(x.name, x.documents) for x in both.files] == [("lib", 2), ("a.py", 1)]
    assert both.files[0] == one.files[0]
    for missing in ("none", "lib/notes.txt", "none.py"):
        with pytest.raises(ArgumentError, match="code-not-found"):
            read_code([tmp_path / missing])
    library = read_code()
    names = {x.name for x in library.documents}
    assert {"ast.py", "json/decoder.py"} < names
    assert not [
        name for name in names if pathlib.PurePath(name).parts[0] in ("test", "site-packages")
    ]
