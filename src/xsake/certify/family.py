"""What a family of targets has to provide: `certify` knows hardware through this alone."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from xsake.certify.case import Case
from xsake.errors import ArgumentError

# Name -> module. Imported only when the family is asked for; adding a family is adding a line.
FAMILIES: dict[str, str] = {
    "tpu": "xsake.certify.tpu",
    "cuda": "xsake.certify.cuda",
    "hopper": "xsake.certify.hopper",
    "turing": "xsake.certify.turing",
}


@dataclass(frozen=True)
class Peak:
    """Public peak figures of one device as JAX counts devices; they serve lower bounds only.

    Args:
        bf16_flops_per_second: of dense bf16 matrix products.
        hbm_bytes_per_second: of the memory behind the device.
        hbm_bytes: size of that memory.
        vmem_bytes: fast memory of one core; None where the vendor does not tell or has none.
        source: where the figures were published, in words.
    """

    bf16_flops_per_second: float
    hbm_bytes_per_second: float
    hbm_bytes: int
    vmem_bytes: int | None
    source: str


@dataclass(frozen=True)
class Target:
    """One kind of device that code can be compiled for.

    Args:
        name: what users type, such as "v5e"; unique over all families.
        family: the `NAME` of its family.
        topology: the compiler's own name for a set of such devices; one of them is used.
        description: a few words for people.
        cores_per_device: cores that share the work of one JAX device.
        peak: public figures.
    """

    name: str
    family: str
    topology: str
    description: str
    cores_per_device: int
    peak: Peak


@dataclass(frozen=True)
class Facts:
    """What one compile told. Plain JSON types; None where the compiler does not tell.

    Args:
        compile_seconds: lowering and compiling, on the host that did it.
        temp_bytes: temporary device memory outside the kernel's own.
        vmem_bytes: fast vector (or shared) memory of the kernel.
        smem_bytes: scalar memory of the kernel.
        spills: spill stores and loads in the final schedule, or their bytes if only these are
            told, as for GPUs; of several kernels, their sum.
        bundles: instruction bundles of the kernel; of several kernels, the largest.
        loop_bundles: bundles of the body that a grid step runs, if it can be told.
        details: what only this family knows: registers, slots, ...
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
class Family(Protocol):
    """One module per family has these names.

    Importing it must work without the vendor's libraries and without touching a device: they are
    imported inside functions, which run in the worker process of one target.

    Attributes:
        NAME: key in `FAMILIES`, and the first word of certificate file names.
        TARGETS: by target name.
        KERNELS: module of the block-sparse kernels to compile, as a dotted name. It has `forward`,
            `query_gradient`, `key_value_gradient` and `passes`.
        SELECTED_KERNELS: likewise of selected attention, with `visit_forward` and `visit_backward`.
        PLATFORM: what `KERNELS.passes` calls this family: "tpu", "cuda".
        PACKAGES: distributions whose versions a certificate names, besides those of every
            certificate (xsake, jax, jaxlib, numpy, python).
        CONTROLS: cases that this family's compiler must refuse (`Case.expects == "refused"`, with
            the words of its message in `Case.because`). They run with every selection.
    """

    NAME: str
    TARGETS: dict[str, Target]
    KERNELS: str
    SELECTED_KERNELS: str
    PLATFORM: str
    PACKAGES: tuple[str, ...]
    CONTROLS: tuple[Case, ...]

    def requirements(self, jax_version: str) -> tuple[str, ...]:
        """What pip has to install for this family, as requirement strings."""
        ...

    def process_variables(self, dump: Path | None) -> dict[str, str]:
        """Environment variables of the worker process: they are set before jax is imported.

        Args:
            dump: folder for what the compiler writes about its work; None if nobody wants to read
                it, as writing can take several times as long as compiling.
        """
        ...

    def serves(self, case: Case) -> bool:
        """Whether the family's kernels take a case; what they decline is not selected."""
        ...

    def device_kind(self, target: Target) -> str:
        """The compiler's own name for the device; called once in the worker."""
        ...

    def compile(
        self, run: Callable[..., Any], arguments: tuple, target: Target, dump: Path
    ) -> Facts:
        """Compile `run` for one device and tell what came out; nothing is executed.

        Args:
            run: a function of `arguments`; jit, trace, lower and compile are done here.
            arguments: pytrees of `jax.ShapeDtypeStruct` without sharding; it is added here.
            target: what to compile for.
            dump: the folder given to `process_variables`, or one that stays empty if it was given
                none; it is empty when this is called.

        Raises:
            Exception: the compiler's own exception, if it refuses.
        """
        ...


def load(module: str) -> Family:
    """The family in a module, checked to have every name of `Family`."""
    loaded: Any = importlib.import_module(module)
    functions = ("requirements", "process_variables", "serves", "device_kind", "compile")
    missing = [name for name in (*Family.__annotations__, *functions) if not hasattr(loaded, name)]
    if missing:
        raise ArgumentError(
            "The module is not a target family.",
            got=f"{module} without {', '.join(missing)}",
            expected="every name of xsake.certify.family.Family",
        )
    return loaded


def find_target(name: str) -> Target:
    """The target of that name, in whichever family has it.

    Example:
        >>> find_target("v5e").family
        'tpu'
    """
    targets = known_targets()
    if name not in targets:
        raise ArgumentError(
            "No such target.", got=name, expected=", ".join(targets), fix="Name one of these."
        )
    return targets[name]


def known_targets() -> dict[str, Target]:
    """Every target of every family, by name."""
    return {
        name: target
        for module in FAMILIES.values()
        for name, target in load(module).TARGETS.items()
    }
