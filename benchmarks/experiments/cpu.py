"""Native kernels compared with PyTorch, with the backend `xla`, and with what the machine can do.

python -m benchmarks.experiments.cpu               # 2048, 4096 and 8192 tokens; needs xsake-cpu
python -m benchmarks.experiments.cpu --quick

Bare matrix products and a bare read run in the same rounds: their rates are the machine's.
"""

from collections.abc import Sequence

from benchmarks.experiments.common import (
    Contender,
    Outcome,
    Settings,
    budget_of,
    command,
    limit_claim,
    limit_claims,
    race,
)
from benchmarks.peers.protocol import GEMM_SIZE, READ_SIZE
from xsake.benchmarking import BenchmarkRow, Claim, Shape
from xsake.layout.synthetic import ragged_grid

SDPA, FLEX, XLA = "torch.sdpa", "torch.flex", "xsake.xla"
GEMMS = ("torch.gemm", "jax.gemm", "numpy.gemm")
FULL_LIMIT, BOTH_LIMIT, GROUPED_LIMIT = 0.80, 0.72, 0.82  # of SDPA
RAGGED_LIMITS = {SDPA: 0.25, FLEX: 0.33}
DECODE_LIMIT, BANDWIDTH, GEMM_SHARE = 0.5, 0.85, 0.70
OVERHEADS = {128: 1.15, 64: 1.15, 32: 1.3}  # time over budget x time of full attention


def measure(settings: Settings) -> Outcome:
    """Race after race: full, both passes, grouped heads, ragged lists, decode, bfloat16."""
    rows, claims = [], []
    parts = [*map(_full, settings.choose([2048, 4096, 8192]))]
    parts += [_grouped(4096), _half(4096), _decode(1), _decode(8)]
    for part in parts:
        rows, claims = _add(rows, claims, part(settings))
    for tokens in settings.choose([4096, 8192]):
        rows, claims = _add(rows, claims, _ragged(tokens, settings))
    return rows, claims


def _add(rows: list[BenchmarkRow], claims: list[Claim], found: Outcome) -> Outcome:
    return rows + found[0], claims + found[1]


def _race(shape: Shape, sides: Sequence[Contender], settings: Settings, **grids) -> list:
    names = [side.side for side in sides]
    return race("cpu", shape, sides, settings=settings, baselines=names, grids=grids)


def _full(tokens: int):
    def run(settings: Settings) -> Outcome:
        shape, topic = Shape.square(tokens), f"full causal, {tokens} tokens"
        names = ("xsake", XLA, SDPA, *GEMMS)
        forward = _race(shape, [Contender(name, name) for name in names], settings)
        claims = limit_claims(topic, forward, side="xsake", limits={SDPA: FULL_LIMIT})
        flops = 4 * shape.q_heads * shape.head_dim * tokens * (tokens + 1) // 2
        for name in GEMMS:
            limit = flops / (GEMM_SHARE * 2 * GEMM_SIZE**3)
            claims.append(
                limit_claim(
                    topic, f"{GEMM_SHARE:.0%} of the rate of {name}", forward,
                    side="xsake", baseline=name, limit=limit,
                )
            )  # fmt: skip
        both = _race(
            shape, [Contender(name, name, is_backward=True) for name in ("xsake", XLA, SDPA)],
            settings,
        )  # fmt: skip
        topic = f"forward+backward, {tokens} tokens"
        claims += limit_claims(topic, both, side="xsake", limits={SDPA: BOTH_LIMIT})
        return forward + both, claims

    return run


def _grouped(tokens: int):
    def run(settings: Settings) -> Outcome:
        shape = Shape(q_tokens=tokens, kv_tokens=tokens, q_heads=32, kv_heads=8, head_dim=128)
        rows = _race(shape, [Contender(name, name) for name in ("xsake", XLA, SDPA)], settings)
        topic = f"32 heads of 128 on 8, {tokens} tokens"
        return rows, limit_claims(topic, rows, side="xsake", limits={SDPA: GROUPED_LIMIT})

    return run


def _half(tokens: int):
    def run(settings: Settings) -> Outcome:
        sides = [
            Contender("float32", "xsake"),
            Contender("bfloat16", "xsake", dtype="bfloat16"),
            Contender("torch.sdpa bfloat16", SDPA, dtype="bfloat16"),
        ]
        rows = _race(Shape.square(tokens), sides, settings)
        topic = f"bfloat16, {tokens} tokens"
        return rows, limit_claims(topic, rows, side="bfloat16", limits={"float32": 1.0})

    return run


def decode_shape(batch: int) -> Shape:
    """One query over 8192 keys."""
    return Shape(batch=batch, q_tokens=1, kv_tokens=8192, q_heads=32, kv_heads=8, head_dim=128)


def _decode(batch: int):
    def run(settings: Settings) -> Outcome:
        shape = decode_shape(batch)
        names = ("xsake", XLA, SDPA, "jax.nn", "torch.read")
        rows = _race(shape, [Contender(name, name) for name in names], settings)
        topic = f"decode of one query, 8192 keys, batch {batch}"
        claims = limit_claims(topic, rows, side="xsake", limits={SDPA: DECODE_LIMIT})
        floats = 2 * batch * shape.kv_tokens * shape.kv_heads * shape.head_dim
        promise = f"{BANDWIDTH:.0%} of the rate of a bare read"
        limit = floats / (BANDWIDTH * READ_SIZE)
        claims.append(
            limit_claim(topic, promise, rows, side="xsake", baseline="torch.read", limit=limit)
        )
        return rows, claims

    return run


def _ragged(tokens: int, settings: Settings) -> Outcome:
    shape = Shape.square(tokens)
    grids = {
        f"25% of {block}": ragged_grid(shape.q_heads, -(-tokens // block), 0.25, seed=settings.seed)
        for block in OVERHEADS
    }
    ours = []
    for block, name in zip(OVERHEADS, grids, strict=True):
        ours.append(Contender(name, "xsake", name, block=block))
        ours.append(Contender(f"all of {block}", "xsake", block=block))
    peers = [Contender(FLEX, FLEX, "25% of 128"), Contender(SDPA, SDPA)]
    xla = Contender("xla, 25% of 128", XLA, "25% of 128")
    rows = _race(shape, [*ours, *peers, xla], settings, **grids)
    topic = f"25% ragged, {tokens} tokens"
    claims = limit_claims(topic, rows, side="25% of 128", limits=RAGGED_LIMITS)
    for (block, overhead), (name, grid) in zip(OVERHEADS.items(), grids.items(), strict=True):
        claims.append(
            limit_claim(
                f"{topic}, blocks of {block}", f"{overhead} x budget x full", rows,
                side=name, baseline=f"all of {block}", limit=overhead * budget_of(grid),
            )
        )  # fmt: skip
    sides = [
        Contender("both passes, 25%", "xsake", "25% of 128", is_backward=True),
        Contender("both passes, xla", XLA, "25% of 128", is_backward=True),
        Contender(SDPA, SDPA, is_backward=True),
    ]
    both = _race(shape, sides, settings, **{"25% of 128": grids["25% of 128"]})
    topic = f"25% ragged, forward+backward, {tokens} tokens"
    claims += limit_claims(topic, both, side="both passes, 25%", limits={SDPA: RAGGED_LIMITS[SDPA]})
    return rows + both, claims


if __name__ == "__main__":
    command("cpu", measure, __doc__)
