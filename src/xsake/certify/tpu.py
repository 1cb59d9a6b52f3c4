"""TPU target family: libtpu compiles ahead of time and dumps the final schedule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsake.certify import llo
from xsake.certify.family import PeakFigures, Target, compile_for_device
from xsake.certify.record import CompileCase, CompileFacts
from xsake.errors import ArgumentError
from xsake.kernels.block_sparse.types import TileSizes

NAME = "tpu"
KERNELS = "xsake.kernels.block_sparse.mosaic_tpu.kernels"
SELECTED_KERNELS = "xsake.kernels.selected.mosaic_tpu"
PAGED_KERNELS = "xsake.kernels.paged_decode.mosaic_tpu"
PLATFORM = "tpu"
PACKAGES = ("libtpu",)

_MEBI, _GIBI = 2**20, 2**30


def _target(
    name: str, topology: str, description: str, cores: int, figures: tuple, pages: str
) -> Target:
    """Return a target; `figures` are TFLOP/s, GB/s, GiB and MiB of vector memory per device."""
    tera_flops, giga_bytes, gibi, mebi = figures
    source = f"Google Cloud documentation, {pages}; vector memory per core from JAX's own TPU table"
    peak = PeakFigures(tera_flops * 1e12, giga_bytes * 1e9, int(gibi * _GIBI), mebi * _MEBI, source)
    return Target(name, NAME, topology, description, cores, peak)


TARGETS = {
    target.name: target
    for target in (
        _target("v4", "v4:2x2x1", "TPU v4: two cores, one JAX device", 2,
                (275, 1200, 32, 16), "page TPU v4"),
        _target("v5e", "v5e:2x2", "TPU v5e: one core", 1, (197, 819, 16, 128), "page TPU v5e"),
        _target("v5p", "v5p:2x2x1", "TPU v5p: two cores, one JAX device", 2,
                (459, 2765, 95, 64), "page TPU7x"),
        _target("v6e", "v6e:2x2", "TPU v6e (Trillium): one core", 1,
                (918, 1638, 32, 128), "page TPU7x"),
        _target("tpu7x", "tpu7x:2x2x1", "TPU7x (Ironwood): two cores, a JAX device each", 1,
                (2307 / 2, 7380 / 2, 192 / 2, 64), "half of a chip on page TPU7x"),
    )
}  # fmt: skip

# libtpu's default for v4 is one device per core; on Google Cloud both cores are one JAX device.
_CHIP_CONFIG = {"v4": {"chip_config_name": "megacore"}}

# Any block size and head dimension compiles; a tile is rejected only if it exceeds memory.
CONTROLS = tuple(
    CompileCase.model_validate(
        {"pass_name": "forward", "q_heads": 1, "kv_heads": 1, "budget": 1.0, "block": 8,
         "expects": "refused"} | case
    )
    for case in (
        {
            "name": "control_head_too_wide",
            "shape": "one block of 8 tokens that does not fit into vector memory",
            "tokens": 32, "head_dim": 32768, "tiles": TileSizes(rows=1, blocks=1),
            "because": r"out of memory in memory space vmem",
        },
        {
            "name": "control_tile_too_large",
            "shape": "blocks that fit into vector memory, and a tile of 32 of them that does not",
            "tokens": 512, "head_dim": 4096, "tiles": TileSizes(rows=1, blocks=32),
            "because": r"memory space vmem|space=vmem",
        },
        {
            "name": "control_list_unsplit",
            "shape": "a list longer than scalar memory, with splitting switched off",
            "tokens": 32768, "q_heads": 16, "kv_heads": 16, "head_dim": 128, "budget": 0.75,
            "block": 128,
            "constants": {
                "xsake.kernels.block_sparse.mosaic_tpu.schedule.MAX_ENTRIES": 2**31 - 1
            },
            "because": r"space=smem|memory space smem",
        },
        {
            "name": "control_page_too_large", "pass_name": "paged_decode",
            "shape": "two steps of pages that do not fit into vector memory",
            "tokens": 32768, "head_dim": 1024, "block": 16384, "slots": 2, "q_tokens": 1,
            "because": r"memory space vmem|space=vmem",
        },
    )
)  # fmt: skip


def requirements(jax_version: str) -> tuple[str, ...]:
    """Return the pip requirements: the extra pins the libtpu of this jax version."""
    return (f"jax[tpu]=={jax_version}",)


def process_variables(dump: Path | None) -> dict[str, str]:
    """Disable devices, and dump the last passes of every compile to `dump`, if given.

    Writing takes several times as long as compiling.
    """
    variables = {
        "JAX_PLATFORMS": "cpu",
        # Otherwise libtpu takes a machine-wide lock.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    if dump is None:
        return variables
    if any(character.isspace() for character in str(dump)):
        raise ArgumentError(
            "libtpu-path", "libtpu does not support dump folders with spaces.", got=str(dump),
            fix="Set TMPDIR to a folder without one.",
        )  # fmt: skip
    flags = (
        f"--xla_jf_dump_to={dump}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_use_subdirectories=true",
        f"--xla_jf_dump_llo_pass_label_regex={llo.PASSES}",
    )
    return variables | {"LIBTPU_INIT_ARGS": " ".join(flags)}


def supports(case: CompileCase) -> bool:
    """The kernels support every case."""
    return True


def device_kind(target: Target) -> str:
    """Return libtpu's name of the device, such as "TPU v5 lite"."""
    return _device(target).device_kind


