"""What choices of blocks keep of the true attention of every query: KL, mass, by rows and heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from benchmarks.hads.capture import SCALE
from xsake.kernels.statistics import block_statistics

SAMPLE = 8  # every 8th query counts for the 95th percentile
LEAST_MASS = 1e-7


class Masses:
    """The exact block masses of every query of a document, float16, layer after layer."""

    def __init__(self, q: np.ndarray, k: np.ndarray, *, tokens: int, block: int):
        layers, _, heads, _ = q.shape
        self.n, self.block = tokens // block, block
        self.by_query = np.zeros((layers * heads, self.n, block, self.n), np.float16)
        self.by_row = np.zeros((layers * heads, self.n, self.n), np.float32)
        self.entropy = np.zeros(layers * heads, np.float32)
        for layer in range(layers):
            own = [jnp.asarray(x[layer, :tokens])[None] for x in (q, k)]
            place = slice(layer * heads, (layer + 1) * heads)
            found = _measured(*own, SCALE, block=block)
            for kept, values in zip((self.by_query, self.by_row, self.entropy), found, strict=True):
                kept[place] = np.asarray(values)


@functools.partial(jax.jit, static_argnames=("scale", "block"))
def _measured(q, k, scale, *, block: int):
    found = block_statistics(q, k, block_kv=block, scale=scale)
    masses = jnp.moveaxis(found.mass()[0], 1, 0)
    by_query = masses.reshape(masses.shape[0], -1, block, masses.shape[-1])
    return by_query.astype(jnp.float16), by_query.mean(2), found.entropy[0].mean(0)


def measured_rows(q, k, scale: float, *, block: int) -> Float[Array, "Hq Nq Nk"]:
    """The exact block masses of one layer, each the mean over the queries of its row."""
    return _measured(q, k, scale, block=block)[1]


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a choice loses; KL is KL(sparse || dense) = -log(kept mass), mean over queries."""

    kl: float
    kl_second_half: float  # of the rows
    kl_p95: float  # over heads and one query in eight
    kl_worst_head: float
    kept: float
    kept_second_half: float
    blocks: int


class Ballot:
    """Choices of blocks, whole models, packed to bits; weighed together because that is cheap."""

    def __init__(self, heads: int, n: int):
        self._shape = (heads, n, n)
        self._packed: list[np.ndarray] = []
        self._blocks: list[int] = []

    def add(self, chosen: Bool[np.ndarray, "X n n"]) -> None:
        """One more choice."""
        assert chosen.shape == self._shape, (chosen.shape, self._shape)
        assert not np.triu(chosen.any(0), 1).any(), "a choice of hidden blocks"
        self._packed.append(np.packbits(chosen, axis=-1))
        self._blocks.append(int(chosen.sum()))

    def weigh(self, masses: Masses) -> list[Loss]:
        """The loss of each choice."""
        heads, n, _ = self._shape
        means, samples = [], []
        for head in range(heads):
            bits = np.stack([packed[head] for packed in self._packed], axis=-1)
            grid = np.unpackbits(bits, axis=1, count=n)
            mean, sample = _lost(masses.by_query[head], grid)
            means.append(np.asarray(mean))
            samples.append(np.asarray(sample))
        mean = np.stack(means)  # [X, 4, C]
        p95 = np.quantile(np.concatenate(samples, axis=0), 0.95, axis=0)
        return [
            Loss(
                kl=float(mean[:, 0, c].mean()),
                kl_second_half=float(mean[:, 1, c].mean()),
                kl_p95=float(p95[c]),
                kl_worst_head=float(mean[:, 0, c].max()),
                kept=float(mean[:, 2, c].mean()),
                kept_second_half=float(mean[:, 3, c].mean()),
                blocks=blocks,
            )
            for c, blocks in enumerate(self._blocks)
        ]


@jax.jit
def _lost(masses: Float[Array, "n b n"], grid: Array):
    kept = jnp.einsum("iqj,ijc->iqc", masses.astype(jnp.float32), grid.astype(jnp.float32))
    # A row's float16 masses do not add up to 1 exactly.
    kept = kept / masses.astype(jnp.float32).sum(-1, keepdims=True)
    loss = -jnp.log(jnp.clip(kept, LEAST_MASS, 1))
    late = kept.shape[0] // 2
    parts = (loss, loss[late:], kept, kept[late:])
    mean = jnp.stack([part.mean((0, 1)) for part in parts])
    return mean, loss.reshape(-1, loss.shape[-1])[::SAMPLE]
