"""Agreement with jax.nn where the semantics agree, and between implementations (N10)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.lanes import RUNNABLE, each_implementation, gate
from xsake.masks import Causal, Window
from xsake.testing.case_table import BY_NAME
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import compare, failures, reference_results, run_case

SHARED = {
    "causal": (Causal(), {"is_causal": True}),
    "full": (None, {}),
    "window": (Window(left=9, right=4), {"local_window_size": (9, 4)}),
}


@each_implementation
@pytest.mark.parametrize("name", gate(["window"], SHARED))
def test_agrees_with_jax_nn(name, implementation):
    mask, options = SHARED[name]
    case = ConformanceCase(
        name, mask, batch=2, q_tokens=70, kv_tokens=70, q_heads=4, kv_heads=2, bias=(True, True)
    )
    inputs = case.inputs()
    x = inputs.operands

    def peer(x):
        return jax.nn.dot_product_attention(x["q"], x["k"], x["v"], x["bias"], **options)

    def ours(x):
        return xsake.attention(**x, mask=mask, implementation=implementation)

    def with_gradient(attend):
        out, pull = jax.vjp(attend, {name: jnp.asarray(value) for name, value in x.items()})
        return out, pull(jnp.asarray(inputs.d_out))[0]

    (out, gradients), (peer_out, peer_gradients) = (
        with_gradient(jax.jit(ours)),
        with_gradient(jax.jit(peer)),
    )
    np.testing.assert_allclose(out, peer_out, atol=5e-6)
    for operand in x:
        np.testing.assert_allclose(
            gradients[operand], peer_gradients[operand], atol=2e-5, err_msg=operand
        )


@pytest.mark.parametrize("pair", list(itertools.combinations(RUNNABLE, 2)), ids="-".join)
def test_implementations_agree_with_each_other(pair):
    case = BY_NAME["everything"]
    inputs, truth, plain = reference_results(case)
    first, second = (run_case(xsake.attention, case, name, inputs) for name in pair)
    # Stricter than it must be: the second takes the place of the truth.
    wide = {
        name: np.where(np.isfinite(truth[name]), second[name].astype(np.float64), truth[name])
        for name in truth
    }
    assert failures(compare(first, plain, wide, dtype="float32")) == []
