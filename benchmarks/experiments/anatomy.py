"""Where the time of the full causal forward pass goes: its loop, with parts of the work left out.

python -m benchmarks.experiments.anatomy           # 4096 tokens
python -m benchmarks.experiments.anatomy --quick

Every loop makes as many steps as the kernel on tiles of the kernel's size (12 rows of 128 queries,
4 blocks of 128 keys), so the differences between loops are what each part costs.
"""

import uuid
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xsake
from benchmarks.experiments.common import BLOCK, Outcome, Settings, command, draw_inputs, plain_row
from xsake.benchmarking import Ratio, Shape, Spread, TimedSide, interleave, pair_ratio
from xsake.benchmarking.rows import TimingStats
from xsake.benchmarking.runner import time_call
from xsake.kernels import online_softmax
from xsake.kernels.blocking import take, to_blocks
from xsake.masks import Causal

ROWS, BLOCKS = 12, 4
WHOLE = "whole kernel"
PARTS = {
    "products": (False, False),
    "products + gathers": (True, False),
    "products + softmax": (False, True),
    "products + gathers + softmax": (True, True),
}


def loop(is_gathered: bool, is_softmax: bool, steps: int) -> Callable[..., jax.Array]:
    """`steps` tiles of the forward pass, with or without the copies and the softmax."""

    @jax.jit
    def run(q, k, v):
        q, k, v = (to_blocks(x, BLOCK) for x in (q, k, v))
        start = online_softmax.init(ROWS, BLOCK, v.shape[-1], v.dtype)
        index = np.arange(ROWS * BLOCKS).reshape(ROWS, BLOCKS) * (k.shape[0] // (ROWS * BLOCKS))
        whole = (ROWS, BLOCKS * BLOCK, k.shape[-1])
        first = tuple(x[: ROWS * BLOCKS].reshape(whole) for x in (k, v))

        def step(_, carry):
            queries, state, index = carry
            keys, values = first
            if is_gathered:
                keys, values = (take(x, index).reshape(whole) for x in (k, v))
            logits = online_softmax.dot_products(queries, keys)
            if is_softmax:
                state = online_softmax.update(state, logits, values)
            else:
                state = state._replace(acc=online_softmax.matmul(logits, values))
            # The next step depends on this one, or the compiler would take it out of the loop.
            return queries + 1e-9 * state.acc, state, (index + 1) % k.shape[0]

        carry = q[:ROWS], start, jnp.asarray(index)
        return lax.fori_loop(0, steps, step, carry)[1].acc

    return run


def measure(settings: Settings) -> Outcome:
    """Time every loop and the kernel, interleaved, and compare with the kernel."""
    (tokens,) = settings.choose([4096])
    shape, run = Shape.square(tokens), uuid.uuid4().hex[:12]
    arrays = {name: jnp.asarray(x) for name, x in draw_inputs(shape, settings.seed).items()}
    inputs = [arrays[name] for name in "qkv"]
    blocks = tokens // BLOCK
    steps = shape.q_heads * blocks * (blocks + 1) // 2 // (ROWS * BLOCKS)
    calls = {name: loop(*parts, steps) for name, parts in PARTS.items()}
    calls[WHOLE] = jax.jit(lambda q, k, v: xsake.attention(q, k, v, mask=Causal()))
    sides = [
        TimedSide(name, lambda f=f: time_call(lambda: jax.block_until_ready(f(*inputs))))
        for name, f in calls.items()
    ]
    times = interleave(sides, rounds=settings.rounds)
    rows = [
        plain_row(
            "anatomy",
            run,
            shape,
            settings,
            side=name,
            implementation="xsake.attention" if name == WHOLE else "part of its loop",
            direction="forward",
            mask="causal",
            layout="causal",
            budget=1.0,
            block_q=BLOCK,
            block_kv=BLOCK,
            seconds=TimingStats(**vars(Spread.of(times[name]))),
            repeats=settings.rounds,
            ratios=[Ratio(baseline=WHOLE, **vars(pair_ratio(times[name], times[WHOLE])))],
        )
        for name in calls
    ]
    return rows, []


if __name__ == "__main__":
    command("anatomy", measure, __doc__)
