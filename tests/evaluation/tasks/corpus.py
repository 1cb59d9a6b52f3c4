"""A made-up language, source code, and tokenizers of three kinds for the tests of tasks."""

import functools
import itertools

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from xsake.evaluation import TextDocument
from xsake.evaluation.tasks.material import TaskMaterial
from xsake.model.chat import ChatTemplate
from xsake.model.tokenizer import Tokenizer

SYLLABLES = (
    "ba", "ke", "lo", "mi", "nu", "pra", "ste", "vo", "ri", "shu", "tan", "del", "gor", "fi",
)  # fmt: skip
WORDS = ["".join(x) for x in itertools.product(SYLLABLES, repeat=3)]
TEMPLATE = ChatTemplate("<|user|>\n{{ messages[0].content }}<|end|>\n<|model|>\n")


@functools.cache
def documents(sentences: int = 1500) -> tuple[TextDocument, ...]:
    rng = np.random.default_rng(0)
    draw = lambda: " ".join(rng.choice(WORDS, int(rng.integers(2, 9)))).capitalize() + "."
    lines = [draw() for _ in range(sentences)]
    return TextDocument("one", " ".join(lines[::2])), TextDocument("two", "\n".join(lines[1::2]))


@functools.cache
def code(files: int = 150) -> tuple[TextDocument, ...]:
    def write(number: int) -> str:
        name = WORDS[number]
        lines = "".join(f"    value = value * {i}\n\n" for i in range(number % 5 + 1))
        return f"import os\n\n\ndef {name}(value):\n{lines}    return value\n\n\nX = {name}(1)\n"

    return tuple(TextDocument(f"lib/{WORDS[-1 - i]}.py", write(i)) for i in range(files))


@functools.cache
def material() -> TaskMaterial:
    return TaskMaterial(documents(), code())


def _bytes() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _byte_pairs() -> tokenizers.Tokenizer:
    inner = _bytes()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False,
        special_tokens=["<|user|>", "<|end|>", "<|model|>"],
    )  # fmt: skip
    inner.train_from_iterator([x.text for x in (*documents(), *code())], trainer)
    return inner


def _spaces_as_letters() -> tokenizers.Tokenizer:
    """Like SentencePiece: a text starts with a space, and spaces are letters of words."""
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False,
        special_tokens=[f"<0x{i:02X}>" for i in range(256)],
        initial_alphabet=list("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"),
    )  # fmt: skip
    inner.train_from_iterator([x.text for x in documents()], trainer)
    return inner


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """A tokenizer: "bytes", "pairs" of them, or "spaces" as letters."""
    make = {"bytes": _bytes, "pairs": _byte_pairs, "spaces": _spaces_as_letters}[kind]
    return Tokenizer(make())
