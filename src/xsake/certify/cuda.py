"""NVIDIA GPUs: XLA and ptxas compile ahead of time, one process per target."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xsake.certify import gpu_specs
from xsake.certify.family import Target, compile_for_device
from xsake.certify.record import CompileCase, CompileFacts

# Instructions counted in the PTX: tensor core products and copies into shared memory.
INSTRUCTIONS = {
    "mma": "mma.sync",
    "wgmma": "wgmma.mma_async",
    "ldmatrix": "ldmatrix",
    "cp_async": "cp.async.c[ag]",
    "tma": "cp.async.bulk.tensor",
}
_CONTROL = CompileCase(
    name="control_too_many_stages", pass_name="forward",
    shape="tiles that fit into shared memory, and 64 copies of them that do not",
    tokens=256, q_heads=1, kv_heads=1, head_dim=64, budget=1.0, block=64,
    constants={"xsake.kernels.block_sparse.mosaic_gpu.launch.STAGES": 64},
    expects="refused", because=r"exceeds available shared memory",
)  # fmt: skip
CONTROLS = (
    _CONTROL,
    _CONTROL.model_copy(update={
        "name": "control_float32", "shape": "operands that tensor cores do not take",
        "dtype": "float32", "constants": {}, "because": r"float32|f32|layout|shape",
    }),
    _CONTROL.model_copy(update={
        "name": "control_page_too_large", "pass_name": "paged_decode",
        "shape": "two steps of pages that do not fit into shared memory", "tokens": 1024,
        "head_dim": 128, "block": 512, "slots": 2, "q_tokens": 1, "constants": {},
    }),
)  # fmt: skip


class SharedMemoryError(Exception):
    """A kernel compiles but exceeds the shared memory of a thread block."""


@dataclass(frozen=True)
class GpuFamily:
    """Kernels for some GPUs; see `TargetFamily`. Only Mosaic's kernels leave dumps."""

    NAME: str
    KERNELS: str
    PLATFORM: str
    TARGETS: dict[str, Target]
    CONTROLS: tuple[CompileCase, ...]
    supports: Callable[[CompileCase], bool]
    SELECTED_KERNELS: str = "xsake.kernels.selected.mosaic_gpu"
    PAGED_KERNELS: str = "xsake.kernels.paged_decode.mosaic_gpu"
    PACKAGES: tuple[str, ...] = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")

    def requirements(self, jax_version: str) -> tuple[str, ...]:
        """Return the pip requirements: plugin and compiler for this jax, without CUDA libraries."""
        pinned = ("jax", "jax-cuda13-plugin", "jax-cuda13-pjrt")
        others = ("nvidia-cuda-nvcc>=13,<14", "nvidia-nvvm>=13,<14", "absl-py")
        return (*(f"{name}=={jax_version}" for name in pinned), *others)

    def process_variables(self, dump: Path | None) -> dict[str, str]:
        """Disable devices, and dump PTX and the output of ptxas to `dump`, if given."""
        variables = {"JAX_PLATFORMS": "cpu"}
        if dump is None:
            return variables
        names = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS")
        return variables | dict.fromkeys(names, "1") | {"MOSAIC_GPU_DUMP_TO": str(dump)}

    def device_kind(self, target: Target) -> str:
        """Return the device's name, such as "NVIDIA H100 80GB HBM3"."""
        return gpu_specs.devices(target.name)[0].device_kind

    def compile(
        self, run: Callable[..., Any], arguments: tuple, target: Target, dump: Path
    ) -> CompileFacts:
        """Compile `run` for one GPU of the target and parse the output of ptxas.

        `spills` are bytes; `vmem_bytes` is shared memory. Instructions are static counts of the
        PTX.
        """
        device = gpu_specs.devices(target.name)[0]
        seconds, temp_bytes = compile_for_device(run, arguments, device, "cuda")
        kernels = read_kernels(dump)
        if not kernels:
            return CompileFacts(seconds, temp_bytes)
        largest, shared = kernels[0], max(kernel.shared_bytes for kernel in kernels)
        capacity = target.peak.vmem_bytes
        if capacity is not None and shared > capacity:
            # ptxas accepts it, but a launch would fail.
            message = f"needs {shared} bytes of shared memory; a thread block has {capacity}"
            raise SharedMemoryError(message)
        stores, loads = (sum(kernel.spill_bytes[which] for kernel in kernels) for which in (0, 1))
        details: dict[str, int | float | str] = {
            "kernel": largest.name, "kernels": len(kernels), "ptx_target": largest.target,
            "registers": largest.registers, "spill_store_bytes": stores,
            "spill_load_bytes": loads, **largest.instructions,
        }  # fmt: skip
        return CompileFacts(
            seconds, temp_bytes, vmem_bytes=shared, spills=stores + loads, details=details
        )


