"""The backend of the distribution `xsake-cpu`: when it is chosen, and what JAX does with it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.distributed.devices import run_on_eight_devices
from xsake.errors import UnsupportedError
from xsake.kernels import native_library
from xsake.kernels.block_sparse.api import OP
from xsake.masks import Causal, FromFunction, PerHead, Window

needs_library = pytest.mark.skipif(
    OP.implementations()["native_cpu"] is not None, reason="xsake-cpu is not installed"
)


def draw(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.fixture
def arrays():
    return draw(2, 70, 4, 16), draw(2, 70, 2, 16, seed=1), draw(2, 70, 2, 24, seed=2)


@pytest.fixture
def fresh_library():
    native_library.load.cache_clear()
    yield
    native_library.load.cache_clear()


def test_without_the_package_the_reason_names_what_to_install(monkeypatch, arrays):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = xsake.explain(*arrays, mask=Causal())
    assert report.implementation == "xla"
    assert report.declined["native_cpu"] == (
        'it needs the package xsake_cpu: pip install "xsake[cpu]"'
    )
    with pytest.raises(UnsupportedError, match=r"xsake\[cpu\]"):
        xsake.attention(*arrays, implementation="native_cpu")


def test_a_library_that_jaxlib_would_refuse_is_not_registered(monkeypatch, fresh_library):
    def handlers():
        raise RuntimeError("XLA FFI version of xsake-cpu: got (0, 9), expected at most (0, 5)")

    module = types.SimpleNamespace(handlers=handlers)
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    refuse = lambda *_, **__: pytest.fail("registered")
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    assert "got (0, 9)" in str(native_library.missing_handler("forward"))


@needs_library
class TestWithTheLibrary:
    def test_it_is_the_choice_on_a_cpu(self, arrays):
        report = xsake.explain(*arrays, mask=Causal())
        assert report.implementation == "native_cpu"
        assert report.library == native_library.describe() and report.library in str(report)
        text = jax.jit(lambda *x: xsake.attention(*x, mask=Causal())).lower(*arrays).as_text()
        assert "xsake_cpu_forward" in text

    def test_what_it_cannot_compute_it_declines(self, arrays):
        wavy = FromFunction(lambda q, kv: jnp.sin(q * kv) > 0)
        positions = jnp.arange(70)[None]
        declined = xsake.explain(
            *arrays, mask=wavy, q_positions=positions, kv_positions=positions
        ).declined
        assert "computes with float32" in declined["native_cpu"]
        wide = [x.astype(np.float64) for x in map(np.asarray, arrays)]
        with jax.enable_x64(True):
            assert "float64" in xsake.explain(*wide).declined["native_cpu"]

    @pytest.mark.parametrize(
        "mask", [FromFunction(lambda q, kv: jnp.sin(q * kv) > 0), PerHead([Causal(), Window(9, 9)])]
    )
    def test_masks_without_a_program_and_of_heads(self, arrays, mask):
        run = lambda name: xsake.attention(*arrays, mask=mask, implementation=name)
        np.testing.assert_allclose(run("native_cpu"), run("reference"), atol=3e-6)

    def test_vmap_with_a_shared_bias_has_the_gradients_of_a_loop(self, arrays):
        bias = draw(1, 1, 70, 70)

        def loss(q, k, v, bias):
            out = xsake.attention(q, k, v, bias=bias, implementation="native_cpu")
            return (out**2).sum()

        several = [jnp.stack([x, 2 * x]) for x in arrays]
        both = jax.vmap(jax.grad(loss, (0, 3)), (0, 0, 0, None))(*several, bias)
        each = [jax.grad(loss, (0, 3))(*(x[i] for x in several), bias) for i in range(2)]
        for got, *parts in zip(both, *each, strict=True):
            np.testing.assert_array_equal(got, jnp.stack(parts))

    def test_an_exported_program_needs_no_library_unless_it_names_it(self, arrays):
        portable = jax.jit(lambda *x: xsake.attention(*x, mask=Causal()))
        stored = jax.export.export(portable, platforms=["cpu", "tpu"])(*arrays)
        assert "xsake_cpu" not in stored.mlir_module()
        np.testing.assert_allclose(stored.call(*arrays), portable(*arrays), atol=3e-6)
        named = jax.jit(lambda *x: xsake.attention(*x, implementation="native_cpu"))
        check = jax.export.DisabledSafetyCheck.custom_call("xsake_cpu_forward")
        stored = jax.export.export(named, disabled_checks=[check])(*arrays)
        again = jax.export.deserialize(stored.serialize()).call(*arrays)
        np.testing.assert_array_equal(again, named(*arrays))

    def test_scan_and_remat(self, arrays):
        q, k, v = arrays

        def layer(x, _):
            return x + xsake.attention(x, k, v[..., :16], implementation="native_cpu"), None

        def loss(q, wrap):
            return (jax.lax.scan(wrap(layer), q, None, length=3)[0] ** 2).sum()

        plain, again = (jax.grad(loss)(q, wrap) for wrap in (lambda f: f, jax.checkpoint))
        np.testing.assert_array_equal(plain, again)

    def test_shard_map_over_eight_devices_with_its_checks(self):
        run_on_eight_devices("""
import xsake
from jax.sharding import AxisType, PartitionSpec as P
from xsake.masks import Causal
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((4, 64, h, 16)), jnp.float32) for h in (4, 2, 2))
mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
spec = P("a", None, "b")
run = lambda *x: xsake.attention(*x, mask=Causal(), implementation="native_cpu")
inside = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
grad = lambda f: jax.jit(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)))
for _ in range(20):
    for got, expected in zip(grad(inside)(q, k, v), grad(run)(q, k, v), strict=True):
        np.testing.assert_array_equal(got, expected)
print("all right")
""", "all right")  # fmt: skip
