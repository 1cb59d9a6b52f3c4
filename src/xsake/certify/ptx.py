"""Reads what Mosaic GPU and ptxas write about a kernel; knows no JAX and starts no compiler."""

import re
from dataclasses import dataclass
from pathlib import Path

# What is counted in a kernel's PTX: products by tensor cores, and copies into shared memory.
INSTRUCTIONS = {
    "mma": "mma.sync",
    "wgmma": "wgmma.mma_async",
    "ldmatrix": "ldmatrix",
    "cp_async": "cp.async.c[ag]",
    "tma": "cp.async.bulk.tensor",
}


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Args:
        name: of the kernel.
        target: what its PTX says it is for, such as "sm_80".
        registers: of a thread.
        spill_bytes: of stores and loads of a thread that did not fit into registers.
        shared_bytes: shared memory of a thread block.
        instructions: how often each of `INSTRUCTIONS` is written in the PTX; loops count once.
    """

    name: str
    target: str
    registers: int
    spill_bytes: tuple[int, int]
    shared_bytes: int
    instructions: dict[str, int]


def read_kernels(dump: Path) -> list[Kernel]:
    """Every kernel in a dump, the one with most registers first."""
    found = [_read(ptxas) for ptxas in sorted(dump.rglob("*.ptxas"))]
    return sorted(found, key=lambda kernel: -kernel.registers)


def _read(ptxas: Path) -> Kernel:
    told = ptxas.read_text(encoding="utf-8", errors="replace")
    code = ptxas.with_suffix(".ptx").read_text(encoding="utf-8", errors="replace")
    resources = ptxas.with_suffix(".resources.txt")
    shared = 0
    if resources.exists():
        shared = _number(r"smem_scratch_bytes=(\d+)", resources.read_text(encoding="utf-8"))
    return Kernel(
        name=ptxas.stem,
        target=_word(r"^\.target\s+(\w+)", code),
        registers=_number(r"Used (\d+) registers", told),
        spill_bytes=(
            _number(r"(\d+) bytes spill stores", told),
            _number(r"(\d+) bytes spill loads", told),
        ),
        shared_bytes=shared,
        instructions={
            name: len(re.findall(rf"\b{pattern}", code)) for name, pattern in INSTRUCTIONS.items()
        },
    )


def _word(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else "unknown"


def _number(pattern: str, text: str) -> int:
    """The largest number after a pattern; 0 if there is none."""
    return max((int(x) for x in re.findall(pattern, text)), default=0)
