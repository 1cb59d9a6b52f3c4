"""`xsake generate` as its user sees it."""

import json
import shutil

import pytest
import tokenizers
import typer
from typer.testing import CliRunner

from tests.hads.sample import profile
from tests.model.checkpoints import copied
from xsake.cli.generate import run_generate
from xsake.errors import CheckpointError
from xsake.hads import PlanAttention, make_plan
from xsake.hads.policies import KL
from xsake.hads.selectors import Pooled
from xsake.masks import Window
from xsake.model import DenseAttention, MaskedAttention, generate, huggingface
from xsake.model.generate import Continuation, GenerationResult, GenerationTiming

APP = typer.Typer()
APP.command()(run_generate)
WORDS = ["the", "cat", "sat", "on", "mat", "\x07", "<end>"]
END = WORDS.index("<end>")


def invoke(*arguments: str, **options):
    return CliRunner().invoke(APP, list(arguments), env={"COLUMNS": "160"}, **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A golden checkpoint with a tokenizer of a few words."""
    folder = copied("llama", tmp_path_factory.mktemp("models"), eos_token_id=END)
    words = {word: number for number, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="the"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture
def script(monkeypatch):
    """Puts steps of tokens in the place of a model; returns what it was asked for."""

    def play(*steps, error=None):
        asked = {}

        def speak(model, prompts, options, *, attend, on_tokens):
            asked.update(prompts=[x.tolist() for x in prompts], options=options, attend=attend)
            for step in steps:
                on_tokens(step)
            if error is not None:
                raise error
            rows = zip(*steps, strict=True)
            rows = [tuple(token for token in row if token is not None) for row in rows]
            rows = [
                Continuation(row, (-1.0,) * len(row), "length" if len(row) == len(steps) else "end")
                for row in rows
            ]
            return GenerationResult(tuple(rows), GenerationTiming(7, 1.25, 0.5, 30, 2.0))

        monkeypatch.setattr(generate, "generate", speak)
        monkeypatch.setattr(huggingface, "load", lambda *_, **__: type("Loaded", (), {"model": 0}))
        return asked

    return play


def test_a_model_goes_on_from_a_text(checkpoint):
    arguments = [checkpoint, "--prompt", "the cat", "--temperature", "0", "--max-new-tokens", "3"]
    shown = invoke(*arguments)
    assert shown.exit_code == 0, shown.output
    assert "2 prompt tokens in" in shown.stderr and "tokens/s" in shown.stderr
    told = json.loads(invoke(*arguments, "--json").stdout)
    (row,) = told["rows"]
    assert len(row["tokens"]) == len(row["logprobs"]) == 3 or row["finish"] == "end"
    assert shown.stdout == row["text"] + "\n"
    assert told["timing"]["prompt_tokens"] == 2


def test_prompts_are_read_by_a_plan_or_by_a_mask(checkpoint, script, tmp_path):
    asked, made = script((2,)), make_plan(profile(weights=3), KL("pooled"), 0.7, Pooled())
    made.save(tmp_path / "plan.json")
    given = [checkpoint, "--prompt", "the cat", "--plan", str(tmp_path / "plan.json")]
    assert invoke(*given).exit_code == 0
    assert isinstance(asked["attend"], PlanAttention) and asked["attend"].plan == made
    both = invoke(*given, "--mask", "window(3, 0)")
    assert both.exit_code == 2 and "--mask and --plan" in both.stderr


def test_one_prompt_streams_new_text_alone_and_figures_go_to_stderr(checkpoint, script):
    asked = script((2,), (3,), (4,))
    done = invoke(checkpoint, "--prompt", "the cat")
    assert (done.exit_code, done.stdout) == (0, "sat on mat\n")
    assert done.stderr.strip() == (
        "7 prompt tokens in 0.50 s, then 15.0 tokens/s, compiled in 1.2 s"
    )
    assert asked["prompts"] == [[0, 1]]
    assert asked["attend"] == DenseAttention()
    assert asked["options"].end_ids == (END,)


def test_every_option_reaches_the_library(checkpoint, script):
    asked = script((2,))
    invoke(
        checkpoint, "--prompt", "the", "--max-new-tokens", "9", "--temperature", "0.5",
        "--top-k", "5", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.3",
        "--seed", "8", "--mask", "window(63, 0)", catch_exceptions=False,
    )  # fmt: skip
    assert asked["options"] == generate.GenerationOptions(
        max_new_tokens=9, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.3,
        seed=8, end_ids=(END,),
    )  # fmt: skip
    assert asked["attend"] == MaskedAttention(Window(63, 0))


def test_several_prompts_are_labelled_and_printed_when_done(checkpoint, script, tmp_path):
    (tmp_path / "prompt.txt").write_text("on the mat\n")
    asked = script((2, 4), (3, None))
    done = invoke(checkpoint, "--prompt", "cat", "--prompt-file", str(tmp_path / "prompt.txt"))
    assert done.stdout == "--- 1: 'cat'\nsat on\n--- 2: 'on the mat'\nmat\n"
    assert asked["prompts"] == [[1], [3, 0, 4]]


def test_json_is_one_object_and_nothing_else(checkpoint, script):
    script((2, 4), (3, None))
    done = invoke(checkpoint, "--prompt", "cat", "--prompt", "on", "--json")
    told = json.loads(done.stdout)
    assert not done.stderr
    assert [row["text"] for row in told["rows"]] == ["sat on", "mat"]
    assert [row["finish"] for row in told["rows"]] == ["length", "end"]
    assert told["rows"][0]["logprobs"] == [-1.0, -1.0]
    assert told["timing"]["tokens_per_second"] == 15.0


def test_ctrl_c_leaves_with_130_and_what_there_is(checkpoint, script):
    script((2,), (3,), error=KeyboardInterrupt())
    done = invoke(checkpoint, "--prompt", "cat")
    assert (done.exit_code, done.stdout) == (130, "sat on\n")
    script((2, 4), (3, None), error=KeyboardInterrupt())
    done = invoke(checkpoint, "--prompt", "cat", "--prompt", "on", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert done.exit_code == 130
    assert [row["text"] for row in rows] == ["sat on", "mat"]
    assert [row["finish"] for row in rows] == ["interrupted", "end"]


def test_a_model_cannot_command_the_terminal(checkpoint, script, monkeypatch):
    script((2,), (WORDS.index("\x07"),))
    assert "\x07" in invoke(checkpoint, "--prompt", "cat").stdout, "a pipe gets what there is"
    monkeypatch.setattr("xsake.cli.generate._is_terminal", lambda: True)
    assert "\x07" not in invoke(checkpoint, "--prompt", "cat").stdout


def test_a_tokenizer_cannot_command_the_terminal(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "evil")
    (tmp_path / "evil" / "tokenizer.json").write_text('{"version": "\\u001b]0;pwned\\u0007"}')
    done = invoke(str(tmp_path / "evil"), "--prompt", "cat")
    assert done.exit_code == 2 and "pwned" in done.output
    assert not set("\x1b\x07\x9b") & set(done.output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no prompt"),
        (["--prompt-file", "no-such-file"], "prompt cannot be read"),
        (["--prompt", "cat", "--temperature", "-1"], "temperature is out of range"),
        (["--prompt", "cat", "--mask", "import os"], "XSK-201"),
        (["--prompt", ""], "empty prompt"),
    ],
)
def test_what_cannot_run_says_why_and_leaves_with_2(checkpoint, arguments, words):
    done = invoke(checkpoint, *arguments)
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


def test_a_folder_without_a_model_leaves_with_2(checkpoint, tmp_path, monkeypatch):
    done = invoke(str(tmp_path), "--prompt", "cat")
    assert (done.exit_code, "tokenizer.json is missing" in done.stderr) == (2, True)

    def refuse(*_, **__):
        raise CheckpointError("a tensor is missing", got="model.norm.weight")

    monkeypatch.setattr(huggingface, "load", refuse)
    done = invoke(checkpoint, "--prompt", "cat")
    assert (done.exit_code, "model.norm.weight" in done.stderr) == (2, True)
