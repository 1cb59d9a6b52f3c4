"""Parse libtpu's text dumps of a kernel's final schedule.

libtpu writes one set of files per kernel: VLIW bundles, filled slots of each unit per bundle, and
allocations in on-chip memory. The format is undocumented and may change with libtpu: values that
cannot be parsed are None or omitted.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PASSES = r".*(final_bundles|final_hlo-static-per-bundle-utilization|post-delay-converter).*"
"""Pattern of the compiler passes to dump."""

_BUNDLES, _SLOTS, _ALLOCATIONS = (
    "-final_bundles.txt",
    "-final_hlo-static-per-bundle-utilization.txt",
    "-post-delay-converter.txt",
)
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:L[HBE]|P[BF]|CT)?\s*:\s*>*\s*\{", re.M)
_BRANCH = re.compile(r"= sbr\.rel\b[^;}]*target = \$region(\d+)")
_START = re.compile(r"Start(?:/End empty)? region (\d+)\b")
_END = re.compile(r"(?<!/)End region \d+")
_ALLOCATION = re.compile(
    r"#allocation\w+ \[.*?space=(\w+), size = (\w+), offset = (\w+), scoped\b.*tag = '([^']*)"
)


@dataclass(frozen=True)
class Section:
    """Straight-line sequence of bundles."""

    first: int
    bundles: int
    slots: dict[str, int]


@dataclass(frozen=True)
class LloKernel:
    """Final schedule of one kernel."""

    name: str  # of the HLO instruction, such as "attention.1"
    bundles: int  # VLIW bundles of the whole kernel
    # sections of its longest loop, one grid step; empty without a loop
    grid_loop: tuple[Section, ...]
    # innermost loops inside it that use the matrix unit, shortest first
    inner_loops: tuple[tuple[Section, ...], ...]
    vmem_bytes: int | None  # highest byte in use; None without the file
    smem_bytes: int | None  # likewise
    slots: dict[str, int]  # filled slots of the whole kernel, by unit
    scalar_spills: int  # stores and loads of spilled scalar registers
    # operands that the compiler copied into vector memory before the kernel; not included in
    # `vmem_bytes`
    vmem_operands: int

    @property
    def vector_spills(self) -> int | None:
        """Stores and loads of spilled vector registers; None without slot counts."""
        if not self.slots:
            return None
        return self.slots["VSTORE:SPILL"] + self.slots["VLOAD:FILL"]

    @property
    def work(self) -> tuple[Section, ...]:
        """Sections of the grid step that use the matrix unit."""
        return tuple(s for s in self.grid_loop if s.slots.get("MXU"))

    @property
    def edges(self) -> tuple[Section, ...]:
        """Vector sections without the matrix unit, such as row prologues and epilogues."""
        vector = ("XLU", "VALU", "EUP", "VSTORE")
        sections = (s for s in self.grid_loop if not s.slots.get("MXU"))
        return tuple(s for s in sections if any(s.slots.get(unit) for unit in vector))


def read_kernels(dump: Path) -> list[LloKernel]:
    """Read all kernels of a dump, longest first; glue code is skipped."""
    files = sorted(dump.rglob(f"*{_BUNDLES}"))
    kernels = [_read_kernel(file) for file in files if "schedule-analysis" not in file.name]
    return sorted((k for k in kernels if k is not None), key=lambda k: -k.bundles)


def _read_kernel(file: Path) -> LloKernel | None:
    text = file.read_text(encoding="utf-8", errors="replace")
    entry = re.search(r"entry bundle: %(\S+) = custom-call\(", text)
    if entry is None:
        return None
    bundles = _split_bundles(text)
    slots = _read_slots(_find_sibling(file, _SLOTS))
    if len(slots) != len(bundles):
        slots = []
    vmem, smem = _read_memory(_find_sibling(file, _ALLOCATIONS))
    return LloKernel(
        entry[1], len(bundles), *_find_loops(bundles, slots), vmem, smem, _sum_slots(slots),
        len(re.findall(r"= (?:sst|sld) \[smem:\[#allocation\w+_spill\]\]", text)),
        text.count("= inlined_call_operand.vmem "),
    )  # fmt: skip


def _find_sibling(file: Path, ending: str) -> Path | None:
    """Find another dump of the same kernel; names differ in a counter before the kernel's name."""
    stem = re.sub(r"^[\d-]*", "", file.name.removesuffix(_BUNDLES))
    kernel = re.sub(r"-\d+$", "", stem)
    same = [
        other
        for other in file.parent.glob(f"*{ending}")
        if re.search(rf"(^|-){re.escape(kernel)}(-\d+)?{re.escape(ending)}$", other.name)
    ]
    return max(same, default=None)


