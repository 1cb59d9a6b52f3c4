"""Scores of an answer: by teacher forcing in one forward pass, and by greedy decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.evaluation.score import compile_hidden, fetch, require_finite
from xsake.evaluation.tasks.prompt import TaskPrompt
from xsake.model import AttentionFn, Decoder
from xsake.model.generate import GenerationOptions, generate
from xsake.model.tokenizer import Tokenizer

ROWS_UNIT = 32  # positions of an answer are padded to a multiple, so that few sizes are compiled
MARGIN = 16  # tokens that may be generated in addition to those of the answer


class AnswerScorer:
    """Scorer of answers with one attention; compiles once per context.

    Only the positions of the answer have logits.

    Args:
        model: a decoder.
        attend: attention function of prompt and answer.
    """

    def __init__(self, model: Decoder, attend: AttentionFn):
        self._model, self._hidden = model, compile_hidden(attend)

    def __call__(self, prompt: TaskPrompt) -> dict[str, list[float]]:
        """Return sums over the answer and over each expected string: NLL, number of arg-max."""
        tokens, size = prompt.tokens, prompt.context - prompt.answer.start
        hidden = self._hidden(self._model, tokens[None])
        rows = min(-(-size // ROWS_UNIT) * ROWS_UNIT, len(hidden))
        nll, is_top = fetch(_score_last(self._model, hidden, tokens[-rows:], rows=rows))
        spans = [
            slice(span.start - prompt.context, span.end - prompt.context or None)
            for span in (prompt.answer, *prompt.answer_spans)
        ]
        sums = {
            "nll": [float(nll[span].sum(dtype=np.float64)) for span in spans],
            "top": [float(is_top[span].sum()) for span in spans],
        }
        require_finite({"nll": sums["nll"][0]}, prompt.context)
        return sums


@functools.partial(jax.jit, static_argnames="rows")
def _score_last(
    model: Decoder, hidden: Float[Array, "predicted width"], targets: Int[Array, " n"], *, rows: int
) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """Return NLL and whether the target is the arg-max, for the last rows."""
    logits = model.logits(hidden[-rows:])
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[:, None], axis=-1)
    return nll[:, 0], jnp.argmax(logits, axis=-1) == targets


def generate_answer(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: TaskPrompt,
    attend: AttentionFn,
    decode_attend: AttentionFn | None,
) -> str:
    """Return the text that greedy decoding writes after a prompt."""
    size = prompt.context - prompt.answer.start
    options = GenerationOptions(
        max_new_tokens=min(size + MARGIN, model.config.context - prompt.answer.start),
        temperature=0, end_ids=tokenizer.end_ids,
    )  # fmt: skip
    result = generate(
        model, [prompt.prompt], options, attend=attend, decode_attend=decode_attend, batch_size=1,
        tokenizer=tokenizer,
    )  # fmt: skip
    text = result.rows[0].text
    assert text is not None, "generated with a tokenizer"
    return text


def match_strings(text: str, expected: tuple[str, ...]) -> float:
    """Return the share of expected strings in a text, without regard to case.

    Example:
        >>> match_strings("The numbers are 12 and 7.", ("12", "13"))
        0.5
    """
    return sum(string.lower() in text.lower() for string in expected) / len(expected)
