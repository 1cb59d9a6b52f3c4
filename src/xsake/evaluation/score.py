"""Next-token scores of a sequence, with logits computed in chunks."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.errors import ArgumentError
from xsake.evaluation.trial import TokenSpan
from xsake.model import AttentionFn, Decoder, DenseAttention

CHUNK = 256  # tokens per chunk of logits: 50 MB for a vocabulary of 49152


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Scores of the tokens 1, 2, ... of a sequence; None where they need a candidate."""

    dense_nll: Float[np.ndarray, " predicted"]  # -log p with dense attention, nats
    candidate_nll: Float[np.ndarray, " predicted"] | None = None
    kl: Float[np.ndarray, " predicted"] | None = None  # KL(dense || candidate), nats
    agreement: Bool[np.ndarray, " predicted"] | None = None  # whether top-1 tokens are equal

    def sums(self, spans: tuple[TokenSpan, ...]) -> dict[str, list[float]]:
        """Return float64 sums over spans of predicted tokens, by name of the score."""
        scores = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {
            name: [float(values[a - 1 : b - 1].sum(dtype=np.float64)) for a, b in spans]
            for name, values in scores
            if values is not None
        }


class Scorer:
    """Scorer of sequences with one model; compiles once per length.

    Args:
        model: a decoder.
        candidate: attention to compare with dense attention, or None.
        chunk: tokens per chunk of logits.

    Example:
        >>> import numpy as np
        >>> from flax import nnx
        >>> from xsake.model import Decoder, DecoderConfig
        >>> score = Scorer(Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0)))
        >>> score(np.arange(40)).dense_nll.shape
        (39,)
    """

    def __init__(self, model: Decoder, candidate: AttentionFn | None = None, *, chunk: int = CHUNK):
        self._model, self._chunk = model, chunk
        sides = (DenseAttention(), candidate)
        self._sides = [compile_hidden(side) for side in sides if side is not None]

    def __call__(self, tokens: Int[np.ndarray, " T"]) -> Scores:
        """Score all tokens but the first."""
        tokens = np.asarray(tokens, np.int32)
        hidden = tuple(compute(self._model, tokens[None]) for compute in self._sides)
        arrays = score_chunks(self._model, hidden, tokens[1:], chunk=self._chunk)
        scores = Scores(*fetch(arrays))
        totals = scores.sums((TokenSpan(1, len(tokens)),))
        require_finite({name: total for name, (total,) in totals.items()}, len(tokens))
        return scores


def fetch(arrays: Sequence[Any]) -> list[np.ndarray]:
    """Wait for results and copy them."""
    while not all(array.is_ready() for array in arrays):
        time.sleep(0.01)  # Ctrl-C interrupts Python, not a blocking wait inside JAX
    return [np.asarray(array) for array in arrays]


def require_finite(totals: dict[str, float], tokens: int) -> None:
    """Raise if a total over the tokens of a sequence is not finite."""
    nonfinite = [name for name, total in totals.items() if not np.isfinite(total)]
    if nonfinite:
        raise ArgumentError(
            "non-finite-predictions",
            "non-finite predictions",
            got=f"{', '.join(nonfinite)} over {tokens} tokens",
            expected="finite logits",
            fix="evaluate in float32, and check that the checkpoint is finite",
        )


def compile_hidden(attend: AttentionFn) -> Callable:
    """Return a jitted function from tokens [1, T] to the hidden states [T-1, width]."""

    def hidden(model: Decoder, tokens: Int[Array, "1 T"]) -> Float[Array, "predicted width"]:
        return model.hidden(tokens, attend=attend)[0, :-1]

    return jax.jit(hidden)


@functools.partial(jax.jit, static_argnames="chunk")
def score_chunks(
    model: Decoder,
    hidden: tuple[Float[Array, "predicted width"], ...],
    targets: Int[Array, " predicted"],
    *,
    chunk: int,
) -> tuple[Array, ...]:
    """Compute the scores of all positions, [predicted] each, in chunks."""
    count = targets.shape[0]
    chunks = -(-count // chunk)

    def split(x: Array) -> Array:
        padding = [(0, chunks * chunk - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(chunks, chunk, *x.shape[1:])

    def scores(part):
        hidden, targets = part
        return compare([model.logits(side) for side in hidden], targets)

    chunked = jax.lax.map(scores, (tuple(split(side) for side in hidden), split(targets)))
    return tuple(x.reshape(-1)[:count] for x in chunked)


def compare(
    logits: list[Float[Array, "predicted vocab"]], targets: Int[Array, " predicted"]
) -> tuple[Array, ...]:
    """Compute the fields of `Scores` from dense and optional candidate logits."""
    log_p = [jax.nn.log_softmax(side, axis=-1) for side in logits]
    nll = [-jnp.take_along_axis(side, targets[:, None], axis=-1)[:, 0] for side in log_p]
    if len(log_p) == 1:
        return tuple(nll)
    dense, candidate = log_p
    kl = jnp.sum(jnp.exp(dense) * (dense - candidate), axis=-1)
    agreement = jnp.argmax(dense, axis=-1) == jnp.argmax(candidate, axis=-1)
    # Rounding may make a tiny divergence negative.
    return *nll, jnp.maximum(kl, 0), agreement
