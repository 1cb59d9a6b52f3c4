"""Code chosen by platform: lowered for its own platform only, under every transformation."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

import xsake
from xsake.errors import ArgumentError, UnsupportedError
from xsake.kernels.lowering import Unsupported, by_platform

X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)


def _tpu_kernel(x_ref, y_ref):
    """The whole array at once; no grid."""
    y_ref[...] = x_ref[...] * 3 + 1


def on_tpu(x):
    result = jax.eval_shape(jnp.copy, x)
    parameters = pltpu.CompilerParams(vmem_limit_bytes=2**20)
    return pl.pallas_call(_tpu_kernel, out_shape=result, compiler_params=parameters)(x)


def on_cpu(x):
    """The same in a loop, which is not what the TPU runs."""
    return jax.lax.fori_loop(0, 3, lambda _, y: y + x, jnp.ones_like(x))


def affine(x):
    return by_platform({"cpu": on_cpu, "tpu": on_tpu}, None, x)


@jax.custom_vjp
def differentiable(x):
    return affine(x)


differentiable.defvjp(lambda x: (affine(x), None), lambda _, cotangent: (affine(cotangent) - 1,))


def loss(x):
    return jnp.sum(jnp.square(differentiable(x)))


def stepwise(x):
    return jax.lax.scan(lambda y, _: (affine(y), y[0, 0]), x, None, length=3)


def until_large(x):
    return jax.lax.while_loop(lambda y: jnp.sum(y) < 1e7, affine, x)


TRANSFORMED = {
    "plain": (affine, X, 3 * X + 1),
    "vmap": (jax.vmap(affine), X[None] + np.ones((2, 1, 1), np.float32), 3 * X[None] + [[[4]]] * 2),
    "inner jit": (lambda x: jax.jit(affine)(x) + 1, X, 3 * X + 2),
    "scan": (stepwise, X, (27 * X + 13, np.array([0, 1, 4]))),
    "while": (until_large, X, 27 * X + 13),
    "grad": (jax.grad(loss), X, 6 * (3 * X + 1)),
    "checkpoint": (jax.grad(jax.checkpoint(loss)), X, 6 * (3 * X + 1)),
    "vmap of grad": (
        jax.vmap(jax.grad(loss)),
        np.stack([X, -X]),
        6 * np.stack([3 * X + 1, 1 - 3 * X]),
    ),
}
each_transformation = pytest.mark.parametrize("name", TRANSFORMED)


def assert_equal(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@each_transformation
def test_this_platform_runs_its_branch_inside_jit_and_outside(name):
    function, x, expected = TRANSFORMED[name]
    assert_equal(jax.jit(function)(x), expected)
    assert_equal(function(x), expected)


@each_transformation
def test_another_platform_gets_its_own_branch_and_no_other(name):
    function, x, _ = TRANSFORMED[name]
    traced = jax.jit(function).trace(x)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@each_transformation
def test_one_exported_artefact_serves_both_platforms(name):
    function, x, expected = TRANSFORMED[name]
    exported = jax.export.export(jax.jit(function), platforms=("cpu", "tpu"))(x)
    stored = jax.export.deserialize(exported.serialize())
    assert stored.platforms == ("cpu", "tpu")
    assert "tpu_custom_call" in stored.mlir_module()
    assert_equal(stored.call(x), expected)


def test_the_order_of_platforms_in_an_artefact_does_not_matter():
    for platforms in (("tpu", "cpu"), ("cuda", "tpu", "cpu"), ("rocm", "cpu", "cuda")):
        choose = lambda x: by_platform({"cpu": on_cpu}, lambda x: -x, x)
        exported = jax.export.export(jax.jit(choose), platforms=platforms)(X)
        assert_equal(jax.export.deserialize(exported.serialize()).call(X), 3 * X + 1)


def test_choices_may_be_nested_and_share_a_jitted_function():
    """JAX would lower the shared function once and use that for both platforms."""
    shared = jax.jit(
        lambda x: by_platform({"cpu": lambda x: 2 * x, "tpu": lambda x: 3 * x}, None, x)
    )
    outer = lambda x: by_platform(
        {"tpu": lambda x: shared(x) + 1, "cpu": lambda x: shared(x) - 1}, None, x
    )
    for platforms in (("cpu", "tpu"), ("tpu", "cpu")):
        exported = jax.export.export(jax.jit(outer), platforms=platforms)(X)
        assert_equal(exported.call(X), 2 * X - 1)


def test_vmap_takes_any_axis_and_operands_without_one():
    run = lambda x, y: by_platform({"cpu": lambda x, y: (x + y, y)}, lambda x, y: (x - y, y), x, y)
    total, _ = jax.vmap(run, in_axes=(1, None), out_axes=(1, 0))(X, X[:, 0])
    assert_equal(total, X + X[:, :1])
    both = jax.vmap(jax.vmap(run, in_axes=(None, 0)), in_axes=(0, None))(X[:, 0], X[0])
    assert_equal(both[0], X[:, :1] + X[:1])


@pytest.mark.parametrize("check_vma", [True, False])
def test_it_runs_inside_shard_map(check_vma):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = PartitionSpec("data")
    spread = jax.shard_map(affine, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    for run in (spread, jax.jit(spread)):
        assert_equal(run(X), 3 * X + 1)
    assert_equal(jax.jit(jax.vmap(spread))(X[None]), 3 * X[None] + 1)


def test_operands_and_results_are_pytrees():
    branch = lambda pair, nothing: {"sum": pair["a"] + pair["b"], "nothing": nothing}
    found = by_platform({"cpu": branch}, None, {"a": X, "b": 1.0}, None)
    assert found["nothing"] is None
    assert_equal(found["sum"], X + 1)


def test_effects_of_the_branch_that_runs_happen():
    seen = []

    def telling(x):
        jax.debug.callback(lambda y: seen.append(float(y)), x[0, 1])
        return x

    jax.block_until_ready(jax.jit(lambda x: by_platform({"tpu": on_tpu}, telling, x))(X))
    jax.effects_barrier()
    assert seen == [1.0]


def test_the_second_call_compiles_nothing():
    compilations = []
    listener = lambda event, _, **__: (
        compilations.append(event) if "backend_compile" in event else None
    )
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        branch = lambda x: x * 5
        for run in (
            lambda x: by_platform({"tpu": on_tpu}, branch, x),
            jax.vmap(lambda x: by_platform({"tpu": on_tpu}, branch, x)),
        ):
            run(X[None])
            assert len(compilations) == 1  # so the count counts
            run(X[None])
            assert len(compilations) == 1
            compilations.clear()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_a_platform_without_code_is_refused_when_lowered_and_not_before():
    only_tpu = lambda x: by_platform({"tpu": on_tpu}, None, x)
    assert jax.eval_shape(only_tpu, X).shape == X.shape
    assert (
        "tpu_custom_call" in jax.jit(only_tpu).trace(X).lower(lowering_platforms=("tpu",)).as_text()
    )
    for run in (
        only_tpu,
        jax.jit(only_tpu),
        jax.export.export(jax.jit(only_tpu), platforms=("cpu",)),
    ):
        with pytest.raises(UnsupportedError) as caught:
            run(X)
        for words in ("no code for the platform", "lowering for cpu", "for tpu only", "a default"):
            assert words in str(caught.value)


def test_a_refusal_is_told_to_whoever_lowers_for_its_platform():
    no = Unsupported("the kernel cannot run here", "it is too warm", "open a window")
    for branches, default in (({"cpu": no}, on_tpu), ({"tpu": on_tpu}, no)):
        with pytest.raises(UnsupportedError, match="for cpu: it is too warm") as caught:
            by_platform(branches, default, X)
        assert "open a window" in str(caught.value)


def test_an_unknown_platform_is_refused_while_tracing():
    with pytest.raises(ArgumentError, match="name 'cuda' or 'rocm'"):
        jax.eval_shape(lambda x: by_platform({"gpu": on_cpu}, on_cpu, x), X)


@pytest.mark.parametrize(
    ("branch", "words"),
    [(lambda x: x[0], r"float32\[128\]"), (lambda x: x.astype(jnp.bfloat16), "bfloat16")],
)
def test_branches_that_disagree_are_refused_when_lowered(branch, words):
    run = jax.jit(lambda x: by_platform({"tpu": branch}, lambda x: x, x))
    run(X)
    with pytest.raises(ArgumentError, match=words):
        run.trace(X).lower(lowering_platforms=("tpu",))


def test_branches_of_other_platforms_are_not_traced():
    traced = []
    jax.jit(lambda x: by_platform({"tpu": traced.append}, lambda x: x, x))(X)
    assert traced == []


def test_traced_arrays_must_be_operands():
    with pytest.raises(ArgumentError, match="pass the array to by_platform as an operand"):
        jax.jit(lambda x, y: by_platform({"cpu": lambda x: x + y}, None, x))(X, X)


def test_it_says_that_it_has_no_derivative():
    with pytest.raises(UnsupportedError, match="XSK-401.platform-derivative"):
        jax.grad(lambda x: affine(x).sum())(X)


def test_a_call_runs_where_jit_is_disabled():
    q = jnp.ones((1, 8, 2, 4))
    with jax.disable_jit():
        found = xsake.attention(q, q, q, mask=xsake.masks.Causal())
    np.testing.assert_array_equal(found, xsake.attention(q, q, q, mask=xsake.masks.Causal()))
