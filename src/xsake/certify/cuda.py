"""NVIDIA GPUs from Ampere on: XLA and ptxas compile ahead of time, one process per target."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsake.certify import gpu_specs, ptx
from xsake.certify.case import CompileCase
from xsake.certify.family import CompileFacts, Target

NAME = "cuda"
KERNELS = "xsake.kernels.block_sparse.mosaic_gpu.ampere"
SELECTED_KERNELS = "xsake.kernels.selected.mosaic_gpu"
PLATFORM = "sm_90"
PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
TARGETS = {
    name: gpu_specs.target(name, NAME)
    for name in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
}

CONTROLS = (
    CompileCase(
        name="control_too_many_stages",
        pass_name="forward",
        shape="tiles that fit into shared memory, and 64 copies of them that do not",
        tokens=256,
        q_heads=1,
        kv_heads=1,
        head_dim=64,
        budget=1.0,
        block=64,
        constants={"xsake.kernels.block_sparse.mosaic_gpu.launch.STAGES": 64},
        expects="refused",
        because=r"exceeds available shared memory",
    ),
    CompileCase(
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
    """A kernel compiles but exceeds the shared memory of a thread block."""


def requirements(jax_version: str) -> tuple[str, ...]:
    """Return the pip requirements: plugin and compiler for this jax, without CUDA libraries."""
    return (
        f"jax=={jax_version}",
        f"jax-cuda13-plugin=={jax_version}",
        f"jax-cuda13-pjrt=={jax_version}",
        "nvidia-cuda-nvcc>=13,<14",
        "nvidia-nvvm>=13,<14",
        "absl-py",
    )


def process_variables(dump: Path | None) -> dict[str, str]:
    """Disable devices, and dump PTX and the output of ptxas to `dump`, if given."""
    variables = {"JAX_PLATFORMS": "cpu"}
    if dump is None:
        return variables
    names = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS")
    return variables | dict.fromkeys(names, "1") | {"MOSAIC_GPU_DUMP_TO": str(dump)}


def supports(case: CompileCase) -> bool:
    """Whether the kernels support a case: 16-bit only."""
    return case.dtype == "bfloat16"


def device_kind(target: Target) -> str:
    """Return the device's name, such as "NVIDIA H100 80GB HBM3"."""
    return gpu_specs.device(target.name).device_kind


def compile(run: Callable[..., Any], arguments: tuple, target: Target, dump: Path) -> CompileFacts:
    """Compile `run` for one GPU of the target and parse the output of ptxas.

    `spills` are bytes; `vmem_bytes` is shared memory. Instructions are static counts of the PTX.
    """
    seconds, temp_bytes = compile_for_gpu(run, arguments, target)
    kernels = ptx.read_kernels(dump)
    if not kernels:
        return CompileFacts(seconds, temp_bytes)
    largest, shared = kernels[0], max(kernel.shared_bytes for kernel in kernels)
    capacity = target.peak.vmem_bytes
    if capacity is not None and shared > capacity:
        # ptxas accepts it, but a launch would fail.
        message = f"needs {shared} bytes of shared memory; a thread block has {capacity}"
        raise SharedMemoryError(message)
    stores, loads = (sum(kernel.spill_bytes[which] for kernel in kernels) for which in (0, 1))
    return CompileFacts(
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


def compile_for_gpu(
    run: Callable[..., Any], arguments: tuple, target: Target
) -> tuple[float, int | None]:
    """Compile `run` for one GPU; return seconds and bytes of temporary memory, if reported."""
    import jax
    import numpy as np

    device = gpu_specs.device(target.name)
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    start = time.perf_counter()
    # Kernels read the GPU type from the default device.
    with jax.default_device(device):
        lowered = jax.jit(run, out_shardings=sharding).trace(*placed)
        done = lowered.lower(lowering_platforms=("cuda",)).compile()
    memory = done.memory_analysis()
    temp_bytes = None if memory is None else int(memory.temp_size_in_bytes)
    return time.perf_counter() - start, temp_bytes
