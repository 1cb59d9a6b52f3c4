"""NVIDIA GPUs from Ampere on: XLA and ptxas compile for them without one, a process per target."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsake.certify import gpu_specs, ptx
from xsake.certify.case import Case
from xsake.certify.family import Facts, Target

NAME = "cuda"
KERNELS = "xsake.kernels.block_sparse.mosaic_gpu"
SELECTED_KERNELS = "xsake.kernels.selected.mosaic_gpu"
PLATFORM = "sm_90"
PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
TARGETS = {
    name: gpu_specs.target(name, NAME)
    for name in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
}

CONTROLS = (
    Case(
        name="control_too_many_stages",
        pass_name="forward",
        shape="tiles that fit into shared memory, and 64 copies of them that do not",
        tokens=256,
        q_heads=1,
        kv_heads=1,
        head_dim=64,
        budget=1.0,
        block=64,
        constants={"xsake.kernels.block_sparse.gpu_call.STAGES": 64},
        expects="refused",
        because=r"exceeds available shared memory",
    ),
    Case(
        name="control_float32",
        pass_name="forward",
        shape="operands that tensor cores do not take",
        tokens=256,
        q_heads=1,
        kv_heads=1,
        head_dim=64,
        dtype="float32",
        budget=1.0,
        block=64,
        expects="refused",
        because=r"float32|f32|layout|shape",
    ),
)


class SharedMemoryError(Exception):
    """A kernel that compiles and could never start."""


def requirements(jax_version: str) -> tuple[str, ...]:
    """What pip has to install: the compiler of a plugin for this jax, without CUDA's libraries."""
    return (
        f"jax=={jax_version}",
        f"jax-cuda13-plugin=={jax_version}",
        f"jax-cuda13-pjrt=={jax_version}",
        "nvidia-cuda-nvcc>=13,<14",
        "nvidia-nvvm>=13,<14",
        "absl-py",
    )


def process_variables(dump: Path | None) -> dict[str, str]:
    """No device is touched; PTX and ptxas' words about it go to `dump`, if any."""
    variables = {"JAX_PLATFORMS": "cpu"}
    if dump is None:
        return variables
    names = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS")
    return variables | dict.fromkeys(names, "1") | {"MOSAIC_GPU_DUMP_TO": str(dump)}


def serves(case: Case) -> bool:
    """Whether the kernels take a case: 16-bit numbers only."""
    return case.dtype == "bfloat16"


def device_kind(target: Target) -> str:
    """The device's own name, such as "NVIDIA H100 80GB HBM3"."""
    return gpu_specs.device(target.name).device_kind


def compile(run: Callable[..., Any], arguments: tuple, target: Target, dump: Path) -> Facts:
    """Compile `run` for one GPU of the target and read what ptxas told.

    `spills` are bytes; `vmem_bytes` is shared memory. Instructions are counted in the PTX, where
    what a loop repeats stands once.
    """
    seconds, temp_bytes = compiled(run, arguments, target)
    kernels = ptx.read_kernels(dump)
    if not kernels:
        return Facts(seconds, temp_bytes)
    largest, shared = kernels[0], max(kernel.shared_bytes for kernel in kernels)
    room = target.peak.vmem_bytes
    if room is not None and shared > room:
        # The assembler takes it; a launch would not.
        raise SharedMemoryError(f"needs {shared} bytes of shared memory; a thread block has {room}")
    stores, loads = (sum(kernel.spill_bytes[which] for kernel in kernels) for which in (0, 1))
    return Facts(
        seconds,
        temp_bytes,
        vmem_bytes=shared,
        spills=stores + loads,
        details={
            "kernel": largest.name,
            "kernels": len(kernels),
            "ptx_target": largest.target,
            "registers": largest.registers,
            "spill_store_bytes": stores,
            "spill_load_bytes": loads,
            **largest.instructions,
        },
    )


def compiled(run: Callable[..., Any], arguments: tuple, target: Target) -> tuple[float, int | None]:
    """Compile `run` for one GPU; seconds, and bytes of temporary memory if they are told."""
    import jax
    import numpy as np

    device = gpu_specs.device(target.name)
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    start = time.perf_counter()
    # Kernels ask the default device which GPU they are lowered for.
    with jax.default_device(device):
        lowered = jax.jit(run, out_shardings=sharding).trace(*placed)
        done = lowered.lower(lowering_platforms=("cuda",)).compile()
    memory = done.memory_analysis()
    temp_bytes = None if memory is None else int(memory.temp_size_in_bytes)
    return time.perf_counter() - start, temp_bytes
