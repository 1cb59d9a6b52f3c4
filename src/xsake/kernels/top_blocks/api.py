"""Scores and selection of blocks as an operation: arguments, backends."""

import functools

import jax
from jaxtyping import Array, Int

from xsake.kernels.dispatch import BackendSpec, Implementation, Op, StaticCall
from xsake.kernels.lowering import by_platform
from xsake.kernels.sharding import vary_alike
from xsake.kernels.top_blocks.types import TopBlocksConfig, TopBlocksInputs

_PACKAGE = "xsake.kernels.top_blocks"
OP = Op(
    BackendSpec.of_native_library(_PACKAGE, "top_blocks"),
    BackendSpec("xla", f"{_PACKAGE}.xla"),
    BackendSpec("reference", f"{_PACKAGE}.reference", is_on_request=True, is_portable=True),
)


def top_blocks(
    inputs: TopBlocksInputs, config: TopBlocksConfig, *, implementation: Implementation = None
) -> Int[Array, "B Tq Hg Ns"]:
    """Select the blocks with the largest scores of every query and group.

    The score of a key is the sum of `weight * q.k` over the index heads of a group, and that of a
    block the maximum over the keys that the query sees; or the score of the mean of its keys, once
    the query sees all of them. Forced blocks come first. Memory is linear in the number of tokens.
    No gradient flows through the selection.

    Args:
        inputs: arrays.
        config: numbers.
        implementation: a backend of `OP`; None: the best one for the platform.

    Returns:
        Blocks, best first, -1 in unused slots.
    """
    names = OP.names(implementation)
    OP.check(inputs, config, names)
    arrays = vary_alike(tuple(map(jax.lax.stop_gradient, inputs[:3])) + tuple(inputs[3:]))
    return _run(StaticCall(names, config, TopBlocksInputs), arrays)


# Jitted here so that calls outside of `jit` compile once.
@functools.partial(jax.jit, static_argnums=0)
def _run(call: StaticCall, arrays: tuple) -> Array:
    def select(platform: str, *arrays):
        inputs = TopBlocksInputs(*arrays)
        spec = OP.choose(inputs, call.config, platform, call.implementation)
        return spec.load().forward(inputs, call.config, platform)

    return by_platform(*OP.branches(call, select), *arrays)
