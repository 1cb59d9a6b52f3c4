"""TPUs: libtpu compiles for them without one, and writes the final schedule down on request."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsake.certify import llo
from xsake.certify.case import Case
from xsake.certify.family import Facts, Peak, Target
from xsake.errors import ArgumentError
from xsake.kernels.block_sparse.problem import TileSizes

NAME = "tpu"
KERNELS = "xsake.kernels.block_sparse.mosaic_tpu"
SELECTED_KERNELS = "xsake.kernels.selected.mosaic_tpu"
PLATFORM = "tpu"
PACKAGES = ("libtpu",)

_MEBI, _GIBI = 2**20, 2**30


def _target(
    name: str, topology: str, description: str, cores: int, figures: tuple, pages: str
) -> Target:
    """`figures`: teraflops, gigabytes per second, GiB and vector memory MiB of a device."""
    tera_flops, giga_bytes, gibi, mebi = figures
    source = f"Google Cloud documentation, {pages}; vector memory per core from JAX's own TPU table"
    peak = Peak(tera_flops * 1e12, giga_bytes * 1e9, int(gibi * _GIBI), mebi * _MEBI, source)
    return Target(name, NAME, topology, description, cores, peak)


_V4 = _target(
    "v4", "v4:2x2x1", "TPU v4: two cores, one JAX device", 2, (275, 1200, 32, 16), "page TPU v4"
)
_V5E = _target("v5e", "v5e:2x2", "TPU v5e: one core", 1, (197, 819, 16, 128), "page TPU v5e")
_V5P = _target(
    "v5p", "v5p:2x2x1", "TPU v5p: two cores, one JAX device", 2, (459, 2765, 95, 64), "page TPU7x"
)
_V6E = _target(
    "v6e", "v6e:2x2", "TPU v6e (Trillium): one core", 1, (918, 1638, 32, 128), "page TPU7x"
)
_TPU7X = _target(
    "tpu7x",
    "tpu7x:2x2x1",
    "TPU7x (Ironwood): two cores, a JAX device each",
    1,
    (2307 / 2, 7380 / 2, 192 / 2, 64),
    "half of a chip on page TPU7x",
)
TARGETS = {target.name: target for target in (_V4, _V5E, _V5P, _V6E, _TPU7X)}

# libtpu's default for v4 is a device per core; on Google Cloud, JAX sees both cores as one.
_CHIP_CONFIG = {"v4": {"chip_config_name": "megacore"}}

# Any block size and head dimension compiles, so a tile is bad only by what it takes to hold it.
CONTROLS = (
    Case(
        name="control_head_too_wide",
        pass_name="forward",
        shape="one block of 8 tokens that does not fit into vector memory",
        tokens=32,
        q_heads=1,
        kv_heads=1,
        head_dim=32768,
        budget=1.0,
        block=8,
        tiles=TileSizes(rows=1, blocks=1),
        expects="refused",
        because=r"out of memory in memory space vmem",
    ),
    Case(
        name="control_tile_too_large",
        pass_name="forward",
        shape="blocks that fit into vector memory, and a tile of 32 of them that does not",
        tokens=512,
        q_heads=1,
        kv_heads=1,
        head_dim=4096,
        budget=1.0,
        block=8,
        tiles=TileSizes(rows=1, blocks=32),
        expects="refused",
        because=r"memory space vmem|space=vmem",
    ),
    Case(
        name="control_list_unsplit",
        pass_name="forward",
        shape="a list longer than scalar memory, with splitting switched off",
        tokens=32768,
        q_heads=16,
        kv_heads=16,
        head_dim=128,
        budget=0.75,
        block=128,
        constants={"xsake.kernels.block_sparse.tpu_lists.MOST_WORDS": 2**31 - 1},
        expects="refused",
        because=r"space=smem|memory space smem",
    ),
)


def requirements(jax_version: str) -> tuple[str, ...]:
    """What pip has to install: the extra brings the libtpu that this jax was made for."""
    return (f"jax[tpu]=={jax_version}",)


def process_variables(dump: Path | None) -> dict[str, str]:
    """No device is touched; libtpu writes the last passes of every compile to `dump`, if any.

    Writing takes several times as long as compiling.
    """
    variables = {
        "JAX_PLATFORMS": "cpu",
        # Else libtpu locks the machine for one process, as if a TPU were in use.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    if dump is None:
        return variables
    if any(character.isspace() for character in str(dump)):
        raise ArgumentError(
            "libtpu takes no folder with a space in its name.",
            got=str(dump),
            fix="Set TMPDIR to a folder without one.",
        )
    flags = (
        f"--xla_jf_dump_to={dump}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_use_subdirectories=true",
        f"--xla_jf_dump_llo_pass_label_regex={llo.PASSES}",
    )
    return variables | {"LIBTPU_INIT_ARGS": " ".join(flags)}


def serves(case: Case) -> bool:
    """The kernels take every case."""
    return True


def device_kind(target: Target) -> str:
    """libtpu's own name for the device, such as "TPU v5 lite"."""
    return _device(target).device_kind


