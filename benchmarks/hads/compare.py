"""Next-token losses of sparse attention compared with dense attention, document by document."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.evaluation.score import compare
from xsake.evaluation.summary import estimate
from xsake.model import AttentionFn, Decoder, DenseAttention

CHUNK = 256
SCORES = ("dense_nll", "nll", "kl", "agreement")
# Rows keep a constant number of blocks, so early positions are dense and the mean is optimistic.
PARTS = {"all": 0.0, "second_half": 0.5, "last_quarter": 0.75}
DIGITS = 7


class ModelComparison:
    """A model that scores one document after the other with several attention functions.

    Args:
        model: the decoder.
    """

    def __init__(self, model: Decoder):
        self.model = model
        self._hidden = {}
        self._dense: tuple[bytes, Array] | None = None
        self.add("dense", DenseAttention())

    def add(self, name: str, attend: AttentionFn, *, is_compiled: bool = True) -> None:
        """Add an attention function; one that is not compiled runs layer by layer."""
        hidden = lambda model, tokens: model.hidden(tokens, attend=attend)[0, :-1]
        self._hidden[name] = jax.jit(hidden) if is_compiled else hidden

    def losses(self, name: str, tokens: Int[np.ndarray, " T"]) -> dict[str, dict[str, float]]:
        """Return the mean scores of a document, by part of its positions."""
        tokens = np.asarray(tokens, np.int32)
        key = tokens.tobytes()
        if self._dense is None or self._dense[0] != key:
            self._dense = None  # frees gigabytes before the next ones are made
            self._dense = key, _logits(self.model, self._hidden["dense"](self.model, tokens[None]))
        hidden = self._hidden[name](self.model, tokens[None])
        found = _scores(self.model, self._dense[1], hidden, tokens[1:])
        scores = [np.asarray(x, np.float64) for x in found]
        assert all(np.isfinite(x).all() for x in scores), f"{name}: not finite"
        return {part: _means(scores, int(len(tokens) * start)) for part, start in PARTS.items()}


def _means(scores: Sequence[np.ndarray], first: int) -> dict[str, float]:
    """Return the means of the scores from a position on; the first token has none."""
    first = max(first, 1)
    means = {name: x[first - 1 :].mean() for name, x in zip(SCORES, scores, strict=True)}
    count = len(scores[0]) - first + 1
    return {"tokens": count} | {name: round(float(x), DIGITS) for name, x in means.items()}


def _split(x: Array) -> Array:
    """Reshape [T, ...] to [chunks, CHUNK, ...]; the last chunk is padded."""
    padding = -len(x) % CHUNK
    x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, CHUNK, *x.shape[1:])


@jax.jit
def _logits(model: Decoder, hidden: Float[Array, "T width"]) -> Float[Array, "chunks CHUNK vocab"]:
    return jax.lax.map(model.logits, _split(hidden))


@jax.jit
def _scores(model: Decoder, dense: Array, hidden: Array, targets: Int[Array, " T"]):
    one = lambda part: compare([part[0], model.logits(part[1])], part[2])
    found = jax.lax.map(one, (dense, _split(hidden), _split(targets)))
    return tuple(x.reshape(-1)[: len(targets)] for x in found)


def summarize(losses: Sequence[dict[str, dict[str, float]]]) -> dict:
    """Return means over documents with 95% intervals over documents.

    Perplexity gaps are `exp(nll - dense_nll) - 1` of the mean over all tokens.
    """
    statistics = {
        "perplexity_dense": lambda dense, nll, kl, same: np.exp(dense),
        "perplexity": lambda dense, nll, kl, same: np.exp(nll),
        "perplexity_gap": lambda dense, nll, kl, same: np.exp(nll - dense) - 1,
        "kl": lambda dense, nll, kl, same: kl,
        "agreement": lambda dense, nll, kl, same: same,
    }
    summary: dict = {"documents": len(losses)}
    for part in PARTS:
        suffix = "" if part == "all" else f"_{part}"
        names = statistics if part == "all" else ("perplexity_gap", "kl")
        for name in names:
            summary[name + suffix] = _estimate(losses, part, statistics[name])
    return summary


def _estimate(losses: Sequence[dict], part: str, statistic) -> dict[str, float]:
    """Bootstrap a statistic of the mean scores of one part over documents."""
    own = [each[part] for each in losses]
    sums = np.array([[x["tokens"], *(x["tokens"] * x[name] for name in SCORES)] for x in own])
    means = lambda x: [x[..., place] / x[..., 0] for place in range(1, len(SCORES) + 1)]
    return estimate(lambda x: statistic(*means(x)), sums, 0).model_dump()
