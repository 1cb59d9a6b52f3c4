"""Attention with a block indexer compared with dense attention: time, crossover, memory.

python -m benchmarks.experiments.indexed  # 1k to 32k tokens, 12 on 4 heads, MSA's 16 blocks of 128
python -m benchmarks.experiments.indexed --quick
python -m benchmarks.experiments.indexed --tokens 8192 --rounds 9

MSA with index heads of 64 and one index key; the side `selection` is the indexer alone. Everything
is drawn, so neighbouring tokens select blocks independently, which is the hardest case for any
kernel that computes tiles. Dense is causal `xsake.attention`. Sides run in one process, in turns.
"""

import functools

import jax.numpy as jnp
import numpy as np

from benchmarks.experiments.common import command
from benchmarks.experiments.trained_sparse import (
    DIM,
    KV_HEADS,
    Q_HEADS,
    Arrays,
    Family,
    causal,
    measure,
)
from xsake import indexed

INDEX_DIM = 64


def draw(tokens: int, seed: int) -> Arrays:
    """Draw queries, keys, values and the arrays of the index."""
    rng = np.random.default_rng(seed)
    normal = lambda *rest: jnp.asarray(rng.standard_normal((1, tokens, *rest), np.float32))
    heads = {"q": (Q_HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM)}
    heads |= {"index_q": (KV_HEADS, INDEX_DIM), "index_k": (1, INDEX_DIM)}
    return {name: normal(*sizes) for name, sizes in heads.items()}


def dense(q, k, v, index_q, index_k):
    """Causal attention to every key."""
    del index_q, index_k
    return causal(q, k, v)


def selection(q, k, v, index_q, index_k):
    """The lists of blocks alone."""
    del q, v
    return indexed.select_blocks(index_q, index_k, kv_heads=k.shape[2])


FAMILY = Family(
    "indexed",
    "attention with a block indexer",
    "xsake.indexed.attention",
    draw,
    {"indexed": indexed.attention, "selection": selection},
    dense,
    {"forward": 0.45, "forward+backward": 0.5},
    (1024, 2048, 4096, 8192, 16384, 32768),
)

if __name__ == "__main__":
    command("indexed", functools.partial(measure, FAMILY), __doc__)
