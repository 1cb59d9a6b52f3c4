"""Next-token scores of a sequence, from hidden states and a few logits at a time."""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.errors import ArgumentError
from xsake.evaluation.trial import Span
from xsake.model import Attend, Decoder, Dense

CHUNK = 256  # tokens whose logits exist at once: 50 MB for a vocabulary of 49152


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Scores of the tokens 1, 2, ... of a sequence, each predicted from all before it.

    Args:
        dense_nll: -log p of the token, in nats, with dense attention.
        candidate_nll: the same with the candidate's; None, as all that follows, without one.
        kl: KL(dense || candidate) of the two distributions over the vocabulary, in nats.
        agreement: whether both hold the same token most likely.
    """

    dense_nll: Float[np.ndarray, " predicted"]
    candidate_nll: Float[np.ndarray, " predicted"] | None = None
    kl: Float[np.ndarray, " predicted"] | None = None
    agreement: Bool[np.ndarray, " predicted"] | None = None

    def sums(self, spans: tuple[Span, ...]) -> dict[str, list[float]]:
        """Float64 sums over spans of predicted tokens, by the name of the score."""
        named = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {
            name: [float(values[a - 1 : b - 1].sum(dtype=np.float64)) for a, b in spans]
            for name, values in named
            if values is not None
        }


Score = Callable[[Int[np.ndarray, " T"]], Scores]
"""From tokens to the scores of all but the first."""


class Scorer:
    """Scores sequences with one model; compiles once for each length.

    Args:
        model: a decoder.
        candidate: attention to compare with dense attention, or None.
        chunk: tokens whose logits exist at once.

    Example:
        >>> import numpy as np
        >>> from flax import nnx
        >>> from xsake.model import Decoder, DecoderConfig
        >>> score = Scorer(Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0)))
        >>> score(np.arange(40)).dense_nll.shape
        (39,)
    """

    def __init__(self, model: Decoder, candidate: Attend | None = None, *, chunk: int = CHUNK):
        self._model = model
        self._sides = [_reader(side) for side in (Dense(), candidate) if side is not None]
        self._chunk = chunk

    def __call__(self, tokens: Int[np.ndarray, " T"]) -> Scores:
        """Scores of all tokens but the first."""
        tokens = np.asarray(tokens, np.int32)
        hidden = tuple(read(self._model, tokens[None]) for read in self._sides)
        found = in_chunks(self._model, hidden, tokens[1:], chunk=self._chunk)
        while not all(part.is_ready() for part in found):
            time.sleep(0.01)  # waiting in Python, Ctrl-C is heard at once; inside JAX it is not
        scores = Scores(*(np.asarray(part) for part in found))
        totals = scores.sums((Span(1, len(tokens)),))
        wrong = [name for name, (total,) in totals.items() if not np.isfinite(total)]
        if wrong:
            raise ArgumentError(
                "the model's predictions are not finite numbers",
                got=f"{', '.join(wrong)} over {len(tokens)} tokens",
                expected="finite logits",
                fix="evaluate in float32, and check that the checkpoint itself is finite",
            )
        return scores


def _reader(attend: Attend) -> Callable:
    """Compiles to: from tokens [1, T] to the hidden states that predict a token, [T-1, width]."""

    def read(model: Decoder, tokens: Int[Array, "1 T"]) -> Float[Array, "predicted width"]:
        return model.hidden(tokens, attend=attend)[0, :-1]

    return jax.jit(read)


@functools.partial(jax.jit, static_argnames="chunk")
def in_chunks(
    model: Decoder,
    hidden: tuple[Float[Array, "predicted width"], ...],
    targets: Int[Array, " predicted"],
    *,
    chunk: int,
) -> tuple[Array, ...]:
    """Scores of all positions, [predicted] each, computed for `chunk` positions after the other."""
    count = targets.shape[0]
    chunks = -(-count // chunk)

    def cut(x: Array) -> Array:
        spare = [(0, chunks * chunk - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, spare).reshape(chunks, chunk, *x.shape[1:])

    def scores(part):
        hidden, targets = part
        return compare([model.logits(side) for side in hidden], targets)

    found = jax.lax.map(scores, (tuple(cut(side) for side in hidden), cut(targets)))
    return tuple(x.reshape(-1)[:count] for x in found)


def compare(
    logits: list[Float[Array, "predicted vocab"]], targets: Int[Array, " predicted"]
) -> tuple[Array, ...]:
    """Scores from dense logits and, if there are two, the candidate's; see `Scores`."""
    log_p = [jax.nn.log_softmax(side, axis=-1) for side in logits]
    nll = [-jnp.take_along_axis(side, targets[:, None], axis=-1)[:, 0] for side in log_p]
    if len(log_p) == 1:
        return tuple(nll)
    dense, candidate = log_p
    kl = jnp.sum(jnp.exp(dense) * (dense - candidate), axis=-1)
    agreement = jnp.argmax(dense, axis=-1) == jnp.argmax(candidate, axis=-1)
    # Rounding may leave a divergence of nearly nothing a little below it.
    return *nll, jnp.maximum(kl, 0), agreement
