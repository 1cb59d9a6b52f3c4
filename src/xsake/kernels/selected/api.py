"""Selected attention as an operation: every query over the keys of its own blocks."""

from jaxtyping import Array, Float

from xsake.kernels.dispatch import (
    MOSAIC_RELEASES,
    BackendSpec,
    Implementation,
    Op,
    StaticCall,
    define_attention,
)
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs
from xsake.kernels.sharding import vary_alike

_PACKAGE = "xsake.kernels.selected"
OP = Op(
    BackendSpec("mosaic_gpu", f"{_PACKAGE}.mosaic_gpu", ("cuda",), MOSAIC_RELEASES),
    BackendSpec("mosaic_tpu", f"{_PACKAGE}.mosaic_tpu", ("tpu",), MOSAIC_RELEASES),
    BackendSpec.of_native_library(_PACKAGE, "selected"),
    BackendSpec("xla", f"{_PACKAGE}.xla"),
    BackendSpec("reference", f"{_PACKAGE}.reference", is_on_request=True, is_portable=True),
)
_attend = define_attention(OP)


def selected_attention(
    inputs: SelectedInputs, config: SelectedConfig, *, implementation: Implementation = None
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"]]:
    """Attention of every query over the keys of its own blocks, up to its own position.

    `o = sum_j softmax_j(scale * q.k_j) v_j`; the query heads of a kv head share their blocks. A
    query without a key gets zeros, lse -inf, and no gradient.

    Args:
        inputs: arrays and block lists.
        config: numbers.
        implementation: a backend of `OP`, or several in order of preference, which run or raise;
            None: the best for the platform that the call is compiled for.

    Returns:
        `(o, lse)`; lse is the log of the softmax denominator.
    """
    names = OP.names(implementation)
    OP.check(inputs, config, names)
    q, k, v, *context = inputs
    arrays, context = vary_alike(((q, k, v), tuple(context)))
    return _attend(StaticCall(names, config, SelectedInputs), arrays, context)
