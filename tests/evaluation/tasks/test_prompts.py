"""Prompts of tasks: exact lengths, answers where the task says, no answer by accident."""

import collections
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.evaluation.tasks import corpus
from xsake.errors import ArgumentError
from xsake.evaluation import TextDocument
from xsake.evaluation.tasks.material import TaskMaterial
from xsake.evaluation.tasks.prompt import PromptEncoder
from xsake.evaluation.tasks.registry import (
    DEPTHS,
    RULER,
    TASKS,
    build_prompt,
    build_prompts,
    parse_tasks,
)
from xsake.model.chat import ChatTemplate

OPENING = (7,)
LISTS = {"cwe", "fwe"}
WITH_NEEDLES = sorted(TASKS.keys() - LISTS)
SEEDS = st.integers(0, 2**31)


def encoder(kind="bytes", template=None):
    tokenizer = corpus.tokenizer(kind)
    return PromptEncoder(tokenizer.encode, tokenizer.vocab_size, OPENING, template)


def build(name, context=2048, sample=0, seed=0, kind="bytes", **options):
    return build_prompt(name, corpus.material(), encoder(kind, **options), context, sample, seed)


def decode(prompt, span=(1, None), kind="bytes"):
    tokens = prompt.tokens[slice(*span)]
    return corpus.tokenizer(kind).decode(tokens, keep_special_tokens=True)


@pytest.mark.parametrize("kind", ["bytes", "pairs", "spaces"])
@pytest.mark.parametrize("name", TASKS)
@given(context=st.integers(1500, 2500), sample=st.integers(0, 9), seed=SEEDS)
@example(context=4096, sample=2, seed=0)
def test_prompt_and_answer_have_exactly_the_tokens_of_the_context(
    name, kind, context, sample, seed
):
    prompt = build(name, context, sample, seed, kind)
    assert len(prompt.tokens) == prompt.context == context
    assert prompt.tokens[0] == OPENING[0] and prompt.answer.end == context
    assert 0 < prompt.answer.start == len(prompt.prompt)
    answer = decode(prompt, prompt.answer, kind)
    assert answer.strip() == ", ".join(prompt.answers)
    for expected, span in zip(prompt.answers, prompt.answer_spans, strict=True):
        assert decode(prompt, span, kind).strip() == expected


@pytest.mark.parametrize("name", WITH_NEEDLES)
@given(sample=st.integers(0, 9), seed=SEEDS)
def test_every_answer_is_in_its_needle_and_nowhere_else(name, sample, seed):
    prompt = build(name, 2000, sample, seed)
    needles = [decode(prompt, span) for span in prompt.needles]
    in_needles = sum(text.count(x) for text in needles for x in prompt.answers)
    assert all(any(x in text for text in needles) for x in prompt.answers)
    question = decode(prompt, (0, prompt.answer.start))
    assert sum(question.count(x) for x in prompt.answers) == in_needles
    ends = [span.end for span in prompt.needles]
    starts = [span.start for span in prompt.needles]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize("seed", [0, 1])
def test_needles_are_at_their_depth(seed):
    for sample, depth in enumerate(DEPTHS):
        prompt = build("niah_single_2", 4000, sample, seed)
        ((start, end),) = prompt.needles
        text = decode(prompt, (0, None))
        first = text.index("at the end.\n") + len("at the end.\n") + len(OPENING) - 1
        last = text.index("\nQuestion:") + len(OPENING) - 1
        position = (start - first) / (last - first - (end - start))
        assert position == pytest.approx(depth, abs=0.03)  # a sentence
        assert prompt.depth == depth


def test_tasks_without_one_needle_have_no_depth():
    assert {x for x in TASKS if build(x).depth is None} == {
        "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe",
    }  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_the_seed_determines_the_prompt_and_changes_it(name):
    first, again, other = build(name), build(name), build(name, seed=1)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert first.digest == again.digest != other.digest
    assert first.answers != other.answers
    assert build(name, sample=5).answers != first.answers
    assert build(name, context=2049).answers != first.answers


