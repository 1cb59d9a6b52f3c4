"""Chat templates: the bytes of transformers, and templates and messages that are refused."""

import datetime
import json
import sys
from pathlib import Path

import pytest

from tests.malformed import refused_type
from xsake.errors import ArgumentError, CheckpointError, MissingExtraError
from xsake.model.chat import MAX_TEMPLATE_BYTES, ChatTemplate, _compile

CHATS = Path(__file__).parent / "chat"
GOLDEN = json.loads((CHATS / "golden.json").read_text())["prompts"]
CONVERSATIONS = json.loads((CHATS / "conversations.json").read_text())
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def config(tmp_path):
    """Writes tokenizer_config.json and gives its folder."""

    def write(**values):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
        return tmp_path

    return write


@pytest.mark.parametrize("name", GOLDEN)
def test_prompts_are_those_of_transformers(name):
    template = ChatTemplate.load(CHATS / name)
    assert GOLDEN[name].keys() == CONVERSATIONS.keys()
    for conversation, prompts in GOLDEN[name].items():
        for starts_answer, prompt in zip((False, True), prompts, strict=True):
            try:
                rendered = template.render(
                    CONVERSATIONS[conversation], add_generation_prompt=starts_answer
                )
            except ArgumentError as error:
                assert (error.slug, prompt) == ("chat-refused", None)
            else:
                assert rendered == prompt


def test_a_refusal_quotes_the_template():
    with pytest.raises(ArgumentError, match="Roles must alternate"):
        ChatTemplate.load(CHATS / "mistral").render(CONVERSATIONS["wrong order"])


def test_variables_and_the_date_reach_the_template():
    assert "Today: May 5" in ChatTemplate.load(CHATS / "llama3").render(HI, date_string="May 5")
    year = ChatTemplate("{{ strftime_now('%Y') }}").render(HI)
    assert abs(int(year) - datetime.datetime.now().year) <= 1


def test_named_templates_and_the_older_file(config, tmp_path):
    assert ChatTemplate.load(CHATS / "named", "tool_use").render(HI) == "not this one"
    with pytest.raises(CheckpointError, match=r"(?s)no-chat-template.*'default', 'tool_use'"):
        ChatTemplate.load(CHATS / "named", "rag")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "older"}')
    assert ChatTemplate.load(tmp_path).render(HI) == "older"
    assert ChatTemplate.load(config(chat_template="newer")).render(HI) == "newer"
    (tmp_path / "chat_template.jinja").write_text("newest")
    assert ChatTemplate.load(tmp_path).render(HI) == "newest"


def test_a_folder_without_a_template_and_invalid_ones_are_refused(config, tmp_path):
    with pytest.raises(CheckpointError, match="XSK-601.no-chat-template"):
        ChatTemplate.load(tmp_path)
    for templates in (5, [5], [{"name": "default"}], {"default": 5}):
        with pytest.raises(CheckpointError, match="XSK-601.chat-template"):
            ChatTemplate.load(config(chat_template=templates))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="XSK-601.chat-template"):
        ChatTemplate.load(tmp_path)
    for source in ("{% if %}", "{{", "{% endfor %}", "a" * (MAX_TEMPLATE_BYTES + 1)):
        with pytest.raises(CheckpointError, match="XSK-601.chat-template"):
            ChatTemplate(source).render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role=1) }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ tools | length }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_can_neither_leave_its_sandbox_nor_fail_without_a_name(source):
    with pytest.raises(CheckpointError, match="XSK-601.chat-render"):
        ChatTemplate(source).render(HI)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        ["hi"],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": "hi", "tool_calls": []}],
    ],
)
def test_messages_are_texts_with_roles(messages):
    with refused_type("XSK-102.chat-messages"):
        ChatTemplate("").render(messages)


def test_without_jinja2_it_says_what_to_install(monkeypatch):
    _compile.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "jinja2.ext", None)
    with pytest.raises(MissingExtraError, match=r'pip install "xsake\[model\]"'):
        ChatTemplate("").render(HI)