def _targets(family: str, *names: str) -> dict[str, Target]:
    return {name: gpu_specs.target(name, family) for name in names}


TARGETS = _targets("cuda", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
AMPERE = GpuFamily(
    "cuda", "xsake.kernels.block_sparse.mosaic_gpu.ampere", "sm_90", TARGETS, CONTROLS,
    supports=lambda case: case.dtype == "bfloat16",
)  # fmt: skip
"""GPUs from Ampere on: 16-bit kernels."""
HOPPER = GpuFamily(
    "hopper", "xsake.kernels.block_sparse.mosaic_gpu.hopper", "sm_90",
    _targets("hopper", "sm_90a_wgmma"), CONTROLS,
    supports=lambda case: case.dtype == "bfloat16" and case.slots is None and case.head_dim <= 128,
)  # fmt: skip
"""`wgmma` kernels on an H100: 16-bit, block lists, head_dim up to 128."""
TURING = GpuFamily(
    # XLA splits what does not fit, so there is nothing it must reject.
    "turing", "xsake.certify.turing", "cuda", _targets("turing", "sm_75"), (),
    # Longer cases compile alike.
    supports=lambda case: case.slots is None and case.tokens == 4096 and not case.traced,
)  # fmt: skip
"""GPUs before Ampere: the `xla` implementation, as there are no Mosaic kernels."""


@dataclass(frozen=True)
class PtxKernel:
    """One compiled kernel."""

    name: str
    target: str  # of the PTX, such as "sm_80"
    registers: int  # per thread
    spill_bytes: tuple[int, int]  # stores and loads per thread
    shared_bytes: int  # per thread block
    instructions: dict[str, int]  # static counts of `INSTRUCTIONS` in the PTX


def read_kernels(dump: Path) -> list[PtxKernel]:
    """Read all kernels of a dump, most registers first."""
    kernels = [_read_kernel(ptxas) for ptxas in sorted(dump.rglob("*.ptxas"))]
    return sorted(kernels, key=lambda kernel: -kernel.registers)


def _read_kernel(ptxas: Path) -> PtxKernel:
    read = lambda path: path.read_text(encoding="utf-8", errors="replace")
    report, code = read(ptxas), read(ptxas.with_suffix(".ptx"))
    resources = ptxas.with_suffix(".resources.txt")
    target = re.search(r"^\.target\s+(\w+)", code, re.MULTILINE)

    def largest(pattern: str, text: str) -> int:
        return max(map(int, re.findall(pattern, text)), default=0)

    spills = [largest(rf"(\d+) bytes spill {name}", report) for name in ("stores", "loads")]
    return PtxKernel(
        name=ptxas.stem,
        target=target[1] if target else "unknown",
        registers=largest(r"Used (\d+) registers", report),
        spill_bytes=(spills[0], spills[1]),
        shared_bytes=largest(
            r"smem_scratch_bytes=(\d+)", read(resources) if resources.exists() else ""
        ),
        instructions={
            name: len(re.findall(rf"\b{pattern}", code)) for name, pattern in INSTRUCTIONS.items()
        },
    )
