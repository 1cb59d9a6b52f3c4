"""Temporary bytes the compiler plans for forward and backward; nothing is run.

python -m benchmarks.experiments.memory  # 16,384 tokens compared with jax.nn; growth from 8k to 32k
python -m benchmarks.experiments.memory --quick
"""

import uuid

import jax

from benchmarks.experiments.common import (
    BLOCK,
    Outcome,
    Settings,
    blocks_of,
    budget_of,
    command,
    plain_row,
)
from benchmarks.peers import jax_worker, xsake_worker
from benchmarks.peers.jax_call import Attend, measured_function
from xsake._format import format_bytes
from xsake.benchmarking import BenchmarkRow, Claim, Shape, Verdict
from xsake.layout.synthetic import causal_grid, ragged_grid

SHARE_LIMIT = 0.05
GROWTH_LIMIT = 4.2
LAYOUTS = ("causal", "ragged_25")


def planned_bytes(attend: Attend, shape: Shape) -> int:
    """Temporary bytes of value_and_grad for float32 inputs of `shape`, from shapes alone."""
    sizes = (shape.batch, shape.q_tokens, shape.q_heads, shape.head_dim)
    inputs = [jax.ShapeDtypeStruct(sizes, "float32")] * 4
    compiled = jax.jit(measured_function(attend, is_backward=True)).lower(*inputs).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def measure(settings: Settings) -> Outcome:
    """Ours at three lengths and two layouts, jax.nn at the middle length."""
    (middle,) = settings.choose([16384], quick=2048)
    run = uuid.uuid4().hex[:12]
    dense = _dense_row(run, Shape.square(middle), settings)
    rows, claims = [dense], []
    for layout in LAYOUTS:
        small, ours, large = (
            _our_row(run, layout, Shape.square(tokens), settings)
            for tokens in (middle // 2, middle, middle * 2)
        )
        rows += [small, ours, large]
        share = _bytes(ours) / _bytes(dense)
        growth = _bytes(large) / _bytes(small)
        claims += [
            Claim(
                f"temporary memory, {layout}, {middle} tokens, forward+backward",
                f"<= {SHARE_LIMIT:.0%} of jax.nn",
                f"{share:.2%} ({format_bytes(_bytes(ours))} of {format_bytes(_bytes(dense))})",
                _at_most(share, SHARE_LIMIT),
            ),
            Claim(
                f"its growth, {layout}, {middle // 2} to {middle * 2} tokens",
                f"linear: factor <= {GROWTH_LIMIT}",
                f"{growth:.2f}",
                _at_most(growth, GROWTH_LIMIT),
            ),
        ]
    return rows, claims


def _at_most(value: float, limit: float) -> Verdict:
    return Verdict.PASS if value <= limit else Verdict.FAIL


def _bytes(row: BenchmarkRow) -> int:
    assert row.temp_bytes is not None
    return row.temp_bytes


def _dense_row(run: str, shape: Shape, settings: Settings) -> BenchmarkRow:
    return plain_row(
        "memory", run, shape, settings,
        side="jax.nn", implementation="jax.nn.dot_product_attention", direction="forward+backward",
        mask="causal", layout="none", budget=1.0,
        temp_bytes=planned_bytes(jax_worker.attend, shape),
    )  # fmt: skip


def _our_row(run: str, layout: str, shape: Shape, settings: Settings) -> BenchmarkRow:
    blocks = blocks_of(shape.q_tokens)
    grid = causal_grid(shape.q_heads, blocks)
    if layout != "causal":
        grid = ragged_grid(shape.q_heads, blocks, 0.25, seed=settings.seed)
    listed = xsake_worker.causal_layout(shape.q_tokens, BLOCK, None if layout == "causal" else grid)
    return plain_row(
        "memory", run, shape, settings,
        side=f"xsake {layout}", implementation="xsake.attention", direction="forward+backward",
        mask="causal", layout=layout, budget=budget_of(grid), block_q=BLOCK, block_kv=BLOCK,
        temp_bytes=planned_bytes(xsake_worker.attend_with(listed), shape),
    )  # fmt: skip


if __name__ == "__main__":
    command("memory", measure, __doc__)
