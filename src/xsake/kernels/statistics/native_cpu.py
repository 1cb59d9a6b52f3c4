"""Attention statistics by the native kernels of the distribution `xsake-cpu`.

The kernels are those of the block-sparse forward pass up to the scores. Their lists hold the blocks
in which a chunk of queries may see a key.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake.kernels import native_library
from xsake.kernels.mask_program import flat_tables, trace_mask
from xsake.kernels.statistics.spans import span_codes
from xsake.kernels.statistics.types import Statistics, StatisticsConfig, StatisticsInputs
from xsake.layout.csr import namespace
from xsake.layout.grid import count_blocks
from xsake.masks.coverage import ALL, NONE

CHUNK = 128  # queries of a list
# Queries that a caller has sampled lie far apart: fewer of them see fewer blocks.
SAMPLED_CHUNK = 32


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
    program = trace_mask(config.mask)
    assert not isinstance(program, str)  # refused before
    q_tokens, kv_tokens = inputs.q.shape[1], inputs.k.shape[1]
    block_q = SAMPLED_CHUNK if 2 * q_tokens <= kv_tokens else CHUNK
    codes = span_codes(inputs, config.mask, block_q, config.block_kv)
    words, num_steps, program_heads = native_library.encode(program)
    no_blocks = np.zeros((0, block_q, config.block_kv), np.uint8), np.zeros(0, np.int32)
    tokens = (native_library.or_empty(x, 2, jnp.int32).astype(jnp.int32) for x in inputs[2:])
    operands = (
        inputs.q, inputs.k, inputs.k, *list_blocks(codes), flat_tables(program), *no_blocks,
        native_library.or_empty(None, 4, inputs.q.dtype), *tokens,
    )  # fmt: skip
    rows = jax.ShapeDtypeStruct(inputs.q.shape[:3], jnp.float32)
    blocks = count_blocks(kv_tokens, config.block_kv)
    results = rows, rows, jax.ShapeDtypeStruct((*rows.shape, blocks), jnp.float32)
    outputs = native_library.call(
        "statistics", operands, results,
        sizes=native_library.sizes_of(inputs.q, inputs.k)
        | {"block_kv": config.block_kv, "program_steps": num_steps},
        scale=np.float32(config.scale), softcap=np.float32(config.softcap or 0),
        block_q=block_q, block_kv=config.block_kv,
        layout_batch=codes.shape[0], layout_heads=codes.shape[1],
        program=words, program_heads=program_heads,
    )  # fmt: skip
    return Statistics(*outputs)


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
