"""Our own side, under the same protocol as every peer.

It also runs with earlier commits of the package, so it uses nothing but their public names.
"""

import functools
import importlib.util

import jax
import numpy as np

import xsake
from benchmarks.peers.jax_call import Attend, prepare_jax
from benchmarks.peers.protocol import Prepared
from xsake.layout import BlockLayout
from xsake.masks import Causal


def versions() -> dict[str, str]:
    """What is measured."""
    found = {"xsake": xsake.__version__, "jax": jax.__version__}
    if importlib.util.find_spec("xsake_cpu") is not None:
        library = importlib.import_module("xsake_cpu")
        found["xsake-cpu"] = f"{library.version()} {library.isa()}"
    return found


def start(threads: int) -> None:
    """XLA sizes its pool by the cores the process may use, which are set already."""


def causal_layout(tokens: int, block: int, grid: np.ndarray | None) -> BlockLayout:
    """The layout of a causal call: every visible block, or those of `grid[H, Nq, Nk]`."""
    sizes = {"q_tokens": tokens, "kv_tokens": tokens, "block_q": block, "block_kv": block}
    if grid is None:
        return BlockLayout.from_mask(Causal(), **sizes)
    return BlockLayout.from_block_mask(grid, mask=Causal(), **sizes)


def attend_with(layout: BlockLayout | None, call: str = "attention") -> Attend:
    """`xsake.attention` over a layout that is known when it compiles; the call names a backend."""
    implementation = None if call == "attention" else call
    return functools.partial(xsake.attention, layout=layout, implementation=implementation)


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """A causal call over all visible blocks or over the named grid; one query sees all keys."""
    grid = None if case["grid"] is None else arrays[case["grid"]]
    tokens = arrays["q"].shape[1]
    layout = None if tokens == 1 else causal_layout(tokens, case["block"], grid)
    return prepare_jax(attend_with(layout, case["call"]), arrays, case)
