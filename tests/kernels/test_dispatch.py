"""The implementation is picked for every platform while tracing, and used when lowered for it."""

import subprocess
import sys
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh

import xsake
from xsake.attention.types import AttentionArgs
from xsake.attention.validation import canonicalize_args
from xsake.errors import ArgumentError, UnsupportedError
from xsake.kernels import dispatch
from xsake.kernels.block_sparse.api import OP
from xsake.kernels.block_sparse.xla import kernels as xla
from xsake.kernels.selected.api import OP as SELECTED_OP
from xsake.masks import Causal

Q = np.random.default_rng(0).standard_normal((1, 40, 2, 16), np.float32) / 2


def _through_tpu(x):
    """A copy that only a TPU can make."""

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def _forward(inputs, config, platform):
    return xla.forward(inputs._replace(q=_through_tpu(inputs.q)), config, platform)


def _backward(inputs, config, platform, *residuals):
    return xla.backward(inputs._replace(q=_through_tpu(inputs.q)), config, platform, *residuals)


def _unsupported_reason(inputs, config, platform):
    return "it knows no softcap" if config.softcap is not None else None


@pytest.fixture
def only_tpu(monkeypatch):
    """A backend that comes first, runs on TPUs only and is seen in a lowered program."""
    fake = types.SimpleNamespace(
        unsupported_reason=_unsupported_reason,
        count_passes=xla.count_passes,
        forward=_forward,
        backward=_backward,
    )
    spec = dispatch.BackendSpec("only_tpu", fake, ("tpu",))
    monkeypatch.setattr(OP, "backends", (spec, OP.spec("xla"), OP.spec("reference")))


def attend(q, **arguments):
    return xsake.attention(q, q, q, mask=Causal(), **arguments)


def value_and_gradient(q, **arguments):
    return jax.value_and_grad(lambda q: jnp.sum(jnp.square(attend(q, **arguments))))(q)


def kernels_for(platform, function) -> int:
    lowered = jax.jit(function).trace(Q).lower(lowering_platforms=(platform,))
    return lowered.as_text().count("tpu_custom_call")


def test_each_platform_runs_its_own_choice_forward_and_backward(only_tpu):
    assert kernels_for("tpu", attend) == 1
    assert kernels_for("tpu", value_and_gradient) == 2
    for platform in ("cpu", "cuda", "rocm"):
        assert kernels_for(platform, value_and_gradient) == 0


def test_what_the_best_cannot_serve_goes_to_the_next(only_tpu):
    assert kernels_for("tpu", lambda q: attend(q, softcap=2.0)) == 0


def test_one_artefact_holds_both_kernels_and_runs_here(only_tpu):
    step = jax.jit(value_and_gradient)
    exported = jax.export.export(step, platforms=("cpu", "tpu"))(Q)
    stored = jax.export.deserialize(exported.serialize())
    assert stored.mlir_module().count("tpu_custom_call") == 2
    for one, other in zip(stored.call(Q), step(Q), strict=True):
        np.testing.assert_array_equal(one, other)


def test_where_platforms_agree_there_is_no_dispatch(only_tpu):
    """The dense reference has no choice of tile sizes either, so nothing is left to choose."""
    jaxpr = str(jax.make_jaxpr(lambda q: attend(q, implementation="reference"))(Q))
    assert "by_platform" not in jaxpr
    assert "by_platform" in str(jax.make_jaxpr(attend)(Q))


def test_it_works_under_vmap_and_checkpoint(only_tpu):
    stacked = np.stack([Q, 2 * Q])
    loss = jax.checkpoint(lambda q: jnp.sum(jnp.square(attend(q))))
    together = jax.jit(jax.vmap(jax.grad(loss)))(stacked)
    for i in range(2):
        alone = value_and_gradient(stacked[i])[1]
        np.testing.assert_allclose(together[i], alone, rtol=1e-4, atol=1e-4)
    assert kernels_for("tpu", lambda q: jax.vmap(attend)(q[None])) == 1


def test_a_named_implementation_compiles_for_its_platform_and_is_refused_on_others(only_tpu):
    named = lambda q: attend(q, implementation="only_tpu")
    assert kernels_for("tpu", named) == 1
    assert jax.eval_shape(named, Q).shape == Q.shape
    for run in (named, jax.jit(named), jax.grad(lambda q: named(q).sum())):
        with pytest.raises(UnsupportedError) as caught:
            run(Q)
        for words in ("'only_tpu' cannot serve", "for cpu: it runs on tpu only", "implementation="):
            assert words in str(caught.value)
    with pytest.raises(UnsupportedError, match="for rocm: it runs on tpu only"):
        kernels_for("rocm", named)


def test_a_reason_that_holds_everywhere_is_told_at_once(only_tpu):
    with pytest.raises(UnsupportedError, match="it knows no softcap"):
        jax.eval_shape(lambda q: attend(q, softcap=2.0, implementation="only_tpu"), Q)


