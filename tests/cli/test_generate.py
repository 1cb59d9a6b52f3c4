"""`xsake generate` as its user sees it."""

import json
import shutil

import numpy as np
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

        def speak(model, prompts, options, *, tokenizer, on_finish, numbers, **others):
            asked.update(others, prompts=[x.tolist() for x in prompts], options=options)
            asked.update(numbers=list(numbers), asked=asked.get("asked", 0) + 1)
            rows = []
            for tokens in zip(*steps, strict=True):
                words = [token for token in tokens if token is not None]
                finish = "length" if len(words) == len(steps) else "end"
                text = tokenizer.decode(words)
                rows.append(Continuation(tuple(words), (-1.0,) * len(words), finish, text))
            if "on_token" in others:
                streams = [tokenizer.stream() for _ in rows]
                for step in steps:
                    for number, token in enumerate(step):
                        others["on_token"](number, token)
                        if token is not None:
                            others["on_text"](number, streams[number].push(token))
            for number, row in reversed(list(zip(numbers, rows, strict=True))):
                if error is not None and row.finish == "length":
                    raise error
                on_finish(number, row)
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
    assert asked["options"] == generate.GenerationOptions(end_ids=(END,))


def test_every_option_reaches_the_library(invoke, script, tmp_path):
    asked = script((2,))
    settings = {
        "max_new_tokens": 9, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.3, "seed": 8,
    }  # fmt: skip
    flags = [x for name, value in settings.items() for x in (f"--{name.replace('_', '-')}", value)]
    flags += ["--stop", "x", "--stop", "yz", "--batch-size", 3]
    invoke("--prompt", "the", *flags, "--mask", "window(63, 0)", catch_exceptions=False)
    settings["stop"] = ("x", "yz")
    assert asked["options"] == generate.GenerationOptions(**settings, end_ids=(END,))
    assert asked["batch_size"] == 3
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


def test_a_draft_is_verified_by_dense_attention(invoke, script, tmp_path):
    asked = script((2,), (3,))
    measured = profile(weights=3)
    sizes = measured.model
    components = np.tile(np.arange(sizes.head_dim), (sizes.layers, sizes.kv_heads, 1))
    measured = measured.model_copy(update={"components": components})
    made = make_plan(measured, KL("pooled"), 0.7, Pooled())
    made.save(tmp_path / "plan.json")
    given = ["--prompt", "the cat", "--plan", tmp_path / "plan.json", "--draft-tokens", "3"]
    result = invoke(*given, "--page-budget", "25%")
    assert result.exit_code == 0, result.output
    draft = asked["draft"]
    assert isinstance(asked["attend"], DenseAttention) and draft.num_tokens == 3
    assert draft.attend.budget == 0.25 and draft.attend.plan == made
    alone = invoke(*given)
    assert alone.exit_code == 2 and "XSK-102.draft-without-page-budget" in alone.output


CHAT = """{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}
{{ 'mat' if add_generation_prompt }}"""


@pytest.fixture
def chat_model(model, tmp_path):
    """The checkpoint with a chat template, whose roles are words of its tokenizer."""
    folder = shutil.copytree(model, tmp_path / "chat")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    words = ["system", "user", "assistant"]
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"] |= {word: len(WORDS) + i for i, word in enumerate(words)}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def test_a_chat_uses_the_template_of_the_checkpoint(invoke, script, chat_model, tmp_path):
    asked = script((2,))
    assert invoke("--prompt", "cat", "--chat", folder=chat_model).exit_code == 0
    assert asked["prompts"] == [[8, 1, 4]]
    invoke("--prompt", "cat", "--chat", "--system", "sat", folder=chat_model)
    assert asked["prompts"] == [[7, 2, 8, 1, 4]]
    messages = [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "on"}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": messages}))
    done = invoke("--input", tmp_path / "in.jsonl", folder=chat_model)
    assert asked["prompts"] == [[8, 1, 9, 3, 4]] and done.stdout == "sat\n"
    alone = invoke("--prompt", "cat", "--system", "sat", folder=chat_model)
    assert alone.exit_code == 2 and "XSK-102.option-alone" in alone.output
    assert "no-chat-template" in invoke("--prompt", "cat", "--chat").output


