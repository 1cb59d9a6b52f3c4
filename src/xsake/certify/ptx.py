"""Parse the PTX and ptxas dumps of Mosaic GPU kernels."""

import re
from dataclasses import dataclass
from pathlib import Path

# Instructions counted in the PTX: tensor core products and copies into shared memory.
INSTRUCTIONS = {
    "mma": "mma.sync",
    "wgmma": "wgmma.mma_async",
    "ldmatrix": "ldmatrix",
    "cp_async": "cp.async.c[ag]",
    "tma": "cp.async.bulk.tensor",
}


@dataclass(frozen=True)
class PtxKernel:
    """One compiled kernel.

    Args:
        name: of the kernel.
        target: target of the PTX, such as "sm_80".
        registers: per thread.
        spill_bytes: spill stores and loads per thread.
        shared_bytes: shared memory per thread block.
        instructions: static counts of `INSTRUCTIONS` in the PTX.
    """

    name: str
    target: str
    registers: int
    spill_bytes: tuple[int, int]
    shared_bytes: int
    instructions: dict[str, int]


def read_kernels(dump: Path) -> list[PtxKernel]:
    """Read all kernels of a dump, most registers first."""
    kernels = [_read(ptxas) for ptxas in sorted(dump.rglob("*.ptxas"))]
    return sorted(kernels, key=lambda kernel: -kernel.registers)


def _read(ptxas: Path) -> PtxKernel:
    report = ptxas.read_text(encoding="utf-8", errors="replace")
    code = ptxas.with_suffix(".ptx").read_text(encoding="utf-8", errors="replace")
    resources = ptxas.with_suffix(".resources.txt")
    shared = 0
    if resources.exists():
        shared = _find_max(r"smem_scratch_bytes=(\d+)", resources.read_text(encoding="utf-8"))
    return PtxKernel(
        name=ptxas.stem,
        target=_find_word(r"^\.target\s+(\w+)", code),
        registers=_find_max(r"Used (\d+) registers", report),
        spill_bytes=(
            _find_max(r"(\d+) bytes spill stores", report),
            _find_max(r"(\d+) bytes spill loads", report),
        ),
        shared_bytes=shared,
        instructions={
            name: len(re.findall(rf"\b{pattern}", code)) for name, pattern in INSTRUCTIONS.items()
        },
    )


def _find_word(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else "unknown"


def _find_max(pattern: str, text: str) -> int:
    """Return the largest match of a numeric pattern; 0 if there is none."""
    return max((int(x) for x in re.findall(pattern, text)), default=0)
