"""Chat templates: messages become the prompt that a checkpoint was trained on."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xsake.errors import ArgumentError, CheckpointError, MissingExtraError
from xsake.model.huggingface.files import CheckpointFolder

MAX_TEMPLATE_BYTES = 2**20

_TEMPLATE, _OLDER_TEMPLATE = "chat_template.jinja", "chat_template.json"
_CONFIG, _TOKENS = "tokenizer_config.json", "special_tokens_map.json"
# What an expression of a template may raise, in addition to jinja2's own errors.
_RENDER_ERRORS = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip

Message = Mapping[str, str]
"""`{"role": ..., "content": ...}`."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a checkpoint.

    Args:
        source: in Jinja.
        special_tokens: names and texts, such as ("bos_token", "<s>"); variables of the template.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()

    @classmethod
    def load(cls, directory: str | Path, name: str = "default") -> "ChatTemplate":
        """Load the chat template of a checkpoint.

        Args:
            directory: has chat_template.jinja, or `chat_template` in tokenizer_config.json or in
                chat_template.json; the first of them counts.
            name: of the template, for a checkpoint that has several.
        """
        folder = CheckpointFolder.open(directory)
        config = _read_json(folder, _CONFIG)
        if folder.has(_TEMPLATE):
            templates: Any = _read_text(folder, _TEMPLATE)
        else:
            templates = config.get("chat_template")
            if templates is None:
                templates = _read_json(folder, _OLDER_TEMPLATE).get("chat_template")
        source = _by_name(templates).get(name)
        if source is None:
            raise CheckpointError(
                "no-chat-template", "the checkpoint has no such chat template",
                got=f"templates {sorted(_by_name(templates))}"[:200], expected=name,
                fix="use a checkpoint that was trained on chats, or write the prompt as text",
            )  # fmt: skip
        if "added_tokens_decoder" not in config:
            config = config | _read_json(folder, _TOKENS)
        tokens = ((key, _token_text(config[key])) for key in config if key.endswith("_token"))
        return cls(source, tuple((key, text) for key, text in tokens if text is not None))

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the prompt, which has all special tokens: encode it without adding them.

        The bytes are those of `apply_chat_template(messages, tokenize=False)` of transformers.
        Special tokens in the texts of messages are parsed like those of the template.

        Args:
            messages: role and content of each, as texts.
            add_generation_prompt: end with the start of the assistant's message.
            variables: of the template, such as `enable_thinking=False`.

        Example:
            >>> from xsake.model.chat import ChatTemplate
            >>> template = ChatTemplate("[{{ messages[0].role }}] {{ messages[0].content }}")
            >>> template.render([{"role": "user", "content": "Hi!"}])
            '[user] Hi!'
        """
        _check_messages(messages)
        given = {
            "messages": [dict(message) for message in messages], "tools": None, "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        jinja2 = _import_jinja2()
        template = _compile(self.source)
        try:
            return template.render(given | dict(self.special_tokens) | variables)
        except _RefusedMessages as refused:
            raise ArgumentError(
                "chat-refused", "the chat template rejects these messages", got=str(refused),
                fix="change roles or order of the messages",
            ) from refused  # fmt: skip
        except (jinja2.TemplateError, *_RENDER_ERRORS) as error:
            raise CheckpointError(
                "chat-render", "the chat template fails",
                got=f"{type(error).__name__}: {error}"[:300],
                expected="a template for messages with role and content, without tools",
                fix="correct the template, or write the prompt as text",
            ) from error  # fmt: skip


def _check_messages(messages: Sequence[Message]) -> None:
    is_valid = not isinstance(messages, str) and len(messages) > 0
    for message in messages if is_valid else ():
        is_valid &= isinstance(message, Mapping) and message.keys() == {"role", "content"}
        is_valid = is_valid and all(type(text) is str for text in message.values())
    if not is_valid:
        raise ArgumentError(
            "chat-messages", "invalid messages", got=repr(messages)[:200],
            expected='a list of {"role": text, "content": text}, at least one',
            fix="tools, images and other fields are not supported",
        )  # fmt: skip


def _read_json(folder: CheckpointFolder, name: str) -> dict[str, Any]:
    return folder.json(name, max_bytes=2**24) if folder.has(name) else {}


def _read_text(folder: CheckpointFolder, name: str) -> str:
    try:
        with folder.file(name).open("rb") as file:
            text = file.read(MAX_TEMPLATE_BYTES + 1).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid_template(f"{name}: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _by_name(templates: Any) -> dict[str, str]:
    """Return templates by name; a text alone is the default one."""
    match templates:
        case None:
            return {}
        case str():
            return {"default": templates}
        case list() if all(isinstance(entry, dict) for entry in templates):
            templates = {entry.get("name"): entry.get("template") for entry in templates}
    if isinstance(templates, dict) and all(
        isinstance(text, str) for pair in templates.items() for text in pair
    ):
        return templates
    raise _invalid_template(f"chat_template: {templates!r}"[:200])


def _token_text(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _invalid_template(got: str) -> CheckpointError:
    return CheckpointError(
        "chat-template", "invalid chat template", got=got,
        expected=f"a Jinja template of at most {MAX_TEMPLATE_BYTES} bytes, or a list of named ones",
        fix="take the tokenizer's files from the model's publisher again",
    )  # fmt: skip


class _RefusedMessages(Exception):
    """Raised by a template through `raise_exception`."""


def _import_jinja2() -> Any:
    try:
        import jinja2.ext
        import jinja2.sandbox

        return jinja2
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            "chat-jinja2", "chat templates require the package jinja2",
            fix='pip install "xsake[model]"',
        ) from missing  # fmt: skip


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> Any:
    """Compile a template in a sandbox with the settings and functions of transformers."""
    jinja2 = _import_jinja2()
    if len(source.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
        raise _invalid_template(f"more than {MAX_TEMPLATE_BYTES} bytes")

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, which marks the assistant's text for training."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_render")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _render(self, caller):
            return caller()

    class Namespace(jinja2.utils.Namespace):
        def __init__(self, /, *args, **kwargs):
            super().__init__()
            for name, value in dict(*args, **kwargs).items():
                self[name] = value

        def __setitem__(self, name, value):
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r}")
            super().__setitem__(name, value)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse, "strftime_now": _format_now, "namespace": Namespace
    }  # fmt: skip
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise _invalid_template(f"{type(error).__name__}: {error}"[:300]) from error


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise _RefusedMessages(message)


def _format_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
