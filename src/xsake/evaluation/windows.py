"""Tokenized documents and the windows that are evaluated."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from xsake.errors import ArgumentError
from xsake.evaluation.documents import TextDocument
from xsake.evaluation.trial import Trial, position_spans

Encode = Callable[[str], np.ndarray]


class TokenizedTexts:
    """Documents that are tokenized on first use.

    Args:
        documents: in order.
        encode: from a text to token ids.
        vocabulary: vocabulary size of the model; larger ids raise.
        opening: token ids at the start of every sequence, such as BOS.
    """

    def __init__(
        self,
        documents: Sequence[TextDocument],
        encode: Encode,
        vocabulary: int,
        opening: Sequence[int] = (),
    ):
        self.documents = tuple(documents)
        self.opening = np.asarray(opening, np.int32)
        self._encode, self._vocabulary = encode, vocabulary
        self._tokens: dict[str, np.ndarray] = {}

    def tokens(self, document: TextDocument) -> Int[np.ndarray, " n"]:
        """Return all tokens of a document."""
        if document.name not in self._tokens:
            tokens = np.asarray(self._encode(document.text), np.int32)
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
                raise ArgumentError(
                    "token ids exceed the model's vocabulary",
                    got=f"token ids up to {tokens.max()} in {document.name}",
                    expected=f"ids below {self._vocabulary}",
                    fix="use the tokenizer of this model",
                )
            self._tokens[document.name] = tokens
        return self._tokens[document.name]


@dataclasses.dataclass(frozen=True)
class WindowSet:
    """Windows of one length.

    Args:
        context: tokens of each.
        trials: the windows.
        documents: of the windows.
        too_short: number of skipped documents with fewer tokens.
    """

    context: int
    trials: tuple[Trial, ...]
    documents: tuple[TextDocument, ...]
    too_short: int


def cut_windows(
    tokenized: TokenizedTexts, context: int, *, per_document: int = 1, limit: int | None = None
) -> WindowSet:
    """Split documents into windows from their start; short documents are skipped.

    Args:
        tokenized: the documents.
        context: tokens per window, the opening included.
        per_document: maximum number of consecutive windows of a document.
        limit: maximum number of documents; None: all.
    """
    trials, used, too_short = [], [], 0
    size = context - len(tokenized.opening)
    for document in tokenized.documents:
        if len(used) == limit:
            break
        tokens = tokenized.tokens(document)
        count = min(per_document, len(tokens) // size)
        if count == 0:
            too_short += 1
            continue
        used.append(document)
        for number in range(count):
            part = tokens[number * size : (number + 1) * size]
            label = f"{context} tokens, {document.name}, window {number + 1}"
            sequence = np.concatenate([tokenized.opening, part])
            trials.append(Trial(label, document.name, sequence, position_spans(context)))
    return WindowSet(context, tuple(trials), tuple(used), too_short)
