"""Native sparse attention compared with dense attention: time, crossover length and memory.

python -m benchmarks.experiments.native_sparse  # 1k to 16k tokens, 12 on 4 heads, paper's blocks
python -m benchmarks.experiments.native_sparse --quick
python -m benchmarks.experiments.native_sparse --tokens 8192 --rounds 9

Keys and values are each branch's own; everything is drawn, so neighbouring tokens select blocks
independently, which is the hardest case for any kernel that computes tiles. Dense is causal
`xsake.attention`. The side `selected` also scores summaries, to select. Sides run in one process,
in turns.
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
from xsake import nsa


def draw(tokens: int, seed: int) -> Arrays:
    """Draw queries, keys and values by branch, and gates."""
    rng = np.random.default_rng(seed)
    normal = lambda *rest: jnp.asarray(rng.standard_normal((1, tokens, *rest), np.float32))
    keys, values = (nsa.KV(*(normal(KV_HEADS, DIM) for _ in range(3))) for _ in range(2))
    gates = nsa.Gates.sigmoid(normal(Q_HEADS, 3))
    return {"q": normal(Q_HEADS, DIM), "k": keys, "v": values, "gates": gates}


def dense(q, k: nsa.KV, v: nsa.KV, gates: nsa.Gates):
    """Causal attention over the keys of one branch."""
    del gates
    return causal(q, k.selected, v.selected)


def native(q, k: nsa.KV, v: nsa.KV, gates: nsa.Gates, implementation=None, only=None):
    """All branches, or one of them."""
    if only is not None:
        gates = nsa.Gates(None, None, None)._replace(**{only: getattr(gates, only)})
    return nsa.attention(q, k, v, gates, config=nsa.Config(), implementation=implementation)


FAMILY = Family(
    "native_sparse",
    "native sparse attention",
    "xsake.native_sparse_attention",
    draw,
    {"native": native} | {name: functools.partial(native, only=name) for name in nsa.Gates._fields},
    dense,
    {"forward": 0.35, "forward+backward": 0.4},
)

if __name__ == "__main__":
    command("native_sparse", functools.partial(measure, FAMILY), __doc__)
