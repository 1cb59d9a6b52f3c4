"""Simulated devices: fake ones for meshes, and eight that compute, in processes of their own."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import xsake
from xsake.distributed import ContextParallel, MeshShape, batch_share, make_mesh
from xsake.masks import Causal

# The same settings that pytest and conftest.py give to tests in this process.
STRICT = """
import warnings
warnings.simplefilter("error")
from jaxtyping import install_import_hook
install_import_hook(
    "xsake",
    "beartype.beartype(conf=beartype.BeartypeConf(strategy=beartype.BeartypeStrategy.On))",
)
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_numpy_rank_promotion", "raise")
"""
COUNT = "--xla_force_host_platform_device_count="


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What a mesh wants to know of a device."""

    id: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"
    slice_index: int | None = None
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


def machines(processes: int, each: int, **more) -> list[FakeDevice]:
    return [FakeDevice(i, i // each, **more) for i in range(processes * each)]


def run_on_eight_devices(code: str, last_words: str) -> str:
    """What the code prints, `last_words` included; its error otherwise."""
    run = subprocess.run(
        [sys.executable, "-c", STRICT + textwrap.dedent(code)],
        env={**os.environ, "XLA_FLAGS": COUNT + "8"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0 and last_words in run.stdout, run.stdout + run.stderr[-4000:]
    return run.stdout


def ring_over_two_processes() -> None:
    """Compare a ring over the devices of two processes with one device, gradients included."""
    q = k = v = np.random.default_rng(0).normal(size=(2, 64, 2, 8)).astype(np.float32)
    loss = lambda attend, *x: (attend(*x, mask=Causal()) ** 2).sum()
    plain = xsake.BlockSparseAttention(implementation="reference")
    expected = jax.jit(jax.value_and_grad(lambda *x: loss(plain, *x), argnums=(0, 1, 2)))(q, k, v)
    for shape, share in ((MeshShape(data=2, context=4), jax.process_index()),
                         (MeshShape(context=8), 0)):  # fmt: skip
        mesh = make_mesh(shape)
        assert batch_share(mesh) == (share, shape.data), batch_share(mesh)
        attend = ContextParallel(
            mesh=mesh, exchange="ring", block_q=8, block_kv=8, implementation="reference"
        )
        whole = NamedSharding(mesh, PartitionSpec())
        arrays = [jax.make_array_from_process_local_data(whole, x, x.shape) for x in (q, k, v)]
        run = jax.value_and_grad(lambda *x, attend=attend: loss(attend, *x), argnums=(0, 1, 2))
        found = jax.jit(run, out_shardings=whole)(*arrays)
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            one, other = (np.asarray(x.addressable_data(0)) for x in (one, other))
            assert np.isfinite(one).all()
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())
    jax.distributed.shutdown()  # waits for the other process, which may still gather
