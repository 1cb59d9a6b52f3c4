"""What every JAX adapter does alike: forward or value_and_grad, compiled ahead, waited for."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.protocol import Prepared

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def measured_function(attend: Attend, is_backward: bool) -> Callable:
    """`(q, k, v, cotangent)` to the output, or to the gradients of `sum(output * cotangent)`."""
    if not is_backward:
        return lambda q, k, v, cotangent: {"out": attend(q, k, v)}
    loss = lambda q, k, v, cotangent: jnp.sum(attend(q, k, v) * cotangent)

    def value_and_gradients(q, k, v, cotangent):
        value, (dq, dk, dv) = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v, cotangent)
        return {"value": value, "dq": dq, "dk": dk, "dv": dv}

    return value_and_gradients


def prepare_jax(attend: Attend, arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """Compile `attend` for the inputs and say how many temporary bytes the compiler planned."""
    inputs = [jnp.asarray(arrays[x], case["dtype"]) for x in ("q", "k", "v", "cotangent")]
    compiled = jax.jit(measured_function(attend, case["backward"])).lower(*inputs).compile()
    facts = {
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "device": inputs[0].device.device_kind,
    }
    fetch = lambda out: {name: np.asarray(array, np.float32) for name, array in out.items()}
    return Prepared(lambda: jax.block_until_ready(compiled(*inputs)), fetch, facts)