def _split_bundles(text: str) -> list[str]:
    starts = [match.start() for match in _BUNDLE.finditer(text)]
    return [text[a:b] for a, b in pairwise([*starts, len(text)])]


def _read_slots(file: Path | None) -> list[dict[str, int]]:
    """Read the filled slots of every bundle by unit."""
    if file is None:
        return []
    _, _, rest = file.read_text(encoding="utf-8").partition("\n")
    names = [name.strip() for name in rest.partition("\n")[0].split(",")]
    _, _, rows = rest.partition("UTILIZATION:\n")
    return [
        dict(zip(names, map(int, row.split()), strict=True))
        for row in rows.splitlines()
        if row.strip()
    ]


def _read_memory(file: Path | None) -> tuple[int | None, int | None]:
    """Return the highest used byte of vector and scalar memory."""
    if file is None:
        return None, None
    used = {"vmem": 0, "smem": 0}
    text = file.read_text(encoding="utf-8", errors="replace")
    for space, size, offset, _ in _ALLOCATION.findall(text):
        if space in used:
            used[space] = max(used[space], int(size, 0) + int(offset, 0))
    return used["vmem"], used["smem"]


def _sum_slots(slots: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in slots:
        for unit, count in row.items():
            total[unit] = total.get(unit, 0) + count
    return total


def _find_loops(bundles: list[str], slots: list[dict[str, int]]) -> tuple[tuple, tuple]:
    """Return the sections of the grid loop, and of its innermost loops that use the matrix unit."""
    branches = _find_branches(bundles)
    loops = sorted(
        ((target, behind) for behind, target in branches if target < behind),
        key=lambda loop: loop[1] - loop[0],
    )
    if not loops:
        return (), ()
    cuts = sorted({x for branch in branches for x in branch})
    inner: list[tuple[int, int]] = []
    for first, last in loops[:-1]:
        multiplies = any(row.get("MXU") for row in slots[first:last])
        if multiplies and not any(first <= a and b <= last for a, b in inner):
            inner.append((first, last))
    return (
        _split_loop(loops[-1], cuts, slots),
        tuple(_split_loop(loop, cuts, slots) for loop in inner),
    )


def _find_branches(bundles: list[str]) -> list[tuple[int, int]]:
    """Return (first bundle after the branch and its delay slots, target) of every branch."""
    start = {number: at for at, text in enumerate(bundles) for number in _START.findall(text)}
    ends = {at for at, text in enumerate(bundles) if _END.search(text)}
    branches = [
        (at, start.get(n)) for at, text in enumerate(bundles) for n in _BRANCH.findall(text)
    ]
    # A region ends with the delay slots of its branch; their number is constant per chip:
    # 1 on v4, 4 on v5e, v5p and v6e, 6 on tpu7x.
    gaps = Counter(gap for at, _ in branches for gap in range(1, 9) if at + gap in ends)
    delay = max(gaps, key=lambda gap: gaps[gap], default=0)
    return [(at + delay + 1, target) for at, target in branches if target is not None]


def _split_loop(loop: tuple[int, int], cuts: list[int], slots: list) -> tuple[Section, ...]:
    """Split a loop after every branch and at every target."""
    first, last = loop
    inside = [first, *(cut for cut in cuts if first < cut < last), last]
    return tuple(Section(a, b - a, _sum_slots(slots[a:b])) for a, b in pairwise(inside))