def compile(run: Callable[..., Any], arguments: tuple, target: Target, dump: Path) -> CompileFacts:
    """Compile `run` for one device of the target and parse libtpu's dumps.

    `spills` counts vector registers; `details` has scalar ones as `scalar_spills`. All counts are
    static counts of the final schedule.
    """
    seconds, temp_bytes = compile_for_device(run, arguments, _device(target), "tpu")
    return collect_facts(llo.read_kernels(dump), seconds, temp_bytes)


def collect_facts(
    kernels: list[llo.LloKernel], seconds: float, temp_bytes: int | None
) -> CompileFacts:
    """Return the figures of a compile with these kernels, longest first."""
    if not kernels:
        return CompileFacts(seconds, temp_bytes)
    largest = kernels[0]
    loop = largest.inner_loops[0] if largest.inner_loops else largest.grid_loop
    spills = [kernel.vector_spills for kernel in kernels]
    return CompileFacts(
        seconds,
        temp_bytes,
        vmem_bytes=_max_or_none(kernel.vmem_bytes for kernel in kernels),
        smem_bytes=_max_or_none(kernel.smem_bytes for kernel in kernels),
        spills=None if None in spills else sum(filter(None, spills)),
        bundles=largest.bundles,
        loop_bundles=_count_bundles(loop) or None,  # the shortest innermost matrix loop
        details=_details(largest) | {"kernels": len(kernels)},
    )


def _details(kernel: llo.LloKernel) -> dict[str, int | float | str]:
    """Return the bundles of a grid step by section type, and the slots of its matrix sections."""
    details: dict[str, int | float | str] = {
        "kernel": kernel.name,
        "scalar_spills": kernel.scalar_spills,
        "vmem_operands": kernel.vmem_operands,
    }
    if not kernel.work:
        return details
    work, edges = _count_bundles(kernel.work), _count_bundles(kernel.edges)
    details |= {
        "work_bundles": work,
        "work_sections": len(kernel.work),
        "edge_bundles": edges,
        "scalar_bundles": _count_bundles(kernel.grid_loop) - work - edges,
    }
    if kernel.inner_loops:
        details["grid_loop_bundles"] = _count_bundles(kernel.grid_loop)
        details["most_loop_bundles"] = _count_bundles(kernel.inner_loops[-1])
    for unit in ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE"):
        details[f"work_{unit.lower()}_slots"] = sum(s.slots[unit] for s in kernel.work)
    return details


def _count_bundles(sections: tuple[llo.Section, ...]) -> int:
    return sum(section.bundles for section in sections)


def _max_or_none(values) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)


def _device(target: Target):
    from jax.experimental import topologies

    options = _CHIP_CONFIG.get(target.name, {})
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=target.topology, **options
    )
    return topology.devices[0]