def compile(run: Callable[..., Any], arguments: tuple, target: Target, dump: Path) -> Facts:
    """Compile `run` for one device of the target and read what libtpu told.

    `spills` counts vector registers; scalar ones are `scalar_spills` among the details. All counts
    are of the final schedule: how often a bundle runs, and how long it waits, nobody knows here.
    """
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array([_device(target)]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    start = time.perf_counter()
    # Kernels may ask which chip they are lowered for: the mesh tells them, as no device is there.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(run).trace(*placed).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temp_bytes = None if memory is None else int(memory.temp_size_in_bytes)
    return facts_of(llo.read_kernels(dump), seconds, temp_bytes)


def facts_of(kernels: list[llo.Kernel], seconds: float, temp_bytes: int | None) -> Facts:
    """The facts of a compile with these kernels, longest first."""
    if not kernels:
        return Facts(seconds, temp_bytes)
    largest = kernels[0]
    spills = [kernel.vector_spills for kernel in kernels]
    return Facts(
        seconds,
        temp_bytes,
        vmem_bytes=_most(kernel.vmem_bytes for kernel in kernels),
        smem_bytes=_most(kernel.smem_bytes for kernel in kernels),
        spills=None if None in spills else sum(filter(None, spills)),
        bundles=largest.bundles,
        loop_bundles=_loop_bundles(largest),
        details=_details(largest) | {"kernels": len(kernels)},
    )


def _details(kernel: llo.Kernel) -> dict[str, int | float | str]:
    """Where the bundles of a grid step go, and the slots that its multiplying sections fill."""
    details: dict[str, int | float | str] = {
        "kernel": kernel.name,
        "scalar_spills": kernel.scalar_spills,
        "vmem_operands": kernel.vmem_operands,
    }
    if not kernel.work:
        return details
    work, edges = _bundles(kernel.work), _bundles(kernel.edges)
    details |= {
        "work_bundles": work,
        "work_sections": len(kernel.work),
        "edge_bundles": edges,
        "scalar_bundles": _bundles(kernel.grid_loop) - work - edges,
    }
    if kernel.inner_loops:
        details["grid_loop_bundles"] = _bundles(kernel.grid_loop)
        details["most_loop_bundles"] = _bundles(kernel.inner_loops[-1])
    for unit in ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE"):
        details[f"work_{unit.lower()}_slots"] = sum(s.slots[unit] for s in kernel.work)
    return details


def _loop_bundles(kernel: llo.Kernel) -> int | None:
    """Of the innermost loop that multiplies, and the shorter one if blocks with and without a mask
    have their own; of the grid loop if there is no other."""
    loop = kernel.inner_loops[0] if kernel.inner_loops else kernel.grid_loop
    return _bundles(loop) or None


def _bundles(sections: tuple[llo.Section, ...]) -> int:
    return sum(section.bundles for section in sections)


def _most(values) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)


def _device(target: Target):
    from jax.experimental import topologies

    options = _CHIP_CONFIG.get(target.name, {})
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=target.topology, **options
    )
    return topology.devices[0]