def test_options_that_are_not_given_come_from_the_folders_file(invoke, script, chat_model):
    file = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 5}
    (chat_model / "generation_config.json").write_text(json.dumps(file))
    asked = script((2,))
    invoke("--prompt", "cat", "--generation-config", "--top-p", 0.5, folder=chat_model)
    assert asked["options"] == generate.GenerationOptions(
        max_new_tokens=5, temperature=0.6, top_k=50, top_p=0.5, end_ids=(END,)
    )
    invoke("--prompt", "cat", folder=chat_model)
    assert asked["options"] == generate.GenerationOptions(end_ids=(END,))


@pytest.fixture
def files(tmp_path):
    """Prompts in a file, and where their outputs belong."""
    lines = [{"id": "a", "prompt": "the cat"}, {"prompt": "on"}, {"id": 7, "prompt": "sat on"}]
    source, target = tmp_path / "in.jsonl", tmp_path / "out" / "out.jsonl"
    source.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return source, target


def outputs(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_outputs_are_written_as_they_end_and_in_order_at_the_end(invoke, script, files):
    source, target = files
    asked = script((2, 3, 4), (3, None, 1))
    done = invoke("--input", source, "--output", target, "--logprobs")
    assert done.exit_code == 0, done.output
    assert [(row["index"], row.get("id"), row["text"]) for row in outputs(target)] == [
        (0, "a", "sat on"), (1, None, "on"), (2, 7, "mat cat"),
    ]  # fmt: skip
    assert outputs(target)[1]["finish"] == "end" and outputs(target)[1]["logprobs"] == [-1.0]
    assert "prompt 1 of 3: 2 tokens, length" in done.stderr
    again = invoke("--input", source, "--output", target, "--logprobs")
    assert asked["asked"] == 1 and "3 outputs, 3 of an earlier run" in again.stderr


def test_an_interrupted_run_resumes_with_the_missing_outputs(invoke, script, files):
    source, target = files
    script((2, 3, 4), (None, 1, None), error=KeyboardInterrupt())
    command = ("--input", source, "--output", target)
    done = invoke(*command)
    assert done.exit_code == 130 and "to resume" in done.stderr
    assert [row["index"] for row in outputs(target)] == [2]
    with target.open("a") as file:
        file.write('{"index": 1, "text"')  # killed within a line
    asked = script((2, 3), (3, 1))
    done = invoke(*command, "--batch-size", 1)
    assert done.exit_code == 0, done.output
    assert asked["numbers"] == [0, 1] and asked["prompts"] == [[0, 1], [3]]
    assert [(row["index"], row["text"]) for row in outputs(target)] == [
        (0, "sat on"), (1, "on cat"), (2, "mat"),
    ]  # fmt: skip
    assert "logprobs" not in outputs(target)[0]


def test_an_output_of_another_job_is_refused_and_can_be_replaced(invoke, script, files):
    source, target = files
    script((2, 3, 4))
    command = ("--input", source, "--output", target)
    assert invoke(*command).exit_code == 0
    kept = target.read_text()
    changed = source.read_text().replace('"on"', '"the"')
    for other in (["--seed", 1], ["--stop", "x"], ["--mask", "window(3, 0)"], ["--logprobs"], None):
        if other is None:
            source.write_text(changed)
        done = invoke(*command, *(other or []))
        assert done.exit_code == 2 and "XSK-102.output-job" in done.output, done.output
        assert target.read_text() == kept
    assert invoke(*command, "--no-resume").exit_code == 0
    assert target.read_text() != kept
    done = invoke("--input", source, "--output", source, "--no-resume")
    assert "XSK-102.output-is-input" in done.output and source.read_text() == changed
