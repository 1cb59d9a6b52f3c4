"""`xsake generate` as its user sees it."""

import json
import shutil

import pytest
import tokenizers

from tests.hads.sample import profile
from tests.model.checkpoints import copied
from xsake.hads import PlanAttention, make_plan
from xsake.hads.policies import KL
from xsake.hads.selectors import Pooled
from xsake.masks import Window
from xsake.model import DenseAttention, MaskedAttention, generate, huggingface
from xsake.model.generate import Continuation, GenerationResult, GenerationTiming

WORDS = ["the", "cat", "sat", "on", "mat", "\x07", "<end>"]
END = WORDS.index("<end>")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A golden checkpoint with a tokenizer of a few words."""
    folder = copied("llama", tmp_path_factory.mktemp("models"), eos_token_id=END)
    words = {word: number for number, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="the"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def invoke(run, model):
    """Runs the command, with this model unless another folder is given."""
    return lambda *words, folder=model, **options: run("generate", folder, *words, **options)


@pytest.fixture
def script(monkeypatch):
    """Puts steps of tokens in the place of a model; returns what it was asked for."""

    def play(*steps, error=None):
        asked = {}

        def speak(model, prompts, options, *, attend, decode_attend, on_token):
            asked.update(prompts=[x.tolist() for x in prompts], options=options, attend=attend)
            for step in steps:
                for row, token in enumerate(step):
                    on_token(row, token)
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


def test_a_model_continues_a_text(invoke):
    arguments = ["--prompt", "the cat", "--temperature", 0, "--max-new-tokens", 3]
    shown = invoke(*arguments)
    assert shown.exit_code == 0, shown.output
    assert "2 prompt tokens in" in shown.stderr and "tokens/s" in shown.stderr
    printed = json.loads(invoke(*arguments, "--json").stdout)
    (row,) = printed["rows"]
    assert len(row["tokens"]) == len(row["logprobs"]) == 3 or row["finish"] == "end"
    assert shown.stdout == row["text"] + "\n"
    assert printed["timing"]["prompt_tokens"] == 2


def test_one_prompt_streams_new_text_alone_and_figures_go_to_stderr(invoke, script):
    asked = script((2,), (3,), (4,))
    done = invoke("--prompt", "the cat")
    assert (done.exit_code, done.stdout) == (0, "sat on mat\n")
    assert done.stderr.strip() == (
        "7 prompt tokens in 0.50 s, then 15.0 tokens/s, compiled in 1.2 s"
    )
    assert asked["prompts"] == [[0, 1]]
    assert asked["attend"] == DenseAttention()
    assert asked["options"].end_ids == (END,)


def test_every_option_reaches_the_library(invoke, script, tmp_path):
    asked = script((2,))
    settings = {
        "max_new_tokens": 9, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.3, "seed": 8,
    }  # fmt: skip
    flags = [x for name, value in settings.items() for x in (f"--{name.replace('_', '-')}", value)]
    invoke("--prompt", "the", *flags, "--mask", "window(63, 0)", catch_exceptions=False)
    assert asked["options"] == generate.GenerationOptions(**settings, end_ids=(END,))
    assert asked["attend"] == MaskedAttention(Window(63, 0))
    made = make_plan(profile(weights=3), KL("pooled"), 0.7, Pooled())
    made.save(tmp_path / "plan.json")
    given = ["--prompt", "the cat", "--plan", tmp_path / "plan.json"]
    assert invoke(*given).exit_code == 0
    assert isinstance(asked["attend"], PlanAttention) and asked["attend"].plan == made
    both = invoke(*given, "--mask", "window(3, 0)")
    assert both.exit_code == 2 and "--mask and --plan" in both.stderr


def test_several_prompts_are_labelled_and_printed_when_done(invoke, script, tmp_path):
    (tmp_path / "prompt.txt").write_text("on the mat\n")
    asked = script((2, 4), (3, None))
    done = invoke("--prompt", "cat", "--prompt-file", tmp_path / "prompt.txt")
    assert done.stdout == "--- 1: 'cat'\nsat on\n--- 2: 'on the mat'\nmat\n"
    assert asked["prompts"] == [[1], [3, 0, 4]]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_json_is_one_object_and_ctrl_c_leaves_with_130_and_what_there_is(invoke, script, error):
    script((2, 4), (3, None), error=error)
    done = invoke("--prompt", "cat", "--prompt", "on", "--json")
    printed = json.loads(done.stdout)
    rows = printed["rows"]
    assert [row["text"] for row in rows] == ["sat on", "mat"]
    assert [row["finish"] for row in rows] == ["length" if error is None else "interrupted", "end"]
    if error is None:
        assert not done.stderr and done.exit_code == 0
        assert rows[0]["logprobs"] == [-1.0, -1.0]
        assert printed["timing"]["tokens_per_second"] == 15.0
    else:
        assert done.exit_code == 130 and printed["timing"] is None
        script((2,), (3,), error=error)
        done = invoke("--prompt", "cat")
        assert (done.exit_code, done.stdout) == (130, "sat on\n")


def test_model_and_tokenizer_cannot_command_the_terminal(
    invoke, script, model, tmp_path, monkeypatch
):
    script((2,), (WORDS.index("\x07"),))
    assert "\x07" in invoke("--prompt", "cat").stdout, "a pipe gets what there is"
    monkeypatch.setattr("xsake.cli.generate._is_terminal", lambda: True)
    assert "\x07" not in invoke("--prompt", "cat").stdout
    shutil.copytree(model, tmp_path / "evil")
    (tmp_path / "evil" / "tokenizer.json").write_text('{"version": "\\u001b]0;pwned\\u0007"}')
    done = invoke("--prompt", "cat", folder=tmp_path / "evil")
    assert done.exit_code == 2 and "pwned" in done.output
    assert not set("\x1b\x07\x9b") & set(done.output)


def test_a_budget_of_pages_needs_a_plan(invoke):
    result = invoke("--prompt", "cat", "--page-budget", "25%")
    assert result.exit_code == 2 and "XSK-102.page-budget-without-plan" in result.output
