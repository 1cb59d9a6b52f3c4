"""Attention over pages by the native kernels of the distribution `xsake-cpu`.

Pages are read in place: a list of fewer pages costs as much less.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.kernels import native_library
from xsake.kernels.mask_program import flat_tables, trace_mask
from xsake.kernels.paged_decode.types import PagedConfig, PagedInputs


def unsupported_reason(inputs: PagedInputs, config: PagedConfig, platform: str) -> str | None:
    """Why this backend cannot serve the call; None if it can."""
    if inputs.q.dtype.name not in native_library.DTYPES:
        return f"it computes in float32, and q is {inputs.q.dtype.name}"
    program = trace_mask(config.mask)
    return program if isinstance(program, str) else None


def forward(inputs: PagedInputs, config: PagedConfig, platform: str) -> tuple[Array, Array]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    program = trace_mask(config.mask)
    assert not isinstance(program, str)  # refused before
    words, num_steps, program_heads = native_library.encode(program)
    (batch, q_tokens, q_heads, dim), (_, kv_heads, page_size, v_dim) = (
        inputs.q.shape,
        inputs.v.shape,
    )
    scales = (native_library.or_empty(x, 2, jnp.float32) for x in (inputs.k_scale, inputs.v_scale))
    o, lse = native_library.call(
        "paged", (*inputs[:8], *scales, flat_tables(program)),
        (
            jax.ShapeDtypeStruct((batch, q_tokens, q_heads, v_dim), inputs.q.dtype),
            jax.ShapeDtypeStruct((batch, q_tokens, q_heads), jnp.float32),
        ),
        sizes={
            "batch": batch, "q_tokens": q_tokens, "q_heads": q_heads, "kv_heads": kv_heads,
            "dim": dim, "v_dim": v_dim, "kv_tokens": inputs.page.shape[2] * page_size,
            "block_kv": page_size, "program_steps": num_steps,
        },
        scale=np.float32(config.scale), softcap=np.float32(config.softcap or 0),
        program=words, program_heads=program_heads,
    )  # fmt: skip
    return o, lse
