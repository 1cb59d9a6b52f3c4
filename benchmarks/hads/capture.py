"""Queries and keys of every layer while the real model reads a document, kept on disk.

python -m benchmarks.hads.capture                    # once, about a minute a document; 0.75 GB each
python -m benchmarks.hads.capture --context 4096     # documents that have not been read so far yet

The model is causal: the first tokens of a document have the same queries and keys whatever
follows, so one reading at the longest context serves the shorter ones.
"""

import argparse
import functools
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hads.corpus import LONGEST, Document, documents
from benchmarks.peers.models import directory
from xsake.masks import Causal
from xsake.model import LayerCall
from xsake.model.huggingface import load
from xsake.model.observer import Observer
from xsake.model.tokenizer import Tokenizer

CACHE = Path(os.environ.get("XSAKE_CACHE", Path.home() / ".cache" / "xsake")) / "captured"
SCALE = 64**-0.5


def captured(document: Document) -> tuple[np.ndarray, np.ndarray]:
    """`(q [L, T, Hq, D], k [L, T, Hk, D])` of a captured document, read when touched."""
    return tuple(np.load(path, mmap_mode="r") for path in _paths(document))


class Replay:
    """An `ObserveFn` that shows what was captured; gradients are the model's own.

    Args:
        documents: that may be asked for, by their first tokens.
        tokens: of each, that may be asked for.
    """

    def __init__(self, documents: list[Document], tokens: int):
        self._documents = {document.tokens[:tokens].tobytes(): document for document in documents}

    def __call__(self, asked, watch: Callable) -> Any:
        tokens = np.asarray(asked)[0]
        whole = next(x for x in self._documents if x.startswith(tokens.tobytes()))
        q, k = captured(self._documents[whole])
        seen = []
        for layer in range(len(q)):
            own = [jnp.asarray(x[layer, : len(tokens)])[None] for x in (q, k)]
            seen.append(jax.tree.map(np.asarray, _watched(watch, *own, layer)))
        return jax.tree.map(lambda *x: np.stack(x), *seen)

    @functools.cached_property
    def grads(self) -> Callable:
        """See `xsake.hads.hooks.GradsFn`."""
        return Observer(load(directory()).model).grads


@functools.partial(jax.jit, static_argnums=0)
def _watched(watch: Callable, q, k, layer):
    return watch(q, k, None, LayerCall(layer=layer, mask=Causal(), scale=SCALE))


def _paths(document: Document) -> tuple[Path, Path]:
    digest = hashlib.sha256(document.tokens.tobytes()).hexdigest()[:16]
    return CACHE / f"{digest}.q.npy", CACHE / f"{digest}.k.npy"


def main() -> None:
    """Read what has not been read yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=LONGEST)
    parser.add_argument("--tests", type=int, default=24, help="maximum number of test documents")
    asked = parser.parse_args()
    folder = directory()
    corpus = documents(Tokenizer.load(folder))
    observer = Observer(load(folder).model)
    keep = lambda q, k, v, call: (q[0], k[0])
    CACHE.mkdir(parents=True, exist_ok=True)
    documents_to_run = corpus[: len(corpus) - 24 + asked.tests]
    for number, document in enumerate(documents_to_run, start=1):
        paths = _paths(document)
        if all(path.exists() for path in paths) and captured(document)[1].shape[1] >= asked.context:
            continue
        begin = time.monotonic()
        tokens = jnp.asarray(document.tokens[None, : asked.context])
        for path, array in zip(paths, observer(tokens, keep), strict=True):
            unfinished = path.with_suffix(".part.npy")
            np.save(unfinished, np.asarray(array))
            unfinished.replace(path)
        seconds = time.monotonic() - begin
        print(f"{number} of {len(documents_to_run)}: {document.name}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
