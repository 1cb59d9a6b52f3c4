"""Reads collectives from the text of a compiled program: how often they run, and what they move."""

import dataclasses
import functools
import math
import re
from collections import defaultdict
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_CHAINED = re.compile(r"channel_id=(\d+),.*\bchain_id=")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAMED_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of what it takes."""
        return re.findall(r"%([\w.\-]+)", self.arguments)


@dataclasses.dataclass(frozen=True)
class Collectives:
    """All collectives of one kind and one size of group, on one device and in one run.

    Args:
        kind: such as "all-gather".
        group: devices that take part in each; None for permutes, which go in pairs.
        places: in the program.
        runs: of these, loops included.
        bytes: of what goes in or comes out, whichever is more, over all runs.
    """

    kind: str
    group: int | None
    places: int
    runs: int
    bytes: int


def collectives(text: str) -> list[Collectives]:
    """What a compiled program says about its collectives; loops count as often as they run.

    The trip count of a loop is the compiler's annotation, or it counts from 0 to the constant its
    condition compares with; any other counts once, and `loop_rounds` has None for it. What is
    spread over several fusions to overlap with them is one collective.

    Args:
        text: as `jax.stages.Compiled.as_text` gives it.

    Example:
        >>> text = '''
        ... ENTRY %main (p: f32[8]) -> f32[64] {
        ...   %p = f32[8]{0} parameter(0)
        ...   ROOT %g = f32[64]{0} all-gather(%p), replica_groups=[4,8]<=[32], dimensions={0}
        ... }
        ... '''
        >>> collectives(text)
        [Collectives(kind='all-gather', group=8, places=1, runs=1, bytes=256)]
    """
    computations, entry = _computations(text)
    runs = _runs(computations, entry)
    found: dict[tuple[str, int | None], list[int]] = defaultdict(lambda: [0, 0, 0])
    chained: set[str] = set()
    for name, instructions in computations.items():
        shapes = {one.name: one.shape for one in instructions}
        for one in instructions:
            kind = _kind(one.opcode, name)
            if kind is None or not runs[name]:
                continue
            if chain := _CHAINED.search(one.attributes):
                if chain[1] in chained:
                    continue
                chained.add(chain[1])
            total = found[kind, _group(one.attributes)]
            total[0] += 1
            total[1] += runs[name]
            total[2] += runs[name] * _moved(one, shapes)
    ordered = sorted(found.items(), key=lambda item: -item[1][2])
    return [Collectives(kind, group, *total) for (kind, group), total in ordered]


def loop_rounds(text: str) -> list[int | None]:
    """How often each loop runs when it runs; None where the text does not say it."""
    computations, _ = _computations(text)
    lines = [one for own in computations.values() for one in own if one.opcode == "while"]
    return [_rounds(one, computations) for one in lines]


def shape_bytes(shape: str) -> int:
    """Bytes of an array or of all arrays of a tuple, without padding.

    Example:
        >>> shape_bytes("(bf16[2,3]{1,0:T(8,128)(2,1)}, u32[])"), shape_bytes("pred[5]")
        (16, 5)
    """
    total = 0
    for dtype, sizes in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
        total += -(-bits * math.prod(int(size) for size in sizes.split(",") if size) // 8)
    return total


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str | None]:
    """Instructions by computation, and the name of the one that the program starts with."""
    computations: dict[str, list[Instruction]] = {}
    entry, own = None, None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            own = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif line.startswith("}"):
            own = None
        elif own is not None and (found := _INSTRUCTION.match(line)):
            own.append(_instruction(found["name"], found["rest"]))
    return computations, entry


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest)
    return Instruction(name, shape, opcode, rest[: end - 1], rest[end:])


def _closing(text: str) -> int:
    """Where the parenthesis closes that the text begins with."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    return len(text) - 1


def _runs(computations: dict[str, list[Instruction]], entry: str | None) -> dict[str, int]:
    """How often each computation runs when the program runs once."""
    callers: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, instructions in computations.items():
        for one in instructions:
            if one.opcode.endswith(("-done", "-update")):  # name again what -start has begun
                continue
            times = (_rounds(one, computations) or 1) if one.opcode == "while" else 1
            lists = ",".join(_CALLED_LIST.findall(one.attributes))
            called = _CALLED.findall(one.attributes) + re.findall(r"%([\w.\-]+)", lists)
            for other in called:
                callers[other].append((name, times))

    @functools.cache
    def runs(name: str) -> int:
        return int(name == entry) + sum(runs(caller) * times for caller, times in callers[name])

    return {name: runs(name) for name in computations}


def _rounds(loop: Instruction, computations: dict[str, list[Instruction]]) -> int | None:
    if match := _TRIP_COUNT.search(loop.attributes):
        return int(match[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    lines = computations.get(condition[1], []) if condition else []
    if not lines or lines[-1].opcode != "compare" or "direction=LT" not in lines[-1].attributes:
        return None
    limits = {one.name: one.arguments for one in lines if one.opcode == "constant"}
    limit = limits.get(lines[-1].operands[-1], "")
    return int(limit) if limit.isdigit() else None


def _kind(opcode: str, computation: str) -> str | None:
    kind = opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    # TPUs write a reduce-scatter as a fusion of an all-reduce and a slice.
    return "reduce-scatter" if "all-reduce-scatter" in computation else kind


def _group(attributes: str) -> int | None:
    if found := _COUNTED_GROUPS.search(attributes):
        return int(found[1])
    if found := _NAMED_GROUPS.search(attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    found = _LISTED_GROUPS.search(attributes)
    return None if found is None else found[1].count(",") + 1


def _moved(one: Instruction, shapes: dict[str, str]) -> int:
    given = sum(shape_bytes(shapes.get(name, "")) for name in one.operands)
    result = shape_bytes(one.shape)
    if one.opcode.endswith("-start") and not one.opcode.startswith("all-reduce"):
        result -= given  # the result names the operands again
    return max(given, result)
