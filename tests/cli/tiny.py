"""A tiny checkpoint on disk, texts for it, and a model that only seems to read them."""

from pathlib import Path

import numpy as np
import tokenizers

from tests.evaluation import sample
from xsake.hads.hooks import ComponentMoments, LayerMasses, moments_hook
from xsake.model.huggingface import export

BLOCK, HEADS = 8, 2


def save_checkpoint(folder: Path, **changes) -> Path:
    """One random layer over bytes, and a tokenizer that makes a token of every byte."""
    folder = export(sample.model(**changes), folder / "tiny", family="llama")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.save(str(folder / "tokenizer.json"))
    return folder


def save_texts(path: Path, count: int = 2, seed: int = 0) -> Path:
    """Documents of 400 random letters, and one that is too short for anything."""
    rng = np.random.default_rng(seed)
    letters = ["".join(rng.choice(list("abcdefgh "), size=400)) for _ in range(count)]
    path.write_text("\n<|endoftext|>\n".join([*letters, "short"]))
    return path


class QuickObserver:
    """Stands in for `xsake.model.observer.Observer`: masses drawn from the sum of the tokens.

    Attributes:
        stops_after: documents after which Ctrl-C is pressed.
        far: heads look at blocks that their selector does not expect.
    """

    stops_after: int | None = None
    far = False

    def __init__(self, model, *, devices=None):
        self._seen = 0

    def __call__(self, tokens, watch):
        rng = np.random.default_rng(int(np.asarray(tokens, np.int64).sum()))
        if watch is moments_hook:
            return ComponentMoments(*rng.uniform(1, 2, (2, 1, len(tokens), 1, 8)))
        if self._seen == self.stops_after:
            raise KeyboardInterrupt
        self._seen += 1
        n = -(-tokens.shape[1] // BLOCK)
        weights = np.tril(rng.gamma(0.2, size=(1, len(tokens), HEADS, n, n)) + 1e-3)
        guess = weights * rng.uniform(0.5, 2, weights.shape)
        if self.far:
            guess = np.tril(1 / np.maximum(weights, 1e-3))
        true, estimate = (np.float32(x / x.sum(-1, keepdims=True)) for x in (weights, guess))
        entropy = rng.uniform(0, 5, true.shape[:3])
        return LayerMasses(entropy, true, {"sampled": estimate})
