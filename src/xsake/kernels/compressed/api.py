"""Compressed attention as an operation: summaries of keys, and the blocks that they select."""

from jaxtyping import Array, Float, Int

from xsake.kernels.compressed.types import CompressedConfig, CompressedInputs
from xsake.kernels.dispatch import BackendSpec, Implementation, Op, StaticCall, define_attention
from xsake.kernels.sharding import vary_alike

_PACKAGE = "xsake.kernels.compressed"
OP = Op(
    BackendSpec("xla", f"{_PACKAGE}.xla"),
    BackendSpec("reference", f"{_PACKAGE}.reference", is_on_request=True, is_portable=True),
)
_attend = define_attention(OP)


def compressed_attention(
    inputs: CompressedInputs, config: CompressedConfig, *, implementation: Implementation = None
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"], Int[Array, "B Tq Hk Ns"] | None]:
    """Attention of every query over the summaries that it sees, and the blocks that it selects.

    `o = sum_i p_i v_i` with `p = softmax(scale * q.k)`; a block's score is the sum of `p` over the
    summaries that overlap it, as often as their strides lie in it, and over the query heads of a kv
    head, which share their blocks. A query that sees no summary gets zeros, lse -inf, and no
    gradient. No gradient flows through the selection.

    Args:
        inputs: arrays.
        config: numbers.
        implementation: a backend of `OP`; None: "xla".

    Returns:
        `(o, lse, blocks)`: lse is the log of the softmax denominator; blocks are best first, -1 in
        unused slots, or None without a selection.
    """
    names = OP.names(implementation)
    q, k, v, *context = inputs
    arrays, context = vary_alike(((q, k, v), tuple(context)))
    return _attend(StaticCall(names, config, CompressedInputs), arrays, context)
