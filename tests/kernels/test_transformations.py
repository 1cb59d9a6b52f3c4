"""jit, grad, vmap, remat and export; static and traced layouts; and how often anything compiles."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.kernels.compiled import compiled
from tests.kernels.implementations import each_implementation
from tests.lanes import slow
from xsake.layout import BlockLayout
from xsake.masks import Causal
from xsake.testing.case_table import BY_NAME
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import bind, call, with_gradients

CASE = ConformanceCase(
    "transformed", Causal(), block=(16, 16), q_tokens=45, kv_tokens=45, q_heads=2, kv_heads=1,
    head_dim=16, value_dim=16, sinks=0,
)  # fmt: skip


def loss_of(case, implementation):
    def loss(operands):
        out, lse = bind(xsake.attention, case, implementation)(operands, {})
        return jnp.sum(jnp.square(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    return loss


@pytest.mark.slow  # quicker: tests/attention, which calls outside of jit
@each_implementation
def test_jit_equals_eager(implementation):
    inputs = CASE.inputs()
    run = with_gradients(bind(xsake.attention, CASE, implementation))
    eager, jitted = call(run, inputs), call(compiled(CASE, implementation), inputs)
    for name in eager:
        np.testing.assert_allclose(eager[name], jitted[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow  # quicker: vmap over every operand, jit, export
@each_implementation
def test_remat_gives_the_same_gradients(implementation):
    operands, loss = CASE.inputs().operands, loss_of(CASE, implementation)
    plain = jax.jit(jax.grad(loss))(operands)
    remat = jax.jit(jax.grad(jax.checkpoint(loss)))(operands)
    for name in plain:
        np.testing.assert_allclose(plain[name], remat[name], rtol=1e-6, atol=1e-6, err_msg=name)


def arguments(seed=0):
    inputs = CASE.inputs(seed)
    return inputs.operands, inputs.integers, inputs.d_out, inputs.d_lse


@each_implementation
def test_vmap_equals_a_loop(implementation):
    draws = [arguments(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *each: np.stack(each), *draws)
    run = with_gradients(bind(xsake.attention, CASE, implementation))
    together = jax.jit(jax.vmap(run))(*stacked)
    for i, draw in enumerate(draws):
        for name, alone in compiled(CASE, implementation)(*draw).items():
            np.testing.assert_allclose(together[name][i], alone, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow  # quicker: vmap over every operand, jit, export
@each_implementation
def test_vmap_over_some_operands_only(implementation):
    operands = CASE.inputs().operands
    queries = np.stack([operands["q"], 2 * operands["q"]])
    attend = lambda q: bind(xsake.attention, CASE, implementation)({**operands, "q": q}, {})[0]
    together = jax.jit(jax.vmap(attend))(queries)
    for i in range(2):
        np.testing.assert_allclose(together[i], attend(queries[i]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # quicker: vmap over every operand, jit, export
@each_implementation
def test_vmap_over_traced_layouts(implementation):
    rng = np.random.default_rng(0)
    chosen = jnp.asarray(rng.random((3, 2, 3, 3)) < 0.5)
    operands = CASE.inputs().operands

    def attend(grid):
        layout = BlockLayout.from_block_mask(
            grid, q_tokens=45, kv_tokens=45, block_q=16, block_kv=16, mask=Causal()
        )
        return xsake.attention(**operands, layout=layout, implementation=implementation)

    together = jax.jit(jax.vmap(attend))(chosen)
    for i in range(3):
        np.testing.assert_allclose(together[i], jax.jit(attend)(chosen[i]), rtol=1e-5, atol=1e-6)


@each_implementation
def test_export_round_trip_keeps_values_and_gradients(implementation):
    run = compiled(CASE, implementation)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments())
    targets = "xsake_cpu_forward", "xsake_cpu_backward"
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
    stored = jax.export.export(run, platforms=["cpu"], disabled_checks=checks)(*shapes).serialize()
    again = jax.export.deserialize(stored).call(*arguments())
    for name, value in run(*arguments()).items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


@each_implementation
@pytest.mark.parametrize("unused", [37, slow(0)])
def test_traced_layout_gives_the_bits_of_the_static_one(implementation, unused):
    static = BY_NAME["ragged_grid"]
    layout, inputs = static.schedule, static.inputs()
    traced = dataclasses.replace(static, layout=lambda _: layout.traced(layout.items + unused))
    first, second = (call(compiled(case, implementation), inputs) for case in (static, traced))
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


@pytest.fixture
def compilations():
    """Counts what the compiler is asked for."""
    seen = []
    listener = lambda event, seconds, **_: (
        seen.append(event) if "backend_compile" in event else None
    )
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)


@each_implementation
def test_a_new_traced_layout_in_one_bucket_compiles_nothing(implementation, compilations):
    rng = np.random.default_rng(0)
    visible = np.tril(np.ones((6, 6), bool))
    case = ConformanceCase("bucket", q_tokens=96, kv_tokens=96)
    inputs = case.inputs()

    @jax.jit
    def step(layout, operands):
        attend = lambda operands: xsake.attention(
            **operands, layout=layout, implementation=implementation
        )
        return jax.value_and_grad(lambda operands: jnp.sum(jnp.square(attend(operands))))(operands)

    losses = []
    layouts = [
        BlockLayout.from_block_mask(
            (rng.random((2, 6, 6)) < keep) & visible, block_q=16, block_kv=16, mask=Causal()
        ).traced(64)
        for keep in (0.9, 0.5, 0.25, 0.1)
    ]
    for i, layout in enumerate(layouts):
        loss, _ = step(layout, inputs.operands)
        losses.append(float(loss))
        if i == 0:
            compilations.clear()
    assert compilations == []
    assert len({layout.items for layout in layouts}) == 4 and len(set(losses)) == 4
