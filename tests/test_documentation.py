"""Every example a reader can copy runs: the README's, the pages' and the docstrings'."""

import doctest
import importlib
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from benchmarks.faults import page as faults
from benchmarks.pages import comparisons, evidence, headline
from benchmarks.pages.marked_page import filled
from tests.lanes import slow
from tests.markdown_code import code_blocks

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if code_blocks(page, "pycon"))
LONG = {"flax_tutorial", "hads", "native_sparse", "quick_start"}
SOURCE = ROOT / "src"
WITH_EXAMPLES = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text())
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.slow  # quicker: the clean install runs it too
def test_readme_quick_start_runs_in_a_fresh_interpreter(tmp_path):
    code = "\n".join(code_blocks(ROOT / "README.md", "python"))
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_readme_figures_are_those_of_the_rows(tmp_path):
    text = headline.README.read_text()
    made = {"headline": headline.table()}
    assert filled(text, made) == text, "run python -m benchmarks.pages.headline"
    page = evidence.PAGE.read_text()
    assert filled(page, evidence.tables()) == page, "run python -m benchmarks.pages.evidence"
    page = headline.DECODING.read_text()
    pages = {"pages": headline.pages_table()}
    assert filled(page, pages) == page, "run python -m benchmarks.pages.headline"
    page = comparisons.PAGE.read_text()
    assert filled(page, {"races": comparisons.table()}) == page, (
        "run python -m benchmarks.pages.comparisons"
    )
    shutil.copytree(headline.RESULTS, tmp_path / "results")
    rows = tmp_path / "results" / "causal.jsonl"
    changed = re.sub(r'"(median|q25|q75)":[0-9.]+', r'"\1":9.0', rows.read_text())
    rows.write_text(changed)
    assert headline.table(tmp_path / "results") != made["headline"]


def test_a_speed_by_a_plan_is_stated_with_the_loss_of_that_plan(tmp_path):
    by_plans = lambda table: [line for line in table.splitlines() if "`plan_" in line]
    assert by_plans(headline.table())
    for line in by_plans(headline.table()):
        assert "perplexity" in line, line
    shutil.copytree(headline.RESULTS, tmp_path / "results")
    for losses in ("plan_loss", "decoding"):
        (tmp_path / "results" / "hads" / f"{losses}.jsonl").unlink()
    for line in by_plans(headline.table(tmp_path / "results")):
        assert "time:" not in line, line


def test_the_table_of_faults_is_that_of_the_results():
    text = faults.PAGE.read_text()
    assert filled(text, {"faults": faults.table()}) == text, "run python -m benchmarks.faults.page"


@pytest.mark.slow  # quicker: tests/cli evaluates and generates
@pytest.mark.timeout(1200)  # ten commands, each a new process that compiles
def test_the_path_of_a_new_model_owner_can_be_walked(tmp_path):
    page = ROOT / "docs" / "models.md"
    steps = [[sys.executable, "-W", "error", "-c", "\n".join(code_blocks(page, "python"))]]
    lines = "".join(code_blocks(page, "console")).splitlines()
    # Commands for the real model were run by hand.
    commands = [shlex.split(line.removeprefix("$ ")) for line in lines if " tiny " in line]
    assert {command[1] for command in commands} == {"evaluate", "generate"}
    folder = pathlib.Path(sys.executable).parent
    steps += [[str(folder / program), *arguments] for program, *arguments in commands]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout or "written to outputs.jsonl" in done.stderr
    assert (tmp_path / "window.png").stat().st_size > 10_000


def _run(examples: doctest.DocTest) -> None:
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(examples, out=report.append)
    assert result.failed == 0, "".join(report)


@pytest.mark.parametrize(
    "page",
    [slow(page) if page.stem in LONG else page for page in PAGES],
    ids=lambda page: page.stem,
)
def test_pages_show_what_their_code_prints(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n\n".join(code_blocks(page, "pycon"))
    _run(doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), 0))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_docstring_examples_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = path.relative_to(SOURCE).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    for examples in doctest.DocTestFinder().find(module):
        _run(examples)
