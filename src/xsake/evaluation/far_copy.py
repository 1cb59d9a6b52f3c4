"""Far-copy probe: a passage, a gap of other text, and a copy of the passage.

A model with long-range attention predicts the second copy far better than the first. Perplexity
hardly shows this, because most tokens depend on nearby tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from xsake.evaluation.documents import TextDocument
from xsake.evaluation.trial import TokenSpan, Trial
from xsake.evaluation.windows import TokenizedTexts

PASSAGE = 512


@dataclasses.dataclass(frozen=True)
class FarCopy:
    """One passage at one gap; spans are the first and the second copy.

    Both spans exclude the first token of the copy, so that they have the same tokens, each
    predicted from inside its copy.
    """

    gap: int
    sample: int
    trial: Trial


@dataclasses.dataclass(frozen=True)
class ProbeMaterial:
    """Passage and gap text of one sample."""

    passage: Int[np.ndarray, " n"]
    filler: Int[np.ndarray, " m"]
    label: str


def far_copies(
    tokenized: TokenizedTexts,
    documents: Sequence[TextDocument],
    gaps: Sequence[int],
    *,
    samples: int = 2,
    passage: int = PASSAGE,
    seed: int = 0,
    max_tokens: int | None = None,
    tokens: int | None = None,
) -> tuple[list[FarCopy], list[str]]:
    """Build the sequences of the probe, determined by documents and seed.

    A sample has the same passage at every gap, and a shorter gap is a prefix of a longer one.

    Args:
        tokenized: tokens of the documents.
        documents: sources of passages and gaps, different ones if there are several.
        gaps: tokens between the end of the first copy and the start of the second.
        samples: number of passages.
        passage: tokens of a copy, at least 2.
        seed: of passages and gaps.
        max_tokens: maximum context of the model; None: any.
        tokens: the only length that the attention supports; sequences are padded at the end.

    Returns:
        The sequences, and a note for each skipped gap.
    """
    overhead = 2 * passage + len(tokenized.opening)
    limit = min((x for x in (max_tokens, tokens) if x is not None), default=None)
    valid_gaps = [gap for gap in gaps if limit is None or overhead + gap <= limit]
    notes = [
        f"far copy: skipped gap {gap}, its {overhead + gap} tokens exceed the limit of {limit}"
        for gap in gaps
        if gap not in valid_gaps
    ]
    copies: list[FarCopy] = []
    pool = [(document.name, tokenized.tokens(document)) for document in documents]
    for sample in range(samples):
        material = _material(pool, passage, max(valid_gaps, default=0), sample, seed)
        if material is None:
            return [], [*notes, f"far copy: no document has {passage} tokens"]
        for gap in valid_gaps:
            if gap > len(material.filler):
                notes.append(
                    f"far copy: skipped gap {gap} in sample {sample + 1}, the texts have only "
                    f"{len(material.filler)} more tokens"
                )
                continue
            trial = _trial(material, gap, sample, tokenized.opening, tokens)
            copies.append(FarCopy(gap, sample, trial))
    return copies, notes


def _material(
    pool: list[tuple[str, np.ndarray]], passage: int, gap: int, sample: int, seed: int
) -> ProbeMaterial | None:
    """Draw a passage from one document and up to `gap` tokens from others."""
    # One shuffle for all samples, so that they use different documents while there are enough.
    order = np.random.default_rng(seed).permutation(len(pool))
    long_enough = [index for index in order if len(pool[index][1]) >= passage]
    if not long_enough:
        return None
    rng = np.random.default_rng([seed, sample])
    chosen = int(long_enough[sample % len(long_enough)])
    name, document = pool[chosen]
    position = order.tolist().index(chosen)
    others = [pool[index][1] for index in (*order[position + 1 :], *order[:position])]
    if sum(map(len, others)) >= min(gap, len(document) - passage):
        start = int(rng.integers(len(document) - passage + 1))
        skipped = int(rng.integers(max(0, len(others[0]) - gap) + 1)) if others else 0
        filler = np.concatenate([document[:0], *others])[skipped : skipped + gap]
    else:
        # A single document: the passage from its first half, the gap from its end.
        start = int(rng.integers(max(0, len(document) - gap - passage) // 2 + 1))
        filler = document[max(start + passage, len(document) - gap) :]
    label = f"{name} at {start}"
    return ProbeMaterial(document[start : start + passage], filler, label)


def _trial(
    material: ProbeMaterial, gap: int, sample: int, opening: np.ndarray, tokens: int | None
) -> Trial:
    passage, gap_text = material.passage, material.filler[:gap]
    sequence = np.concatenate([opening, passage, gap_text, passage])
    if tokens is not None:
        sequence = np.pad(sequence, (0, tokens - len(sequence)))
    starts = len(opening), len(opening) + len(passage) + gap
    spans = tuple(TokenSpan(start + 1, start + len(passage)) for start in starts)
    return Trial(f"far copy {sample + 1} over {gap}", material.label, sequence, spans)