@pytest.mark.parametrize("name", TASKS)
def test_a_chat_template_surrounds_all_but_the_start_of_the_answer(name):
    plain, chat = (build(name, kind="pairs", template=x) for x in (None, corpus.TEMPLATE))
    user, message, start = re.fullmatch(
        r"(<\|user\|>\n)(.*)<\|end\|>\n<\|model\|>(.*)",
        decode(chat, (0, chat.answer.start), "pairs"), re.DOTALL,
    ).groups()  # fmt: skip
    assert user and len(chat.tokens) == len(plain.tokens)
    assert start and message.count(start) == (name == "far_copy")
    text = decode(plain, (1, plain.answer.start), "pairs")
    assert text.endswith(start) and message[:30] == text[:30]


def test_distractors_of_other_keys_have_other_values():
    for name, others in (("niah_multikey_1", 3), ("niah_multikey_2", 20), ("niah_multikey_3", 10)):
        text = decode(build(name))
        pairs = re.findall(r"The secret \w+ of (\S+) is (\S+)\.", text)
        keys, values = zip(*pairs, strict=True)
        assert len(pairs) > others
        assert len(set(keys)) == len(set(values)) == len(pairs)


def test_several_values_are_in_the_order_of_the_text_and_several_keys_in_that_of_the_question():
    for seed in range(5):
        prompt = build("niah_multivalue", seed=seed)
        text = decode(prompt, (1, prompt.answer.start))
        pairs = re.findall(r"of (\S+) is (\d+)\.", text)
        assert [value for _, value in pairs] == list(prompt.answers)
        assert len({key for key, _ in pairs}) == 1
        prompt = build("niah_multiquery", seed=seed)
        text = decode(prompt, (1, prompt.answer.start))
        values = dict(re.findall(r"of (\S+) is (\d+)\.", text))
        keys = re.search(r"Answer: The secret numbers of (.*) are", text)[1].split(", ")
        assert [values[key] for key in keys] == list(prompt.answers) and len(keys) == 4


def test_a_chain_of_variables_can_be_followed():
    for seed in range(5):
        prompt = build("vt", seed=seed)
        text = decode(prompt, (1, prompt.answer.start)).partition("\n")[2].partition("\n")[2]
        assigned = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", text))
        value = re.search(r"Which variables have the value (\d+)", text)[1]
        chain = [value]
        for name in prompt.answers:
            assert assigned[name] == chain[-1]
            chain.append(name)
        assert len(chain) == 6


@pytest.mark.parametrize("context", [1500, 3000, 9000])
def test_common_words_are_far_more_common_than_others(context):
    prompt = build("cwe", context)
    text = decode(prompt, (1, prompt.answer.start)).split("List:\n")[1].split("\nQuestion")[0]
    words = re.findall(r"\d+\. (\w+)", text)
    counts = collections.Counter(words)
    assert len({counts[word] for word in prompt.answers}) == 1
    most = counts.most_common()
    assert {word for word, _ in most[:10]} == set(prompt.answers)
    assert most[9][1] >= 4 * most[10][1]
    assert list(dict.fromkeys(x for x in words if x in prompt.answers)) == list(prompt.answers)
    assert not [x for x in set(words) - set(prompt.answers) if any(y in x for y in prompt.answers)]
    assert len(text.partition("1.")[0]) < 0.1 * context  # what is cut off and added


@pytest.mark.parametrize("context", [1000, 3000, 9000])
def test_frequent_words_are_those_of_the_answer_in_its_order(context):
    prompt = build("fwe", context)
    text = decode(prompt, (1, prompt.answer.start)).split("\n")[1]
    counts = collections.Counter(text.split()).most_common(4)
    assert tuple(word for word, _ in counts[:3]) == prompt.answers
    assert len({count for _, count in counts}) == 4
    assert counts[0][1] / counts[1][1] == pytest.approx(4, rel=0.15)  # 2**alpha