def test_a_mesh_makes_the_same_choice(only_tpu):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    operator = xsake.BlockSparseAttention(mesh=mesh)
    run = lambda q: operator(q, q, q, mask=Causal())
    assert kernels_for("tpu", run) == 1
    np.testing.assert_allclose(run(Q), attend(Q), rtol=1e-6)


def test_implementations_are_listed_with_the_reason_they_cannot_run_here(only_tpu):
    assert OP.implementations() == {
        "only_tpu": "it runs on tpu only",
        "xla": None,
        "reference": None,
    }


def test_explain_tells_what_another_platform_would_run(only_tpu):
    here = xsake.explain(Q, Q, Q)
    assert (here.implementation, here.platform) == ("xla", "cpu")
    assert here.declined["only_tpu"] == "it runs on tpu only"
    there = xsake.explain(Q, Q, Q, platform="tpu")
    assert (there.implementation, there.platform) == ("only_tpu", "tpu")
    assert set(there.declined) == {"xla", "reference"}
    operands, problem, _ = canonicalize_args(Q, Q, Q, AttentionArgs())
    assert there.passes == xla.count_passes(operands, problem, "tpu") != here.passes
    assert "only_tpu on tpu" in str(there) and "tiles of" in str(there)
    other = xsake.explain(Q, Q, Q, softcap=2.0, platform="tpu")
    assert (other.implementation, other.declined["only_tpu"]) == ("xla", "it knows no softcap")
    with pytest.raises(UnsupportedError, match="on cpu: it runs on tpu only"):
        xsake.explain(Q, Q, Q, implementation="only_tpu")


def test_explain_knows_platforms_by_the_names_that_code_is_lowered_for():
    assert xsake.explain(Q, Q, Q, platform="rocm").platform == "rocm"
    with pytest.raises(ArgumentError, match="'cuda' or 'rocm' for a GPU"):
        xsake.explain(Q, Q, Q, platform="gpu")


def test_a_gpu_is_named_after_its_maker(monkeypatch):
    for version, name in (("cuda 12090", "cuda"), ("PJRT C API\nrocm 70000", "rocm")):
        client = types.SimpleNamespace(platform_version=version)
        device = types.SimpleNamespace(platform="gpu", client=client)
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        assert dispatch.default_platform() == name


def test_several_names_are_tried_in_order(only_tpu):
    in_order = lambda q, **more: attend(q, implementation=("only_tpu", "xla"), **more)
    assert kernels_for("tpu", in_order) == 1
    assert kernels_for("tpu", lambda q: in_order(q, softcap=2.0)) == 0
    np.testing.assert_array_equal(in_order(Q), attend(Q, implementation="xla"))
    with pytest.raises(UnsupportedError, match=r"(?s)'only_tpu'.*runs on tpu only"):
        xsake.explain(Q, Q, Q, implementation=["only_tpu"])
    with pytest.raises(ArgumentError, match="XSK-102.implementation-name"):
        attend(Q, implementation=["xla", "other"])
    with pytest.raises(ArgumentError, match="XSK-102.implementation-name"):
        attend(Q, implementation=[])


def test_nothing_of_an_accelerator_is_imported_for_a_cpu():
    script = """
import sys, jax.numpy as jnp, xsake
q = jnp.ones((1, 300, 2, 16))
xsake.attention(q, q, q, mask=xsake.masks.Causal())
xsake.explain(q, q, q, mask=xsake.masks.Causal())
loaded = [name for name in sys.modules if name.startswith("xsake") and "mosaic" in name]
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


OTHER_RELEASE = "its kernels were certified with jax 0.12, this is jax 0.10.2"


def test_kernels_decline_on_a_release_of_jax_they_were_not_certified_with(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    for platform, name in (("tpu", "mosaic_tpu"), ("sm_80", "mosaic_gpu"), ("cuda", "mosaic_gpu")):
        there = xsake.explain(q, q, q, mask=Causal(), platform=platform)
        assert (there.implementation, there.declined[name]) == ("xla", OTHER_RELEASE)
        with pytest.raises(UnsupportedError, match=OTHER_RELEASE):
            jax.eval_shape(lambda q, name=name: attend(q, implementation=name), q)
    lowered = jax.jit(attend).trace(q).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" not in lowered.as_text()


@pytest.mark.parametrize("op", [OP, SELECTED_OP], ids=["block_sparse", "selected"])
def test_a_release_is_checked_before_a_kernel_is_imported(monkeypatch, op):
    of_mosaic = [spec for spec in op.backends if "mosaic" in spec.name]
    assert of_mosaic and all(spec.jax_releases == dispatch.MOSAIC_RELEASES for spec in of_mosaic)
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    for spec in of_mosaic:
        missing = spec._replace(module="xsake.kernels.no_such_module")
        assert missing.unsupported_reason(None, None, spec.platforms[0]) == OTHER_RELEASE
    for version in ("0.12.0", "0.12.0.1", "0.12.1"):
        monkeypatch.setattr(jax, "__version__", version)
        assert of_mosaic[0].platform_reason(of_mosaic[0].platforms[0]) is None
