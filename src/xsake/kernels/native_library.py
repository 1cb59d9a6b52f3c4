"""The library of the distribution `xsake-cpu`, loaded and registered once per process."""

import functools
import importlib
from typing import Any

import jax

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
    """Why an operation that came after the first release cannot run; None if it can."""
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
