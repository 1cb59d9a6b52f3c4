"""Attention statistics by the native kernels of the distribution `xsake-cpu`.

The kernels are those of the block-sparse forward pass up to the scores. Their lists hold the blocks
in which a chunk of queries may see a key.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.kernels import native_library
from xsake.kernels.mask_program import MaskProgram, flat_tables, trace_mask
from xsake.kernels.sharding import axes_of, vary
from xsake.kernels.statistics.spans import span_codes
from xsake.kernels.statistics.types import Statistics, StatisticsConfig, StatisticsInputs
from xsake.layout.csr import namespace
from xsake.layout.grid import count_blocks
from xsake.masks.coverage import ALL, NONE

CHUNK = 128  # queries of a list
# Queries that a caller has sampled lie far apart: fewer of them see fewer blocks.
SAMPLED_CHUNK = 32


def unavailable_reason() -> str | None:
    """Why the library cannot be used in this process; None if it can."""
    return native_library.missing_handler("statistics")


def describe_library() -> str:
    """Name, version and instruction set of the library."""
    return native_library.describe()


def unsupported_reason(
    inputs: StatisticsInputs, config: StatisticsConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call; None if it can."""
    if inputs.q.dtype.name not in native_library.DTYPES:
        return f"it computes in float32, and q is {inputs.q.dtype.name}"
    program = trace_mask(config.mask)
    return program if isinstance(program, str) else None


def statistics(inputs: StatisticsInputs, config: StatisticsConfig, platform: str) -> Statistics:
    """Every statistic of every query, from the blocks that hold a visible key."""
    library, program = native_library.load(), trace_mask(config.mask)
    batch, q_tokens, q_heads, dim = inputs.q.shape
    kv_tokens, kv_heads = inputs.k.shape[1:3]
    block_q = SAMPLED_CHUNK if 2 * q_tokens <= kv_tokens else CHUNK
    codes = span_codes(inputs, config.mask, block_q, config.block_kv)
    words, num_steps, program_heads = [], 0, 1
    if isinstance(program, MaskProgram):
        words = library.encode_program(program.steps, program.answer)
        num_steps, program_heads = len(program.steps), program.heads
    workspace = library.forward_workspace(
        batch=batch, q_tokens=q_tokens, kv_tokens=kv_tokens, q_heads=q_heads, kv_heads=kv_heads,
        dim=dim, v_dim=0, block_kv=config.block_kv, program_steps=num_steps,
    )  # fmt: skip
    no_blocks = np.zeros((0, block_q, config.block_kv), np.uint8), np.zeros(0, np.int32)
    operands = (
        inputs.q, inputs.k, inputs.k, *list_blocks(codes), flat_tables(program), *no_blocks,
        jnp.zeros((0,) * 4, inputs.q.dtype), *map(_or_empty, inputs[2:]),
    )  # fmt: skip
    axes = axes_of(operands)
    rows = jax.ShapeDtypeStruct(inputs.q.shape[:3], jnp.float32)
    blocks = count_blocks(kv_tokens, config.block_kv)
    call = jax.ffi.ffi_call(
        "xsake_cpu_statistics",
        (
            rows,
            rows,
            jax.ShapeDtypeStruct((*rows.shape, blocks), jnp.float32),
            jax.ShapeDtypeStruct((workspace,), np.uint8),
        ),
        vmap_method="sequential",
    )
    outputs = call(
        *vary(tuple(map(jnp.asarray, operands)), axes),
        scale=np.float32(config.scale), softcap=np.float32(config.softcap or 0),
        block_q=block_q, block_kv=config.block_kv,
        layout_batch=codes.shape[0], layout_heads=codes.shape[1],
        program=np.array(words, np.int32), program_heads=program_heads,
    )  # fmt: skip
    return Statistics(*vary(outputs, axes)[:3])


def list_blocks(codes: Any) -> tuple[Any, Any, Any]:
    """Row starts, kv blocks and whether they are partial, from codes [batch, heads, rows, blocks].

    Codes of run time make lists of a fixed length, whose end is not used.
    """
    xp, flat = namespace(codes), codes.reshape(-1)
    is_listed = flat != NONE
    if xp is np:
        item = np.flatnonzero(is_listed)
    else:
        item = jnp.nonzero(is_listed, size=flat.size, fill_value=0)[0]
    counts = is_listed.reshape(-1, codes.shape[-1]).sum(-1, dtype=xp.int32)
    starts = xp.concatenate([xp.zeros(1, xp.int32), xp.cumsum(counts, dtype=xp.int32)])
    return starts, (item % codes.shape[-1]).astype(xp.int32), flat[item] != ALL


def _or_empty(x: Array | None) -> Array:
    """Optional integers of tokens; without elements if they are absent."""
    return jnp.zeros((0, 0), jnp.int32) if x is None else x.astype(jnp.int32)
