"""Interface of a family of compile targets."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from xsake.certify.case import CompileCase
from xsake.errors import ArgumentError

# Name -> module, imported lazily.
FAMILIES: dict[str, str] = {
    "tpu": "xsake.certify.tpu",
    "cuda": "xsake.certify.cuda",
    "hopper": "xsake.certify.hopper",
    "turing": "xsake.certify.turing",
}


@dataclass(frozen=True)
class PeakFigures:
    """Public peak figures of one JAX device, used for lower bounds only.

    Args:
        bf16_flops_per_second: of dense bf16 matrix products.
        hbm_bytes_per_second: of the memory behind the device.
        hbm_bytes: size of that memory.
        vmem_bytes: fast memory of one core; None if unknown or absent.
        source: publication of the figures.
    """

    bf16_flops_per_second: float
    hbm_bytes_per_second: float
    hbm_bytes: int
    vmem_bytes: int | None
    source: str


@dataclass(frozen=True)
class Target:
    """Device type that code can be compiled for.

    Args:
        name: such as "v5e"; unique over all families.
        family: the `NAME` of its family.
        topology: the compiler's name of a set of such devices; one of them is used.
        description: for display.
        cores_per_device: cores that share the work of one JAX device.
        peak: public figures.
    """

    name: str
    family: str
    topology: str
    description: str
    cores_per_device: int
    peak: PeakFigures


@dataclass(frozen=True)
class CompileFacts:
    """Figures of one compile as JSON types; None if the compiler does not report them.

    Args:
        compile_seconds: time of lowering and compiling on the host.
        temp_bytes: temporary device memory outside of the kernels.
        vmem_bytes: fast vector (or shared) memory of the kernel.
        smem_bytes: scalar memory of the kernel.
        spills: spill stores and loads in the final schedule, in bytes for GPUs; summed over
            kernels.
        bundles: instruction bundles of the largest kernel.
        loop_bundles: bundles of the body of a grid step.
        details: family-specific figures: registers, slots, ...
    """

    compile_seconds: float
    temp_bytes: int | None = None
    vmem_bytes: int | None = None
    smem_bytes: int | None = None
    spills: int | None = None
    bundles: int | None = None
    loop_bundles: int | None = None
    details: dict[str, int | float | str] = field(default_factory=dict)


@runtime_checkable
class TargetFamily(Protocol):
    """Protocol of a family module.

    Importing the module must work without the vendor's libraries and without touching a device:
    they are imported inside functions, which run in the worker process of one target.

    Attributes:
        NAME: key in `FAMILIES`, and prefix of certificate file names.
        TARGETS: by target name.
        KERNELS: module of the block-sparse kernels to compile, as a dotted name. It has `forward`,
            `dq_pass`, `dkv_pass` and `count_passes`.
        SELECTED_KERNELS: module of selected attention, with `visit_forward` and `visit_backward`.
        PLATFORM: platform argument of `KERNELS.count_passes`: "tpu", "cuda".
        PACKAGES: distributions whose versions a certificate records, in addition to those of every
            certificate (xsake, jax, jaxlib, numpy, python).
        CONTROLS: cases that the compiler must reject (`CompileCase.expects == "refused"`, with
            a pattern of its message in `CompileCase.because`). They run with every selection.
    """

    NAME: str
    TARGETS: dict[str, Target]
    KERNELS: str
    SELECTED_KERNELS: str
    PLATFORM: str
    PACKAGES: tuple[str, ...]
    CONTROLS: tuple[CompileCase, ...]

    def requirements(self, jax_version: str) -> tuple[str, ...]:
        """Return the pip requirements of this family."""
        ...

    def process_variables(self, dump: Path | None) -> dict[str, str]:
        """Return environment variables of the worker process, set before jax is imported.

        Args:
            dump: folder for compiler dumps; None disables them, as writing can take several times
                as long as compiling.
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

        Args:
            run: a function of `arguments`, not jitted.
            arguments: pytrees of `jax.ShapeDtypeStruct` without sharding.
            target: device type.
            dump: folder given to `process_variables`, or an unused one; empty when this is called.

        Raises:
            Exception: the compiler's exception, if it rejects the function.
        """
        ...


def load_family(module: str) -> TargetFamily:
    """Import a family module and check that it has every name of `TargetFamily`."""
    loaded: Any = importlib.import_module(module)
    functions = ("requirements", "process_variables", "supports", "device_kind", "compile")
    missing = [
        name for name in (*TargetFamily.__annotations__, *functions) if not hasattr(loaded, name)
    ]
    if missing:
        raise ArgumentError(
            "The module is not a target family.",
            got=f"{module} without {', '.join(missing)}",
            expected="every name of xsake.certify.family.TargetFamily",
        )
    return loaded


def find_target(name: str) -> Target:
    """Return the target of a name, searched in all families.

    Example:
        >>> find_target("v5e").family
        'tpu'
    """
    targets = known_targets()
    if name not in targets:
        raise ArgumentError(
            "Unknown target.", got=name, expected=", ".join(targets), fix="Use one of these."
        )
    return targets[name]


def known_targets() -> dict[str, Target]:
    """Return the targets of all families by name."""
    return {
        name: target
        for module in FAMILIES.values()
        for name, target in load_family(module).TARGETS.items()
    }
