"""Native CPU kernels of XSAKE as XLA FFI handlers: forward, backward, decode (of contiguous
keys and of pages), scores of pages, selection of blocks, selected attention, statistics.

The library is loaded by ctypes and contains no Python code. It was built with the FFI headers of
the oldest supported jaxlib; `handlers` checks that the running jaxlib accepts them.
"""

import ctypes
import functools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

__all__ = [
    "encode_program",
    "ffi_api_version",
    "handlers",
    "isa",
    "runtime_ffi_api_version",
    "version",
    "workspace",
]

_TARGETS = (
    "xsake_cpu_forward",
    "xsake_cpu_backward",
    "xsake_cpu_decode",
    "xsake_cpu_selected",
    "xsake_cpu_selected_backward",
    "xsake_cpu_paged",
    "xsake_cpu_page_labels",
    "xsake_cpu_statistics",
    "xsake_cpu_top_blocks",
)

_WORKSPACES = (
    "forward",
    "backward",
    "decode",
    "selected",
    "selected_backward",
    "top_blocks",
)

# Codes of mask_program.h.
_OPERATIONS = (
    "and",
    "or",
    "xor",
    "not",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "neg",
    "abs",
    "sign",
    "min",
    "max",
    "div",
    "rem",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "population_count",
    "clz",
    "select_n",
    "to_bool",
    "to_int32",
    "to_uint32",
)
_KINDS = {"position": 1, "constant": 2, "table": 3, "step": 4}
_TYPES = {"bool": 0, "int32": 1, "uint32": 2}


@functools.cache
def _library() -> ctypes.CDLL:
    path = os.environ.get("XSAKE_CPU_LIBRARY")
    if path is None:
        path = str(pathlib.Path(__file__).with_name("libxsake_cpu.so"))
    library = ctypes.CDLL(path)
    library.xsake_cpu_isa.restype = ctypes.c_char_p
    for name in _WORKSPACES:
        size = getattr(library, f"xsake_cpu_{name}_workspace")
        size.restype, size.argtypes = ctypes.c_int64, [ctypes.c_int64] * 12
    return library


def isa() -> str:
    """The instruction set: amx, avx512, avx2, base or neon; XSAKE_CPU_ISA selects a lower one."""
    return _library().xsake_cpu_isa().decode()


def version() -> str:
    """Version of the distribution; 0 from a source tree."""
    from importlib import metadata

    try:
        return metadata.version("xsake-cpu")
    except metadata.PackageNotFoundError:
        return "0"


def ffi_api_version() -> tuple[int, int]:
    """XLA FFI version that the library was built with."""
    major, minor = ctypes.c_int32(), ctypes.c_int32()
    _library().xsake_cpu_ffi_version(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def runtime_ffi_api_version() -> tuple[int, int]:
    """XLA FFI version of the running jaxlib, from the header that it ships."""
    import jax

    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{name} (\d+)", header)[1])  # type: ignore[index]
        for name in ("MAJOR", "MINOR")
    )
    return major, minor


def handlers() -> dict[str, Any]:
    """Capsules of the handlers by target name, for `jax.ffi.register_ffi_target`.

    Raises:
        RuntimeError: the running jaxlib is older than the library. Registering the handlers would
            make its CPU backend fail for every program.
    """
    import jax

    built, runtime = ffi_api_version(), runtime_ffi_api_version()
    if built[0] != runtime[0] or built[1] > runtime[1]:
        raise RuntimeError(
            f"XLA FFI version of xsake-cpu: got {built}, expected at most {runtime} of the running "
            "jaxlib. Update jaxlib, or install an older xsake-cpu."
        )
    return {target: jax.ffi.pycapsule(getattr(_library(), target)) for target in _TARGETS}


def workspace(
    name: str,
    *,
    batch: int,
    q_tokens: int,
    kv_tokens: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    block_kv: int,
    block_q: int = 1,
    program_steps: int = 0,
    num_slots: int = 0,
    workers: int | None = None,
) -> int:
    """Bytes of the workspace of a call of the handler `xsake_cpu_<name>`.

    `block_q` counts for the backward pass; for `top_blocks` it is the number of index heads of a
    group. `program_steps` are those of the mask program,
    `num_slots` those of selected attention.
    `workers` is the number of threads that there is scratch for, by default those of the machine.
    It changes no result.
    """
    if name == "statistics":  # read no values
        name, v_dim = "forward", 0
    elif name == "paged":  # kv_tokens are those of the slots of a list
        name = "decode"
    workers = os.cpu_count() or 1 if workers is None else workers
    sizes = (batch, q_tokens, kv_tokens, q_heads, kv_heads, dim, v_dim, block_q, block_kv)
    size = getattr(_library(), f"xsake_cpu_{name}_workspace")
    return size(*sizes, program_steps, num_slots, workers)


def encode_program(steps: Sequence[Any], answer: Any) -> list[int]:
    """Encode a mask program for the attribute `program`: see csrc/mask_program.h.

    Args:
        steps: `(operation, terms)` each; a term is `(kind, number, dtype)`, as in
            `xsake.kernels.mask_program`.
        answer: the term that is the result.
    """
    words = [len(steps), *_encode_term(answer)]
    for operation, terms in steps:
        encoded = [word for term in terms for word in _encode_term(term)]
        words += [_OPERATIONS.index(operation), *encoded, *[0] * (9 - len(encoded))]
    return words


def _encode_term(term: Any) -> list[int]:
    kind, number, dtype = term
    number = int(number) & 0xFFFFFFFF
    return [_KINDS[kind], number - (number >> 31 << 32), _TYPES[dtype]]
