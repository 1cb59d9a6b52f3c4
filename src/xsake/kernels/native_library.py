"""The library of the distribution `xsake-cpu`, loaded and registered once per process."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.kernels.mask_program import MaskProgram
from xsake.kernels.sharding import axes_of, vary

DTYPES = ("float32", "bfloat16", "float16")  # of arrays; sums are float32


@functools.cache
def load() -> Any:
    """Return the module `xsake_cpu` with its handlers registered, or the reason why it cannot run.

    A handler of a newer FFI than that of the running jaxlib would make every program of the CPU
    fail, so versions are compared before anything is registered.
    """
    try:
        library: Any = importlib.import_module("xsake_cpu")
        handlers = library.handlers()
    except (ImportError, OSError, RuntimeError) as error:
        return f"xsake-cpu cannot be used: {error}"
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return library


def missing_handler(name: str) -> str | None:
    """Why a handler cannot be used in this process; None if it can."""
    library = load()
    if isinstance(library, str) or f"xsake_cpu_{name}" in library.handlers():
        return library if isinstance(library, str) else None
    return f"xsake-cpu {library.version()} has no kernels for it: pip install -U xsake-cpu"


def describe() -> str:
    """Return name, version and instruction set of the library, or why it cannot run."""
    library = load()
    if isinstance(library, str):
        return library
    return f"xsake-cpu {library.version()}, {library.isa()}"


def call(
    name: str,
    operands: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    sizes: dict[str, int] | None = None,
    **attributes: Any,
) -> Sequence[Array]:
    """Results of the handler `xsake_cpu_<name>`.

    Its workspace is one more result, so that XLA knows of the memory. `sizes` are those that the
    workspace depends on; None: it needs none.
    """
    shapes = list(results)
    if sizes is not None:
        shapes.append(jax.ShapeDtypeStruct((load().workspace(name, **sizes),), np.uint8))
    arrays = tuple(map(jnp.asarray, operands))
    axes = axes_of(arrays)
    handler = jax.ffi.ffi_call(f"xsake_cpu_{name}", shapes, vmap_method="sequential")
    return vary(handler(*vary(arrays, axes), **attributes), axes)[: len(results)]


def sizes_of(q: Any, v: Any) -> dict[str, int]:
    """Sizes of q [B, Tq, Hq, D] and v [B, Tk, Hk, Dv] that a workspace depends on."""
    batch, q_tokens, q_heads, dim = q.shape
    _, kv_tokens, kv_heads, v_dim = v.shape
    names = ("batch", "q_tokens", "kv_tokens", "q_heads", "kv_heads", "dim", "v_dim")
    sizes = batch, q_tokens, kv_tokens, q_heads, kv_heads, dim, v_dim
    return dict(zip(names, sizes, strict=True))


def encode(program: MaskProgram | None) -> tuple[np.ndarray, int, int]:
    """A mask program as the handlers read it, its steps and its heads."""
    if program is None:
        return np.zeros(0, np.int32), 0, 1
    words = load().encode_program(program.steps, program.answer)
    return np.array(words, np.int32), len(program.steps), program.heads


def or_empty(x: Array | None, ndim: int, dtype: Any) -> Array:
    """An optional operand; without elements if it is absent."""
    return jnp.zeros((0,) * ndim, dtype) if x is None else x
