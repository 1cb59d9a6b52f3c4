"""Compile targets and the interface of their families."""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from xsake.certify.record import CompileCase, CompileFacts, PassCost, TimeBound
from xsake.errors import ArgumentError

# Imported lazily.
FAMILIES: dict[str, str] = {
    "tpu": "xsake.certify.tpu",
    "cuda": "xsake.certify.cuda:AMPERE",
    "hopper": "xsake.certify.cuda:HOPPER",
    "turing": "xsake.certify.cuda:TURING",
}

BOUND_LABEL = "lower bound from public peak figures, not a measurement"


@dataclass(frozen=True)
class PeakFigures:
    """Public peak figures of one JAX device, used for lower bounds only."""

    bf16_flops_per_second: float  # of dense bf16 matrix products
    hbm_bytes_per_second: float  # of the memory behind the device
    hbm_bytes: int  # size of that memory
    vmem_bytes: int | None  # fast memory of one core; None if unknown or absent
    source: str  # publication of the figures


@dataclass(frozen=True)
class Target:
    """Device type that code can be compiled for."""

    name: str  # such as "v5e"; unique over all families
    family: str  # the `NAME` of its family
    topology: str  # the compiler's name of a set of such devices; one of them is used
    description: str  # for display
    cores_per_device: int  # cores that share the work of one JAX device
    peak: PeakFigures  # public figures


@runtime_checkable
class TargetFamily(Protocol):
    """A vendor's compiler and the kernels it compiles: a module, or an object in one.

    Importing it works without the vendor's libraries and without touching a device: they are
    imported inside functions, which run in the worker process of one target.
    """

    NAME: str  # key in `FAMILIES`, and prefix of certificate file names
    TARGETS: dict[str, Target]
    KERNELS: str  # module with `forward`, `dq_pass`, `dkv_pass` and `count_passes`
    SELECTED_KERNELS: str  # module of selected attention: `visit_forward`, `visit_backward`
    PAGED_KERNELS: str  # module of attention over pages: `forward`, `make_sizes`
    PLATFORM: str  # argument of `count_passes`
    PACKAGES: tuple[str, ...]  # whose versions a certificate records, besides those of every one
    CONTROLS: tuple[CompileCase, ...]  # cases that the compiler must reject, in every selection

    def requirements(self, jax_version: str) -> tuple[str, ...]:
        """Return the pip requirements of this family."""
        ...

    def process_variables(self, dump: Path | None) -> dict[str, str]:
        """Return environment variables of the worker process, set before jax is imported.

        `dump` is the folder for compiler dumps; None disables them, as writing can take several
        times as long as compiling.
        """
        ...

    def supports(self, case: CompileCase) -> bool:
        """Whether the family's kernels support a case; others are not selected."""
        ...

    def device_kind(self, target: Target) -> str:
        """Return the compiler's name of the device; called once in the worker."""
        ...

    def compile(
        self, run: Callable[..., Any], arguments: tuple, target: Target, dump: Path
    ) -> CompileFacts:
        """Compile `run` for one device and return figures; nothing is executed.

        `arguments` are pytrees of `jax.ShapeDtypeStruct`; `dump` is empty when this is called. A
        rejection is the compiler's exception.
        """
        ...


def load_family(place: str) -> TargetFamily:
    """Import a family, such as "xsake.certify.tpu" or "xsake.certify.cuda:HOPPER"."""
    module, _, name = place.partition(":")
    loaded: Any = importlib.import_module(module)
    loaded = getattr(loaded, name) if name else loaded
    functions = ("requirements", "process_variables", "supports", "device_kind", "compile")
    missing = [
        name for name in (*TargetFamily.__annotations__, *functions) if not hasattr(loaded, name)
    ]
    if missing:
        raise ArgumentError(
            "family-module", "The module is not a target family.",
            got=f"{place} without {', '.join(missing)}",
            expected="every name of xsake.certify.family.TargetFamily",
        )  # fmt: skip
    return loaded


def compile_for_device(
    run: Callable[..., Any], arguments: tuple, device: Any, platform: str
) -> tuple[float, int | None]:
    """Compile `run` for one device; return seconds and bytes of temporary memory, if reported.

    Kernels read the type of the device from the mesh on TPUs, else from the default device.
    """
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    is_tpu = platform == "tpu"
    start = time.perf_counter()
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if is_tpu else jax.default_device(device)
    ):
        jitted = jax.jit(run) if is_tpu else jax.jit(run, out_shardings=sharding)
        compiled = jitted.trace(*placed).lower(lowering_platforms=(platform,)).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return seconds, None if memory is None else int(memory.temp_size_in_bytes)


def lower_bound(cost: PassCost, peak: PeakFigures) -> TimeBound | None:
    """Return a lower bound of the time of a pass; None if its work is not known statically.

    `seconds = max(flops of listed blocks / peak flops, every array once / peak bandwidth)`.
    The bf16 peak also bounds float32 products. Repeated reads count once, because the compiler may
    keep operands in fast memory.

    Example:
        >>> cost = PassCost(
        ...     listed=1, computed=2, launches=1, steps=1, balance=1.0, flops=4 * 10**12,
        ...     bytes_read=3 * 10**9, bytes_written=10**9, least_bytes=10**9)
        >>> lower_bound(cost, PeakFigures(1e12, 1e9, 2**34, None, "an example"))
        TimeBound(seconds=2.0, label='lower bound from public peak figures, not a measurement')
    """
    if cost.computed is None:
        return None
    flops = cost.flops * cost.listed / max(cost.computed, 1)
    moving = cost.least_bytes / peak.hbm_bytes_per_second
    return TimeBound(seconds=max(flops / peak.bf16_flops_per_second, moving), label=BOUND_LABEL)


def find_target(name: str) -> Target:
    """Return the target of a name, searched in all families.

    Example:
        >>> find_target("v5e").family
        'tpu'
    """
    targets = known_targets()
    if name not in targets:
        raise ArgumentError(
            "target",
            "Unknown target.",
            got=name,
            expected=", ".join(targets),
            fix="Use one of these.",
        )
    return targets[name]


def known_targets() -> dict[str, Target]:
    """Return the targets of all families by name."""
    return {
        name: target
        for place in FAMILIES.values()
        for name, target in load_family(place).TARGETS.items()
    }
