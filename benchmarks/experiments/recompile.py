"""Traced layouts are data: changing one inside its capacity bucket must not compile anything.

python -m benchmarks.experiments.recompile         # 2048 tokens, forward and forward+backward
python -m benchmarks.experiments.recompile --quick
"""

import uuid
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import xsake
from benchmarks.experiments.common import (
    BLOCK,
    Outcome,
    Settings,
    blocks_of,
    budget_of,
    command,
    draw_inputs,
    plain_row,
)
from benchmarks.experiments.reference import TOLERANCE, relative_error, true_attention
from benchmarks.peers.jax_call import measured_function
from benchmarks.peers.xsake_worker import causal_layout
from xsake.benchmarking import Claim, Shape, Verdict
from xsake.layout import BlockLayout, capacity_bucket
from xsake.layout.synthetic import ragged_grid

MEANS = (0.46, 0.44, 0.42, 0.40)


class CompilationCounter:
    """Counts the backend compilations of this process, as JAX itself reports them."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, _seconds: float, **_: object) -> None:
        self.count += event == self.EVENT

    def during(self, work: Callable[[], object]) -> int:
        """Compilations while `work` runs to its end."""
        before = self.count
        jax.block_until_ready(work())
        return self.count - before


def measure(settings: Settings) -> Outcome:
    """Call once, then with other layouts; count, and check that each layout was obeyed."""
    (tokens,) = settings.choose([2048], quick=2048)  # at 1024 the budgets are not in one bucket
    shape = Shape.square(tokens)
    grids = [
        ragged_grid(shape.q_heads, blocks_of(tokens), mean, seed=settings.seed + number)
        for number, mean in enumerate(MEANS)
    ]
    statics = [causal_layout(tokens, BLOCK, grid) for grid in grids]
    (capacity,) = {capacity_bucket(layout.items) for layout in statics}  # one bucket or an error
    layouts = [layout.traced(capacity) for layout in statics]
    counter, run = CompilationCounter(), uuid.uuid4().hex[:12]
    rows, claims = [], []
    for is_backward in (False, True):
        first, later, error = _count(counter, shape, grids, layouts, is_backward, settings)
        direction = "forward+backward" if is_backward else "forward"
        rows.append(
            plain_row(
                "recompile",
                run,
                shape,
                settings,
                side=direction,
                implementation="xsake.attention",
                direction=direction,
                mask="causal",
                layout=f"traced, capacity {capacity}",
                budget=budget_of(grids[0]),
                block_q=BLOCK,
                block_kv=BLOCK,
                compilations=later,
                repeats=len(grids) - 1,
                max_error=error,
                is_correct=error <= TOLERANCE["float32"],
            )  # fmt: skip
        )
        budgets = f"{budget_of(grids[0]):.0%} to {budget_of(grids[-1]):.0%}"
        is_good = later == 0 and first > 0 and error <= TOLERANCE["float32"]
        claims.append(
            Claim(
                f"traced layouts, budgets {budgets} in one bucket, {direction}",
                "no recompilation, results right",
                f"{first} at first, {later} after; error {error:.0e}",
                Verdict.PASS if is_good else Verdict.FAIL,
            )
        )
    return rows, claims


def _count(
    counter: CompilationCounter,
    shape: Shape,
    grids: list[np.ndarray],
    layouts: list[BlockLayout],
    is_backward: bool,
    settings: Settings,
) -> tuple[int, int, float]:
    """Compilations of the first call, of all later ones, and the worst error of any."""
    arrays = draw_inputs(shape, settings.seed)
    inputs = [jnp.asarray(arrays[name]) for name in ("q", "k", "v", "cotangent")]

    @jax.jit
    def call(layout, *inputs):
        attend = lambda q, k, v: xsake.attention(q, k, v, layout=layout)
        return measured_function(attend, is_backward)(*inputs)

    counts, worst = [], 0.0
    for grid, layout in zip(grids, layouts, strict=True):
        outputs: dict[str, jax.Array] = {}
        counts.append(
            counter.during(lambda layout=layout, keep=outputs: keep.update(call(layout, *inputs)))
        )
        measured = {name: np.asarray(array) for name, array in outputs.items()}
        truth = true_attention(arrays, grid, BLOCK, is_backward=is_backward)
        worst = max(worst, relative_error(measured, truth))
    return counts[0], sum(counts[1:]), worst


if __name__ == "__main__":
    command("recompile", measure, __doc__)