def test_a_function_is_defined_once_and_its_file_is_the_answer():
    material = corpus.material()
    files = {document.name: document.text for document in material.code}
    for seed in range(5):
        prompt = build("find_definition", seed=seed)
        text = decode(prompt, (1, prompt.answer.start))
        name = re.search(r"Which file defines the function (\w+)\?", text)[1]
        assert text.count(f"def {name}(") == 1
        assert f"def {name}(" in files[prompt.answers[0]]
        assert text.count(prompt.answers[0]) == 1


def test_functions_are_the_first_lines_of_definitions_at_the_top_level():
    text = "class A:\n    def inner(self):\n        pass\n\n\n"
    text += "def outer(x):\n    y = 1\n\n    return x\n"
    twice = "def twice():\n    pass\n"
    long = "def long():\n" + "    pass\n" * 50
    names = {"a.py": text + twice, "b.py": twice, "c.py": long}
    material = TaskMaterial((), tuple(TextDocument(x, y) for x, y in names.items()))
    outer, last = material.functions
    assert (outer.path, outer.name) == ("a.py", "outer")
    assert outer.excerpt == "# file: a.py\ndef outer(x):\n    y = 1\n\n    return x\n\n"
    assert last.name == "long" and len(last.text.splitlines()) == 20


def test_prompts_are_in_the_order_of_tasks_contexts_and_samples():
    prompts = build_prompts(
        ["vt", "key_value"], corpus.material(), encoder(), contexts=(1500, 1000), samples=2, seed=0
    )
    assert [(x.task, x.context, x.sample) for x in prompts] == [
        (name, context, sample)
        for name in ("vt", "key_value")
        for context in (1500, 1000)
        for sample in (0, 1)
    ]


def test_groups_and_names_are_parsed():
    assert parse_tasks("ruler") == tuple(RULER) and len(RULER) == 11
    assert parse_tasks("all") == tuple(TASKS) and len(TASKS) == 14
    assert parse_tasks("vt, ruler,far_copy")[::11] == ("vt", "far_copy")


@pytest.mark.parametrize("text", ["niah", "vt,,cwe", ""])
def test_an_unknown_task_is_refused_with_the_known_ones(text):
    with pytest.raises(ArgumentError, match=r"(?s)unknown-task.*niah_single_1.*find_definition"):
        parse_tasks(text)


TINY = TaskMaterial((TextDocument("tiny", "A few words are here. And more of them."),))
FEW = TaskMaterial((TextDocument("few", "The cat sat on the mat. " * 500),), corpus.code(1))


@pytest.mark.parametrize(
    ("name", "given", "context", "slug"),
    [
        ("niah_single_1", corpus.material(), 100, "task-context"),
        ("far_copy", TINY, 1000, "task-passage"),
        ("far_copy", FEW, 2000, "task-answer-in-text"),
        ("niah_single_1", TINY, 1000, "task-words"),
        ("cwe", FEW, 2000, "task-words"),
        ("cwe", corpus.material(), 400, "task-list"),
        ("fwe", corpus.material(), 300, "task-list"),
        ("find_definition", FEW, 2000, "task-text"),
        ("find_definition", TINY, 2000, "task-code"),
    ],
)
def test_what_cannot_be_made_is_refused(name, given, context, slug):
    with pytest.raises(ArgumentError, match=rf"XSK-102\.{slug}\b"):
        build_prompt(name, given, encoder(), context, 0, 0)


def test_a_chat_template_without_the_message_is_refused():
    for source in ("no message", "{{ messages[0].content }} {{ messages[0].content }}"):
        with pytest.raises(ArgumentError, match="task-template"):
            encoder("pairs", ChatTemplate(source))


def test_a_tokenizer_of_another_model_is_refused():
    tokenizer = corpus.tokenizer("pairs")
    with pytest.raises(ArgumentError, match="evaluation-vocabulary"):
        build_prompt("vt", corpus.material(), PromptEncoder(tokenizer.encode, 100), 1000, 0, 0)
    merging = lambda text: np.array([len(text)], np.int32)
    with pytest.raises(ArgumentError, match="task-tokenizer"):
        build_prompt("vt", corpus.material(), PromptEncoder(merging, 10**6), 1000, 0, 0)
