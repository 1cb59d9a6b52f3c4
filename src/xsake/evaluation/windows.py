"""Documents as tokens, and the windows of them that are evaluated; knows no model."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from xsake.errors import ArgumentError
from xsake.evaluation.documents import Document
from xsake.evaluation.trial import Trial, position_spans

Encode = Callable[[str], np.ndarray]


class Library:
    """Documents that are turned into tokens when first asked for.

    Args:
        documents: in order.
        encode: from a text to token ids.
        vocabulary: ids that the model knows; a larger one is refused.
        opening: ids that open every sequence the model reads, such as a token for the beginning.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        encode: Encode,
        vocabulary: int,
        opening: Sequence[int] = (),
    ):
        self.documents = tuple(documents)
        self.opening = np.asarray(opening, np.int32)
        self._encode, self._vocabulary = encode, vocabulary
        self._known: dict[str, np.ndarray] = {}

    def tokens(self, document: Document) -> Int[np.ndarray, " n"]:
        """All tokens of a document."""
        if document.name not in self._known:
            tokens = np.asarray(self._encode(document.text), np.int32)
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
                raise ArgumentError(
                    "the tokenizer knows tokens that the model does not",
                    got=f"token ids up to {tokens.max()} in {document.name}",
                    expected=f"ids below the vocabulary of {self._vocabulary}",
                    fix="take the tokenizer of this very model",
                )
            self._known[document.name] = tokens
        return self._known[document.name]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The windows of one length.

    Args:
        context: tokens of each.
        trials: the windows.
        documents: that they were cut from.
        too_short: documents that were looked at and had fewer tokens.
    """

    context: int
    trials: tuple[Trial, ...]
    documents: tuple[Document, ...]
    too_short: int


def cut_windows(
    library: Library, context: int, *, per_document: int = 1, limit: int | None = None
) -> Cut:
    """Windows from the start of every document that is long enough for one.

    Args:
        library: the documents.
        context: tokens per window, the library's opening included.
        per_document: at most so many windows of a document, one after the other.
        limit: documents to take, the first that are long enough; None: all.
    """
    trials, taken, too_short = [], [], 0
    size = context - len(library.opening)
    for document in library.documents:
        if len(taken) == limit:
            break
        tokens = library.tokens(document)
        count = min(per_document, len(tokens) // size)
        if count == 0:
            too_short += 1
            continue
        taken.append(document)
        for number in range(count):
            part = tokens[number * size : (number + 1) * size]
            label = f"{context} tokens, {document.name}, window {number + 1}"
            read = np.concatenate([library.opening, part])
            trials.append(Trial(label, document.name, read, position_spans(context)))
    return Cut(context, tuple(trials), tuple(taken), too_short)
