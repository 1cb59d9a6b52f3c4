"""Arrays whose types name mesh axes: explicit shardings, and values that vary inside shard_map."""

import pytest

from tests.distributed.devices import run_on_eight_devices

ARRAYS = """
import xsake
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from xsake import BlockLayout, nsa
from xsake.errors import UnsupportedError
from xsake.kernels.statistics import block_statistics
from xsake.masks import Causal, Full, PerHead

rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
q, k, v = draw(4, 40, 4, 8), draw(4, 40, 2, 8), draw(4, 40, 2, 8)
bias, sinks = draw(1, 1, 40, 40), draw(4, 2)
ids = jnp.asarray(np.sort(rng.integers(0, 3, (4, 40)), 1), jnp.int32)
spec = P("a", None, "b")
grid = np.tril(np.ones((3, 3), bool))
layout = BlockLayout.from_block_mask(grid, q_tokens=40, kv_tokens=40, block_q=16, block_kv=16)
sizes = nsa.Config(length=8, stride=4, size=8, count=4, window=10)

def attend(q, k, v, bias, sinks, ids):
    return xsake.attention(
        q, k, v, layout=layout, mask=Causal(), bias=bias, sinks=sinks, softcap=5.0,
        q_segment_ids=ids, return_lse=True,
    )

def native(q, k, v):
    gates = nsa.Gates(*[jnp.full_like(q[..., 0], gate) for gate in (0.5, 1.0, 2.0)])
    return nsa.attention(q, k, v, gates, config=sizes)

def results(function, differentiable):
    # Results and every gradient of a loss of them.
    def run(*arrays):
        def loss(*given):
            found = function(*given, *arrays[differentiable:])
            return sum((x**2).sum() for x in jax.tree.leaves(found)), found
        number = tuple(range(differentiable))
        gradients, found = jax.grad(loss, argnums=number, has_aux=True)(*arrays[:differentiable])
        return found, gradients
    return jax.jit(run)

def check(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)
"""

EXPLICIT = """
mesh = jax.make_mesh((4, 2), ("a", "b"))
assert mesh.axis_types == (AxisType.Explicit,) * 2
split = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
"""
MANUAL = """
mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
on_mesh = lambda function, *specs: jax.shard_map(
    function, mesh=mesh, in_specs=specs, out_specs=spec)
"""


def test_arrays_that_are_split_over_explicit_axes():
    run_on_eight_devices(ARRAYS + EXPLICIT + """
out, lse = attend(*split, bias, sinks, ids)
check((out, lse), attend(q, k, v, bias, sinks, ids))
assert out.sharding.spec == P("a", None, "b", None)

def refused(message, *arrays, **given):
    try:
        xsake.attention(*arrays, **given)
    except UnsupportedError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

along = lambda *axes: [jax.device_put(x, NamedSharding(mesh, P(*axes))) for x in (q, k, v)]
refused("splits the batch and the heads", *along(None, "a"))
refused("splits the batch and the heads", split[0], *along("b")[1:])
wide = jax.device_put(q, NamedSharding(mesh, P(None, None, "a")))
refused("instead of 2", wide, k, v)
refused("per-head rules", *split, mask=PerHead([Causal(), Full()]))
flat = jax.device_put(ids, NamedSharding(mesh, P("b", "a")))
refused("segment_ids is split over other axes", *split, q_segment_ids=flat)
print("all right")
""", "all right")  # fmt: skip


@pytest.mark.slow
def test_gradients_and_other_operations_on_explicit_axes():
    run_on_eight_devices(ARRAYS + EXPLICIT + """
with jax.set_mesh(mesh):
    outputs, gradients = results(attend, 5)(*split, bias, sinks, ids)
check((outputs, gradients), results(attend, 5)(q, k, v, bias, sinks, ids))
assert gradients[0].sharding.spec == P("a", None, "b", None)
check(native(*split), native(q, k, v))
with jax.set_mesh(mesh):
    check(results(native, 3)(*split), results(native, 3)(q, k, v))
powers = lambda q, k: jax.tree.map(jnp.exp, block_statistics(q, k, block_kv=16))
check(powers(*split[:2]), powers(q, k))
print("all right")
""", "all right")  # fmt: skip


@pytest.mark.slow  # quicker: arrays that are split over explicit axes
def test_attention_inside_shard_map_with_its_checks():
    run_on_eight_devices(ARRAYS + MANUAL + """
inside = on_mesh(attend, spec, spec, spec, P(), P("b"), P("a"))
expected = results(attend, 5)(q, k, v, bias, sinks, ids)
check(results(inside, 5)(q, k, v, bias, sinks, ids), expected)

run = lambda q, k, v, layout: xsake.attention(q, k, v, layout=layout)
inside = on_mesh(run, spec, spec, spec, P())
arrays = q, k, v, layout.traced()
check(results(inside, 3)(*arrays), results(run, 3)(*arrays))
print("all right")
""", "all right")  # fmt: skip


@pytest.mark.slow
def test_other_operations_inside_shard_map_with_its_checks():
    run_on_eight_devices(ARRAYS + MANUAL + """
check(results(on_mesh(native, spec, spec, spec), 3)(q, k, v), results(native, 3)(q, k, v))
powers = lambda q, k, ids: jax.tree.map(
    jnp.exp, block_statistics(q, k, block_kv=16, q_segment_ids=ids))
check(on_mesh(powers, spec, spec, P("a"))(q, k, ids), powers(q, k, ids))
print("all right")
""", "all right")  # fmt: skip


@pytest.mark.slow  # quicker: arrays that are split over explicit axes
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_kernels_lower_inside_shard_map_with_its_checks(platform):
    run_on_eight_devices(ARRAYS + MANUAL + f"""
from xsake.kernels.block_sparse.mosaic_gpu import ops
ops.capability = lambda: (9, 0)
run = lambda q, k, v: xsake.attention(q, k, v, mask=Causal())
own = (jnp.arange(256) // 64)[None, :, None, None]
listed = lambda q, k, v: nsa.selected_attention(
    q, k, v, jnp.broadcast_to(own, (1, 256, k.shape[2], 1)), block_size=64)
q, k = (jax.ShapeDtypeStruct((4, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
for function in (run, listed):
    f = on_mesh(function, spec, spec, spec)
    loss = lambda *arrays: f(*arrays).astype(jnp.float32).sum()
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k)
    text = traced.lower(lowering_platforms=("{platform}",)).as_text()
    assert "tpu_custom_call" in text or "mosaic_gpu" in text
print("all right")
""", "all right")  # fmt: skip
