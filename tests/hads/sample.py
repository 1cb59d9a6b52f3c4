"""Small made-up profiles for the tests of planning."""

import numpy as np

from xsake._provenance import Environment
from xsake.hads.budget import ForcedBlocks
from xsake.hads.calibrate import CalibrationDocument
from xsake.hads.plan import SelectorSpec
from xsake.hads.profile import CalibratedModel, DocumentRecord, Profile

MACHINE = Environment(
    cpu="a processor",
    cores=2,
    utc="2026-01-01T00:00:00+00:00",
    load_average=0.5,
    commit=None,
    dirty=None,
    versions={"python": "3.12.0"},
)
POOLED = SelectorSpec(name="pooled", settings={"stride": 4, "pool": "mean"}, cost=0.01)


def model(layers: int = 2, q_heads: int = 2, kv_heads: int = 1, head_dim: int = 8):
    return CalibratedModel(
        name="tiny", digest="0", layers=layers, q_heads=q_heads, kv_heads=kv_heads,
        head_dim=head_dim,
    )  # fmt: skip


def documents(
    count: int, tokens: int, *, vocabulary: int = 32, seed: int = 0
) -> list[CalibrationDocument]:
    rows = np.random.default_rng(seed).integers(0, vocabulary, (count, tokens)).astype(np.int32)
    return [CalibrationDocument(f"text#{i}", row) for i, row in enumerate(rows)]


def profile(
    *, layers: int = 2, heads: int = 3, n: int = 8, seed: int = 0, weights: int = 2
) -> Profile:
    """Random heads, from focused to broad, with falling curves that need not be convex."""
    rng = np.random.default_rng(seed)
    each = (layers, heads)
    steps = rng.gamma(0.5, size=(*each, n)) * np.geomspace(1, 0.01, n)
    steps[..., : ForcedBlocks().blocks_per_row] = 0
    curve = np.concatenate([steps, np.zeros((*each, 1))], axis=-1)[..., ::-1].cumsum(-1)[..., ::-1]
    return Profile(
        model=model(layers, heads),
        documents=(DocumentRecord(name="text#0", sha256="0", tokens=64 * n + 5),),
        context=64 * n,
        block=64,
        forced=ForcedBlocks(),
        seed=seed,
        environment=MACHINE,
        components=rng.permuted(np.tile(np.arange(8), (layers, 1, 1)), axis=-1),
        entropy=rng.uniform(0.5, 5, each),
        block_entropy=rng.uniform(0.5, 3, each),
        need90=rng.uniform(0.1, 0.9, each),
        outside=rng.uniform(0, 1, each),
        offset_mass=rng.dirichlet(np.full(n, 0.3), each),
        column_mass=rng.dirichlet(np.full(n, 0.3), each),
        curves={"pooled": curve, "oracle": curve * 0.8},
        effects={"pooled": np.square(curve) * rng.gamma(0.5, size=(*each, 1))},
        selector_weights={"pooled": rng.normal(size=(*each, weights))},
    )
