"""The model with several attentions compared with dense attention, on the same texts."""

import dataclasses
import hashlib
import json
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks import baselines
from benchmarks.hads.corpus import Document
from benchmarks.hads.ruled import Ruled
from xsake._provenance import source_digest
from xsake.evaluation.documents import TextDocument as Text
from xsake.evaluation.record import CachedResult, ResultCache
from xsake.evaluation.score import Scores, score_chunks
from xsake.evaluation.summary import estimate
from xsake.evaluation.trial import TokenizedTexts, Trial, far_copies, position_spans
from xsake.model import AttentionFn, Decoder, DenseAttention

GAPS = (1024, 2048, 4096)
SAMPLES = 2
CHUNK = 256
SOURCES = (
    "attention", "evaluation/score.py", "hads/sparse_attention.py", "hads/budget.py",
    "hads/topk.py", "hads/hooks.py", "hads/plan.py", "hads/selectors", "kernels", "layout",
    "masks", "model",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question: what the model reads, and the gap between copies if it is a far copy."""

    trial: Trial
    gap: int | None


class ModelComparison:
    """A model, and how it reads with each attention.

    Args:
        model: the decoder.
    """

    def __init__(self, model: Decoder):
        self.model = model
        self._read = {}
        self._dense: tuple[str, jax.Array] | None = None
        self.add("dense", DenseAttention())

    def add(self, name: str, attend: AttentionFn) -> None:
        """One more attention, compiled whole."""
        self._read[name] = jax.jit(lambda m, t: m.hidden(t, attend=attend))

    def add_rule(self, name: str, ruled: Ruled) -> None:
        """A published rule, which runs layer by layer."""
        self._read[name] = lambda m, t: m.hidden(t, attend=ruled)

    def sums(self, side: str, trial: Trial) -> dict[str, list[float]]:
        """The scores of one side on one trial, summed over its spans."""
        tokens = np.asarray(trial.tokens, np.int32)
        if self._dense is None or self._dense[0] != trial.digest:
            self._dense = trial.digest, self._read["dense"](self.model, tokens[None])[0, :-1]
        hidden = self._dense[1], self._read[side](self.model, tokens[None])[0, :-1]
        found = score_chunks(self.model, hidden, tokens[1:], chunk=CHUNK)
        sums = Scores(*(np.asarray(part) for part in found)).sums(trial.spans)
        assert all(np.isfinite(values).all() for values in sums.values()), f"{side}: {sums}"
        return sums

    def answer(self, side: str, trial: Trial, known: list, journal: ResultCache) -> CachedResult:
        """The sums of one side on one trial, from the journal if they are there.

        Args:
            side: its name.
            trial: what is read.
            known: all that the result depends on, except trial and sources.
            journal: keeps answers.
        """
        text = json.dumps([*known, trial.digest, source_digest(*SOURCES), _baselines_digest()])
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        entry = journal.find(key)
        if entry is None:
            begin = time.monotonic()
            sums = self.sums(side, trial)
            entry = CachedResult(key=key, seconds=time.monotonic() - begin, sums=sums)
            journal.add(entry)
            print(f"  {side}: {trial.label}: {entry.seconds:.0f} s", flush=True)
        return entry


def _baselines_digest() -> str:
    files = sorted(Path(baselines.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def questions(
    corpus: list[Document], context: int, tests: int, *, has_copies: bool, split: str = "test"
) -> list[Asked]:
    """Windows of the first documents of a split, and far copies made of them."""
    chosen = [x for x in corpus if x.split == split and len(x.tokens) >= context][:tests]
    asked = [
        Asked(Trial(x.name, x.name, x.tokens[:context], position_spans(context)), None)
        for x in chosen
    ]
    if has_copies:
        by_name = {x.name: x.tokens for x in chosen}
        library = TokenizedTexts([Text(x.name, x.name) for x in chosen], by_name.__getitem__, 2**31)
        copies, notes = far_copies(library, library.documents, GAPS, samples=SAMPLES)
        assert not notes, notes
        asked += [Asked(copy.trial, copy.gap) for copy in copies]
    return asked


def of_windows(windows: list[tuple[Trial, CachedResult]]) -> dict:
    """Perplexities, their gap, divergence and agreement, with intervals over documents.

    Rows keep a constant number of blocks, so early positions are dense: the gap and the divergence
    of the second half of the positions are reported as well.
    """
    estimate_of = _estimator(windows, first=0)
    second_half = _estimator(windows, first=len(windows[0][0].tokens) // 2)
    return {
        "documents": len(windows),
        "perplexity_dense": estimate_of(lambda dense, ours, kl, same: np.exp(dense)),
        "perplexity": estimate_of(lambda dense, ours, kl, same: np.exp(ours)),
        "perplexity_gap": estimate_of(_gap),
        "kl": estimate_of(lambda dense, ours, kl, same: kl),
        "agreement": estimate_of(lambda dense, ours, kl, same: same),
        "perplexity_gap_second_half": second_half(_gap),
        "kl_second_half": second_half(lambda dense, ours, kl, same: kl),
    }


def _gap(dense, ours, kl, same):
    return np.exp(ours - dense) - 1


def _estimator(windows: list[tuple[Trial, CachedResult]], *, first: int):
    """A function that bootstraps a statistic of the means over all spans from a position on."""
    names = ("dense_nll", "candidate_nll", "kl", "agreement")
    sums = []
    for trial, entry in windows:
        chosen = [place for place, span in enumerate(trial.spans) if span.start >= first]
        count = sum(trial.spans[place].end - trial.spans[place].start for place in chosen)
        sums.append([count, *(sum(entry.sums[name][place] for place in chosen) for name in names)])
    means = lambda x: [x[..., place] / x[..., 0] for place in range(1, 1 + len(names))]
    return lambda statistic: estimate(
        lambda x: statistic(*means(x)), np.array(sums), 0
    ).model_dump()


def of_copies(pairs: list[tuple[Asked, CachedResult]]) -> dict[str, dict[str, float]]:
    """NLL of the second copy, nats per token, mean over the samples, by gap."""
    found = {}
    for gap in GAPS:
        own = [(a.trial.spans[1], e.sums) for a, e in pairs if a.gap == gap]
        if own:
            found[str(gap)] = {
                side: float(np.mean([s[f"{side}_nll"][1] / (b - a) for (a, b), s in own]))
                for side in ("dense", "candidate")
            }
    return found
