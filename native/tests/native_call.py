"""The raw handlers as functions on the arrays of a `Case`."""

import functools

import jax
import numpy as np
import xsake_cpu

# INVALID_ARGUMENT of a handler, raised while a program is dispatched or when its result is read.
ERRORS = (jax.errors.JaxRuntimeError, ValueError)


@functools.cache
def register():
    """Register every handler once."""
    for name, capsule in xsake_cpu.handlers().items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")


def _arguments(case):
    return (
        case.q,
        case.k,
        case.v,
        case.row_starts,
        case.kv_block,
        case.is_partial,
        case.tables,
        case.mask_blocks,
        case.mask_index,
        case.bias,
        case.q_positions,
        case.kv_positions,
        case.q_segment_ids,
        case.kv_segment_ids,
    )


def _attributes(case):
    return {
        "scale": np.float32(case.scale),
        "softcap": np.float32(case.softcap),
        "block_q": np.int64(case.block_q),
        "block_kv": np.int64(case.block_kv),
        "layout_batch": np.int64(case.layout_batch),
        "layout_heads": np.int64(case.layout_heads),
        "program": tuple(case.program),
        "program_heads": np.int64(case.program_heads),
    }


def workspace_sizes(case, workers=2):
    """Keyword arguments of `xsake_cpu.workspace`."""
    batch, q_tokens, q_heads, dim = case.q.shape
    _, kv_tokens, kv_heads, v_dim = case.v.shape
    steps = case.program[0] if case.program else 0
    return {
        "batch": batch,
        "q_tokens": q_tokens,
        "kv_tokens": kv_tokens,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "v_dim": v_dim,
        "block_q": case.block_q,
        "block_kv": case.block_kv,
        "program_steps": steps,
        "workers": workers,
    }


def _outputs(case):
    batch, q_tokens, q_heads, _ = case.q.shape
    return (
        jax.ShapeDtypeStruct((batch, q_tokens, q_heads, case.v.shape[-1]), case.q.dtype),
        jax.ShapeDtypeStruct((batch, q_tokens, q_heads), np.float32),
    )


@functools.cache
def _compile(target, results, attributes):
    register()
    call = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(*x) for x in results])
    values = {k: np.array(v, np.int32) if k == "program" else v for k, v in attributes}
    # Without the workspace.
    return jax.jit(lambda *x: call(*x, **values)[:-1])


def _call(target, results, arguments, attributes):
    key = tuple((x.shape, np.dtype(x.dtype)) for x in results)
    return [np.asarray(x) for x in _compile(target, key, tuple(attributes.items()))(*arguments)]


def _workspace(size):
    return jax.ShapeDtypeStruct((size,), np.uint8)


def forward(case, workers=2, target="forward"):
    """`(o, lse)`."""
    size = xsake_cpu.workspace(target, **workspace_sizes(case, workers))
    results = (*_outputs(case), _workspace(size))
    return _call(f"xsake_cpu_{target}", results, _arguments(case), _attributes(case))


def decode(case, workers=2):
    """`(o, lse)`."""
    return forward(case, workers, "decode")


def backward(case, o, lse, do, dlse, workers=2):
    """`(dq, dk, dv, dbias)`."""
    size = xsake_cpu.workspace("backward", **workspace_sizes(case, workers))
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    dbias = jax.ShapeDtypeStruct(case.bias.shape, np.float32)
    results = like(case.q), like(case.k), like(case.v), dbias, _workspace(size)
    arguments = (*_arguments(case), o, lse, do, dlse)
    return _call("xsake_cpu_backward", results, arguments, _attributes(case))
