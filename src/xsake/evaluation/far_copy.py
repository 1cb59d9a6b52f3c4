"""The far-copy probe: a passage, a gap of other text, and the passage once more.

A model that can look back across the gap predicts the second copy far better than the first.
Perplexity hardly shows whether it can: most tokens are predicted from what is near.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from xsake.evaluation.documents import Document
from xsake.evaluation.trial import Span, Trial
from xsake.evaluation.windows import Library

PASSAGE = 512


@dataclasses.dataclass(frozen=True)
class FarCopy:
    """One passage at one distance; the first span is the first copy, the second the second.

    Both spans leave out the first token of the copy, which the second time is predicted from the
    gap's text: they hold the same tokens, each predicted from inside its copy.
    """

    gap: int
    sample: int
    trial: Trial


@dataclasses.dataclass(frozen=True)
class Material:
    """What one sample is made of."""

    passage: Int[np.ndarray, " n"]
    filler: Int[np.ndarray, " m"]
    label: str


def far_copies(
    library: Library,
    documents: Sequence[Document],
    gaps: Sequence[int],
    *,
    samples: int = 2,
    passage: int = PASSAGE,
    seed: int = 0,
    most: int | None = None,
    tokens: int | None = None,
) -> tuple[list[FarCopy], list[str]]:
    """Sequences of the probe; the same for the same documents and seed.

    A sample has the same passage at every gap, and a shorter gap is the start of a longer one.

    Args:
        library: turns documents into tokens.
        documents: where passages and gaps come from: different ones if there are several.
        gaps: tokens between the end of the first copy and the start of the second.
        samples: passages.
        passage: tokens of a copy, at least 2.
        seed: draws passages and what lies between.
        most: tokens that the model has positions for; None: any number.
        tokens: the only length that the attention serves, if there is one: sequences are filled up
            to it at the end, where causality hides it.

    Returns:
        The sequences, and a sentence for each gap that is left out.
    """
    around = 2 * passage + len(library.opening)
    limit = min((x for x in (most, tokens) if x is not None), default=None)
    fitting = [gap for gap in gaps if limit is None or around + gap <= limit]
    notes = [
        f"far copy: no gap of {gap}, its {around + gap} tokens are more than the {limit} possible"
        for gap in gaps
        if gap not in fitting
    ]
    found: list[FarCopy] = []
    pool = [(document.name, library.tokens(document)) for document in documents]
    for sample in range(samples):
        material = _material(pool, passage, max(fitting, default=0), sample, seed)
        if material is None:
            return [], [*notes, f"far copy: no document has {passage} tokens"]
        for gap in fitting:
            if gap > len(material.filler):
                notes.append(
                    f"far copy: no gap of {gap} in sample {sample + 1}, the texts have "
                    f"{len(material.filler)} more tokens"
                )
                continue
            trial = _trial(material, gap, sample, library.opening, tokens)
            found.append(FarCopy(gap, sample, trial))
    return found, notes


def _material(
    pool: list[tuple[str, np.ndarray]], passage: int, gap: int, sample: int, seed: int
) -> Material | None:
    """A passage from one document and `gap` tokens from others, fewer if there are no more."""
    # Documents are dealt out by one shuffle, so that samples share none while there are enough.
    order = np.random.default_rng(seed).permutation(len(pool))
    long_enough = [index for index in order if len(pool[index][1]) >= passage]
    if not long_enough:
        return None
    rng = np.random.default_rng([seed, sample])
    chosen = int(long_enough[sample % len(long_enough)])
    name, own = pool[chosen]
    place = order.tolist().index(chosen)
    others = [pool[index][1] for index in (*order[place + 1 :], *order[:place])]
    if sum(map(len, others)) >= min(gap, len(own) - passage):
        start = int(rng.integers(len(own) - passage + 1))
        skipped = int(rng.integers(max(0, len(others[0]) - gap) + 1)) if others else 0
        filler = np.concatenate([own[:0], *others])[skipped : skipped + gap]
    else:
        # One text has to give both: the passage from its first half, the gap from its end.
        start = int(rng.integers(max(0, len(own) - gap - passage) // 2 + 1))
        filler = own[max(start + passage, len(own) - gap) :]
    label = f"{name} at {start}"
    return Material(own[start : start + passage], filler, label)


def _trial(
    material: Material, gap: int, sample: int, opening: np.ndarray, tokens: int | None
) -> Trial:
    passage, gap_text = material.passage, material.filler[:gap]
    sequence = np.concatenate([opening, passage, gap_text, passage])
    if tokens is not None:
        sequence = np.pad(sequence, (0, tokens - len(sequence)))
    starts = len(opening), len(opening) + len(passage) + gap
    spans = tuple(Span(start + 1, start + len(passage)) for start in starts)
    return Trial(f"far copy {sample + 1} over {gap}", material.label, sequence, spans)
