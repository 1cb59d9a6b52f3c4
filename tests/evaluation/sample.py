"""Tiny models, tokenizers and texts for the tests of evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xsake.evaluation import EvalModel, ModelIdentity, TextDocument, Texts
from xsake.evaluation.record import TextFile
from xsake.evaluation.trial import TokenizedTexts
from xsake.model import Decoder, DecoderConfig

IDENTITY = ModelIdentity(
    name="tiny", digest="0", config_sha256="0", tokenizer_sha256=None, weights=()
)


def encode(text: str) -> np.ndarray:
    """A byte is a token."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


@functools.cache
def model(**changes) -> Decoder:
    """One small layer over bytes, with random weights that need no compiler to be drawn."""
    sizes = {"vocab_size": 256, "layers": 1, "q_heads": 2, "kv_heads": 1}
    config = DecoderConfig.tiny(**sizes | changes)
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) / 3, x.dtype)
    return jax.tree.map(draw, nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def subject(**changes) -> EvalModel:
    return EvalModel(**{"model": model(), "encode": encode, "identity": IDENTITY} | changes)


def texts(*lengths: int) -> Texts:
    """Documents of so many random letters, and so many tokens."""
    rng = np.random.default_rng(len(lengths))
    letters = ["".join(rng.choice(list("abcdefgh "), size=length)) for length in lengths]
    documents = tuple(TextDocument(f"text#{i}", text) for i, text in enumerate(letters))
    file = TextFile(name="text", bytes=sum(lengths), sha256="0", documents=len(lengths))
    return Texts(documents, (file,))


def tokenized(*lengths: int, opening=(), vocabulary=256) -> TokenizedTexts:
    return TokenizedTexts(texts(*lengths).documents, encode, vocabulary, opening)
