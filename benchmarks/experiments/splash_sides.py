"""Both sides of the comparison with splash attention, compiled in the process of one TPU target.

python -m benchmarks.experiments.splash_sides TARGET DUMP_FOLDER  # started by `splash`

Jobs come in and answers go out as JSON lines. Grid steps are read from the `pallas_call`s of the
traced function, of both sides alike: the product of the grid. An iteration is what a kernel does
again and again: at splash a grid step, which computes one block, or nothing where its block mask is
0 (`MaskInfo.block_mask`); at ours one turn of the loop inside a grid step, which takes a few listed
blocks of a row at once and computes those that fill up a row's last turn in vain
(`mosaic_tpu.passes`).
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from benchmarks.experiments.splash_job import Job
from xsake._provenance import installed_versions
from xsake.certify import llo, tpu
from xsake.kernels.block_sparse.mosaic_tpu import kernels as mosaic_tpu
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.layout import BlockLayout
from xsake.layout.synthetic import ragged_grid
from xsake.masks import AbstractMask, Causal, PerHead, Window

PASSES = ("forward", "dq", "dkv")
UNIT = 128
WINDOW = 1024


class GridMask(splash_mask.Mask):
    """Causal attention in the listed blocks of one head, by slices of whole blocks."""

    def __init__(self, grid: np.ndarray, tokens: int):
        self.grid, self.tokens = grid, tokens

    @property
    def shape(self) -> tuple[int, int]:
        """[queries, keys]."""
        return self.tokens, self.tokens

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        q, kv = (np.arange(self.tokens)[part] for part in idx)
        blocks = self.grid[np.ix_(q[::UNIT] // UNIT, kv[::UNIT] // UNIT)]
        pairs = blocks.repeat(UNIT, 0).repeat(UNIT, 1)
        return pairs if q[0] >= kv[-1] else pairs & (q[:, None] >= kv)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GridMask) and np.array_equal(self.grid, other.grid)

    def __hash__(self) -> int:
        return hash(self.grid.tobytes())


def drawn_grid(job: Job) -> np.ndarray:
    """The block grid of ragged heads that both sides compute."""
    mean = int(job.mask.removeprefix("ragged_")) / 100
    return ragged_grid(job.q_heads, job.tokens // UNIT, mean, seed=job.seed)


def splash_kernel(job: Job) -> splash.SplashAttentionKernel:
    """Splash attention for the job's mask, all passes in blocks of one size."""
    shape = (job.tokens, job.tokens)
    causal, window = (
        splash_mask.CausalMask(shape),
        splash_mask.LocalMask(shape, (WINDOW - 1, 0), 0),
    )
    named = {"causal": [causal], "window": [window], "per_head": [causal, window]}
    if job.mask in named:
        heads = named[job.mask] * (job.q_heads // len(named[job.mask]))
    else:
        heads = [GridMask(grid, job.tokens) for grid in drawn_grid(job)]
    fields = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv")
    more = ("block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
    sizes = splash.BlockSizes(**dict.fromkeys(fields + more, job.block))
    return splash.make_splash_mha(
        splash_mask.MultiHeadMask(heads), block_sizes=sizes, head_shards=1, q_seq_shards=1
    )


def our_layout(job: Job) -> BlockLayout:
    """The layout of the job's mask."""
    window = Window(left=WINDOW - 1, right=0)
    masks: dict[str, AbstractMask] = {
        "causal": Causal(),
        "window": window,
        "per_head": PerHead([Causal(), window] * (job.q_heads // 2)),
    }
    if job.mask in masks:
        return BlockLayout.from_mask(
            masks[job.mask], q_tokens=job.tokens, block_q=job.block, block_kv=job.block
        )
    drawn = BlockLayout.from_block_mask(
        drawn_grid(job),
        q_tokens=job.tokens,
        kv_tokens=job.tokens,
        block_q=UNIT,
        block_kv=UNIT,
        mask=Causal(),
    )
    return drawn if job.block == UNIT else drawn.resize(job.block, job.block)


class Side(NamedTuple):
    """One side of a job.

    Attributes:
        functions: what to trace and compile, by the passes in it.
        arguments: of all functions.
        blocks: by pass: blocks listed, blocks computed, blocks that an iteration computes.
        iterations: by pass; None where they are the grid steps.
    """

    functions: dict[str, Callable]
    arguments: tuple
    blocks: dict[str, tuple[int, int, int]]
    iterations: dict[str, int] | None = None


def splash_side(job: Job) -> Side:
    """Forward and backward in one function: splash keeps its passes to itself."""
    kernel = splash_kernel(job)
    q, k = (
        jax.ShapeDtypeStruct((heads, job.tokens, job.head_dim), jnp.bfloat16)
        for heads in (job.q_heads, job.kv_heads)
    )

    def gradients(q, k, v, d_out):
        out, pull = jax.vjp(kernel, q, k, v)
        return out, pull(d_out)

    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    blocks = job.q_heads * (job.tokens // job.block) ** 2
    live = [_live(info and info.block_mask, job.q_heads, blocks) for info in infos]
    return Side(
        {" ".join(PASSES): gradients},
        (q, k, k, q),
        {name: (count, count, 1) for name, count in zip(PASSES, live, strict=True)},
    )


def _live(block_mask, heads: int, blocks: int) -> int:
    """Steps that splash computes: one mask may stand for all heads, none for all blocks."""
    if block_mask is None:
        return blocks
    return int(np.count_nonzero(block_mask)) * (heads // block_mask.shape[0])


def our_side(job: Job) -> Side:
    """A function per pass."""
    layout, problem = our_layout(job), BlockSparseConfig(scale=job.head_dim**-0.5)
    q, k = (
        jax.ShapeDtypeStruct((1, job.tokens, heads, job.head_dim), jnp.bfloat16)
        for heads in (job.q_heads, job.kv_heads)
    )
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)

    def of(gradient):
        def run(q, k, v, d_out, out, lse, d_lse):
            given = BlockSparseInputs(q, k, v, layout=layout)
            return gradient(given, problem, out, lse, d_out, d_lse)

        return run

    def forward(q, k, v, *_):
        return mosaic_tpu.forward(BlockSparseInputs(q, k, v, layout=layout), problem, "tpu")

    functions = {
        "forward": forward,
        "dq": of(mosaic_tpu.dq_pass),
        "dkv": of(mosaic_tpu.dkv_pass),
    }
    counted = mosaic_tpu.count_passes(BlockSparseInputs(q, k, k, layout=layout), problem, "tpu")
    blocks = {
        name: (one.listed, one.computed, one.tiles.blocks)
        for name, one in zip(PASSES, counted, strict=True)
    }
    iterations = {name: one.steps for name, one in zip(PASSES, counted, strict=True)}
    return Side(functions, (q, k, k, q, q, lse, lse), blocks, iterations)


def grids(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """`(kernel name, grid)` of every `pallas_call` in a traced function."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            mapping = equation.params["grid_mapping"]
            yield equation.params["name"], tuple(int(size) for size in mapping.grid)
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                yield from grids(inner)


def pass_of(kernel: str) -> str:
    """Which pass a kernel is, by its name."""
    words = kernel.lower().replace("/", "").replace("_", " ").split()
    found = {"dkdv": "dkv", "dkv": "dkv", "dq": "dq"}
    return next(
        (found[word.split(".")[0]] for word in words if word.split(".")[0] in found), "forward"
    )


def answer(job: Job, target: str, dump: Path) -> dict[str, dict[str, int]]:
    """Counts of every pass; blocks are counted in units of 128 x 128 pairs."""
    side = (splash_side if job.side == "splash" else our_side)(job)
    area = (job.block // UNIT) ** 2
    kinds = ("listed_blocks", "computed_blocks", "iteration_blocks")
    counts = {
        name: {kind: int(n) * area for kind, n in zip(kinds, side.blocks[name], strict=True)}
        for name in PASSES
    }
    for names, run in side.functions.items():
        traced = jax.make_jaxpr(run)(*side.arguments)
        for kernel, grid in grids(traced.jaxpr):
            found = counts[pass_of(kernel)] if " " in names else counts[names]
            found["grid_steps"] = found.get("grid_steps", 0) + math.prod(grid)
            found["launches"] = found.get("launches", 0) + 1
        if job.is_compiled:
            _clear(dump)
            facts = tpu.compile(run, side.arguments, tpu.TARGETS[target], dump)
            for kernel in llo.read_kernels(dump):
                found = counts[pass_of(kernel.name)] if " " in names else counts[names]
                found.update(_schedule(kernel))
                found["temp_bytes"] = facts.temp_bytes or 0
    for name, found in counts.items():
        if job.mask.startswith("ragged"):  # larger blocks compute more than was asked for
            found["listed_blocks"] = int(drawn_grid(job).sum())
        found["iterations"] = side.iterations[name] if side.iterations else found["grid_steps"]
    jax.clear_caches()
    return counts


def _schedule(kernel: llo.LloKernel) -> dict[str, int]:
    """What the final schedule says about a kernel; names as in `xsake.certify.tpu`."""
    facts = tpu.collect_facts([kernel], 0.0, None)
    names = ("vmem_bytes", "smem_bytes", "spills", "bundles", "loop_bundles")
    found = {name: getattr(facts, name) for name in names} | facts.details
    if kernel.inner_loops:
        loops = sum(section.bundles for loop in kernel.inner_loops for section in loop)
        found["around_bundles"] = sum(section.bundles for section in kernel.grid_loop) - loops
    return {name: count for name, count in found.items() if isinstance(count, int)}


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def main(arguments: list[str]) -> None:
    """Answer the jobs on standard input."""
    target, dump = arguments
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    replies.write(json.dumps(installed_versions(("jax", "jaxlib", "numpy", "libtpu"))) + "\n")
    for line in sys.stdin:
        try:
            reply: dict = {"counts": answer(Job(**json.loads(line)), target, Path(dump))}
        except Exception as error:  # noqa: BLE001 - a refusal is a result, with its own words
            reply = {"refused": f"{type(error).__name__}: {error}"[:2000]}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
