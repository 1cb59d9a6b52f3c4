"""The configured operator: its settings, what it returns, and the same results on a mesh."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.attention.dense import attend, draw
from xsake.errors import ArgumentError
from xsake.masks import Causal

Q, K, V = draw(batch=2, q_tokens=50, q_heads=4, kv_heads=2)
TRIL = np.tril(np.ones((50, 50), bool))


def test_it_returns_out_and_lse_like_the_function():
    operator = xsake.BlockSparseAttention(scale=0.3, block_q=16, block_kv=16)
    out, own_lse = operator(Q, K, V, mask=Causal(), return_lse=True)
    np.testing.assert_allclose(out, attend(Q, K, V, TRIL, scale=0.3), atol=3e-6)
    _, lse = xsake.attention(Q, K, V, mask=Causal(), scale=0.3, return_lse=True)
    np.testing.assert_allclose(own_lse, lse, atol=1e-5)
    np.testing.assert_array_equal(operator(Q, K, V, mask=Causal()), out)


def test_it_is_frozen_hashable_and_passes_through_jit_as_static():
    operator = xsake.BlockSparseAttention(block_q=16, block_kv=16)
    assert operator == xsake.BlockSparseAttention(block_q=16, block_kv=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        operator.block_q = 8
    run = jax.jit(lambda f, *x: f(*x, mask=Causal()), static_argnums=0)
    np.testing.assert_allclose(run(operator, Q, K, V), attend(Q, K, V, TRIL), atol=3e-6)


def test_names_in_a_list_are_hashable_too():
    operator = xsake.BlockSparseAttention(implementation=["mosaic_tpu", "xla"])
    assert hash(operator) == hash(dataclasses.replace(operator))
    expected = xsake.attention(Q, K, V, mask=Causal(), implementation="xla")
    np.testing.assert_array_equal(operator(Q, K, V, mask=Causal()), expected)


def test_dtype_casts_the_inputs():
    out, lse = xsake.BlockSparseAttention(dtype=jnp.bfloat16)(Q, K, V, return_lse=True)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    mixed = xsake.BlockSparseAttention(dtype="float32")(Q.astype(np.float16), K, V)
    assert mixed.dtype == jnp.float32


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ArgumentError, match="None keeps the dtype"):
        xsake.BlockSparseAttention(dtype="int32")
    with pytest.raises(ArgumentError, match="block_q must be a positive number"):
        xsake.BlockSparseAttention(block_q=0)
    with pytest.raises(TypeError, match="causal"):
        xsake.BlockSparseAttention()(Q, K, V, causal=True)


SHARDED = textwrap.dedent("""
    import dataclasses
    import jax, jax.numpy as jnp, numpy as np, pytest
    from jax.sharding import Mesh
    import xsake
    from xsake.errors import UnsupportedError
    from xsake.layout import BlockLayout
    from xsake.masks import Causal, PerHead, Full

    assert jax.device_count() == 2
    keys = jax.random.split(jax.random.key(0), 5)
    draw = lambda key, *shape: jax.random.normal(key, shape)
    q, k, v = draw(keys[0], 2, 50, 4, 8), draw(keys[1], 2, 50, 2, 8), draw(keys[2], 2, 50, 2, 8)
    sinks, bias = draw(keys[3], 4), draw(keys[4], 1, 4, 50, 50)
    ids = jnp.asarray(np.repeat([[0, 1], [0, 0]], 25, axis=1), jnp.int32)
    rng = np.random.default_rng(0)
    sizes = dict(q_tokens=50, kv_tokens=50, block_q=16, block_kv=16)
    by_head = BlockLayout.from_block_mask(rng.random((4, 4, 4)) < 0.6, **sizes)
    by_batch = BlockLayout.from_block_mask(rng.random((2, 2, 4, 4)) < 0.6, **sizes)

    def compare(mesh, gradients=False, **arguments):
        plain = xsake.BlockSparseAttention(block_q=16, block_kv=16)
        results = []
        dense = dataclasses.replace(plain, implementation="reference")
        for operator in (dense, dataclasses.replace(plain, mesh=mesh)):
            def attend(q, k, v, sinks, bias):
                return operator(q, k, v, sinks=sinks, bias=bias, return_lse=True, **arguments)
            def loss(*arrays):
                out, lse = attend(*arrays)
                return (out**2).sum() + jnp.sin(jnp.where(jnp.isfinite(lse), lse, 0)).sum()
            run = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)) if gradients else attend
            results.append(jax.tree.leaves(jax.jit(run)(q, k, v, sinks, bias)))
        for one, other in zip(*results, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)

    devices = np.array(jax.devices())
    data, tensor = Mesh(devices, ("data",)), Mesh(devices.reshape(1, 2), ("data", "tensor"))
    compare(data, mask=Causal(), q_segment_ids=ids, gradients=True)
    positions = dict(q_positions=jnp.arange(50))
    compare(tensor, layout=by_head, mask=Causal(), **positions, gradients=True)
    compare(data, layout=by_batch)
    compare(tensor, layout=by_batch.traced())

    for mesh, arguments, message in (
        (tensor, dict(mask=PerHead([Causal(), Full()])), "per-head rules"),
        (Mesh(devices, ("tensor",)), dict(k=k[:, :, :1], v=v[:, :, :1]), "kv heads cannot"),
        (data, dict(q=q[:1], k=k[:1], v=v[:1]), "batch cannot"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            xsake.BlockSparseAttention(mesh=mesh)(**{"q": q, "k": k, "v": v, **arguments})

    seen = []
    attend = xsake.BlockSparseAttention(mesh=data)
    attend(q, k, v, mask=Causal()).block_until_ready()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: seen.append(event) if "backend_compile" in event else None)
    out = attend(q, k, v, mask=Causal())
    out.block_until_ready()
    assert seen == [], seen
    assert len(out.sharding.device_set) == 2
    print("sharded calls agree")
""")


@pytest.mark.slow  # a minute of compiling; a step on eight devices goes the same way
def test_a_mesh_of_two_devices_gives_the_same_results_and_gradients():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "sharded calls agree" in run.stdout, run.stderr[-3000:]
