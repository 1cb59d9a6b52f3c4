"""Choice of a backend: operations with their backends as data, asked when a platform is lowered.

A backend is a row `(name, module, platforms)`. Its module is imported when the backend is a
candidate for the current platform, so a CPU never imports a GPU kernel. The module has

    forward(inputs, config, platform) -> (o, lse, ...)
    backward(inputs, config, platform, o, lse, do, dlse) -> Gradients
    unsupported_reason(inputs, config, platform) -> str | None      if it cannot serve every call
    count_passes(inputs, config, platform) -> (KernelCost, ...)     of block-sparse attention
"""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from xsake.errors import ArgumentError, UnsupportedError
from xsake.kernels import native_library
from xsake.kernels.lowering import (
    EXPORTED_CPU,
    PLATFORMS,
    Branch,
    Unsupported,
    by_platform,
    capability_of,
    check_platform,
    family_of,
)

ANY_OTHER = "other"  # every platform without a name in PLATFORMS
# Releases of JAX that the Mosaic kernels were certified with. Pallas changes with every release.
MOSAIC_RELEASES = ("0.12",)

type Implementation = str | Sequence[str] | None


def is_release(names: Iterable[str], version: str) -> bool:
    """Whether a version of JAX belongs to one of the named releases.

    Example:
        >>> is_release(("0.12",), "0.12.0.1"), is_release(("0.12.0",), "0.12.1")
        (True, False)
    """
    return any(version == name or version.startswith(f"{name}.") for name in names)


class BackendSpec(NamedTuple):
    """One way to compute an operation."""

    name: str  # for `implementation=`
    module: Any  # its name, imported when it is first used; or an object with the same functions
    platforms: tuple[str, ...] | None = None  # the only ones it runs on; None: every platform
    jax_releases: tuple[str, ...] | None = None  # its kernels were certified with; None: all
    is_on_request: bool = False  # used only when it is named
    is_portable: bool = False  # one program for all platforms, so it can be differentiated again
    handler: str | None = None  # of the native library; None: it needs no library
    is_exported: bool = True  # by `jax.export`, also when it is not named

    @classmethod
    def of_native_library(cls, package: str, handler: str) -> "BackendSpec":
        """Return the backend of an operation's package that calls `xsake-cpu`."""
        module = f"{package}.native_cpu"
        return cls("native_cpu", module, ("cpu",), handler=handler, is_exported=False)

    def load(self) -> Any:
        """Import the module."""
        is_name = isinstance(self.module, str)
        return importlib.import_module(self.module) if is_name else self.module

    def platform_reason(self, platform: str) -> str | None:
        """Why it never runs on a platform with this release of JAX; None if it may."""
        if platform == EXPORTED_CPU and not self.is_exported:
            return "an exported program must not depend on it; name it to export it"
        if self.platforms is not None and family_of(platform) not in self.platforms:
            return f"it runs on {' and '.join(self.platforms)} only"
        if self.jax_releases is not None and not is_release(self.jax_releases, jax.__version__):
            releases = " and ".join(self.jax_releases)
            return f"its kernels were certified with jax {releases}, this is jax {jax.__version__}"
        if self.handler is None:
            return None
        if importlib.util.find_spec("xsake_cpu") is None:
            return 'it needs the package xsake_cpu: pip install "xsake[cpu]"'
        return native_library.missing_handler(self.handler)

    def describe_library(self) -> str | None:
        """Version and instruction set of the library that it needs; None if it needs none."""
        return None if self.handler is None else native_library.describe()

    def unsupported_reason(self, inputs: Any, config: Any, platform: str) -> str | None:
        """Why it cannot serve a call on a platform; None if it can."""
        reason = self.platform_reason(platform)
        refuse = None if reason else getattr(self.load(), "unsupported_reason", None)
        return refuse(inputs, config, platform) if refuse else reason


@dataclasses.dataclass(frozen=True)
class StaticCall:
    """The static part of a call: hashable, the key of its compiled program."""

    implementation: tuple[str, ...] | None  # in order of preference; None: the operation's order
    config: Any  # numbers of the call
    input_type: Callable[..., Any]  # of the backends

    def inputs(self, arrays: Any, context: Any) -> Any:
        """The inputs of the backends, from differentiable arrays and all others."""
        return self.input_type(*arrays, *context)


class Op:
    """An operation with its backends, best first."""

    def __init__(self, *backends: BackendSpec):
        self.backends = backends

    def implementations(self) -> dict[str, str | None]:
        """Every backend by name: None if it may run on the default device, else the reason."""
        platform = default_platform()
        return {spec.name: spec.platform_reason(platform) for spec in self.backends}

    def names(self, implementation: Implementation) -> tuple[str, ...] | None:
        """Validate `implementation=`."""
        _import_pallas()
        if implementation is None:
            return None
        is_one = isinstance(implementation, str)
        names = (implementation,) if is_one else tuple(implementation)
        known = [spec.name for spec in self.backends]
        if not names or any(name not in known for name in names):
            raise ArgumentError(
                "implementation-name",
                "no such implementation",
                got=repr(implementation),
                expected=" or ".join(map(repr, known)),
                fix="pass implementation=None to let xsake choose",
            )
        return names

    def spec(self, name: str) -> BackendSpec:
        """The backend of a name."""
        return next(spec for spec in self.backends if spec.name == name)

    def candidates(self, names: tuple[str, ...] | None) -> tuple[BackendSpec, ...]:
        """Backends in order of preference."""
        if names is None:
            return tuple(spec for spec in self.backends if not spec.is_on_request)
        return tuple(map(self.spec, names))

    def choose(
        self, inputs: Any, config: Any, platform: str, names: tuple[str, ...] | None
    ) -> BackendSpec:
        """The first candidate that serves a call on a platform, or an error with all reasons."""
        reasons = {}
        for spec in self.candidates(names):
            reason = spec.unsupported_reason(inputs, config, platform)
            if reason is None:
                return spec
            reasons[spec.name] = f"on {platform}: {reason}"
        raise _make_error(reasons)

    def check(self, inputs: Any, config: Any, names: tuple[str, ...] | None) -> None:
        """Raise if no named backend serves a call on any platform."""
        reasons = {}
        for spec in () if names is None else self.candidates(names):
            platforms = spec.platforms or (*PLATFORMS, ANY_OTHER)
            of_spec = [spec.unsupported_reason(inputs, config, each) for each in platforms]
            if None in of_spec:
                return
            reasons[spec.name] = "; ".join(dict.fromkeys(map(str, of_spec)))
        if reasons:
            raise _make_error(reasons)

    def reasons(self, inputs: Any, config: Any, platform: str, chosen: str) -> dict[str, str]:
        """Why each backend but the chosen one does not run."""
        reasons = {}
        for spec in self.backends:
            default = "another one was named, or comes first"
            if spec.is_on_request:
                default = "dense truth for small sizes; runs only when named"
            reason = spec.unsupported_reason(inputs, config, platform)
            reasons[spec.name] = reason or default
        del reasons[chosen]
        return reasons

    def branches(
        self, call: StaticCall, run: Callable[..., Any]
    ) -> tuple[dict[str, Branch], Branch]:
        """Arguments of `by_platform` for `run(platform, *arrays)`: one branch if all are equal."""
        candidates = self.candidates(call.implementation)
        other = functools.partial(run, ANY_OTHER)
        if all(spec.is_portable for spec in candidates):
            return {}, other
        named = {p for spec in candidates for p in spec.platforms or (*PLATFORMS, ANY_OTHER)}
        branches: dict[str, Branch] = {
            p: functools.partial(run, p) for p in PLATFORMS if p in named
        }
        if call.implementation is None and not all(spec.is_exported for spec in candidates):
            branches[EXPORTED_CPU] = functools.partial(run, EXPORTED_CPU)
        if ANY_OTHER in named:
            return branches, other
        names = " or ".join(repr(spec.name) for spec in candidates)
        return branches, Unsupported(
            f"the implementation {names} cannot serve this call on this platform",
            f"it runs on {' and '.join(branches)} only",
            "pass implementation=None, or compile for a platform that it serves",
        )


def define_attention(op: Op) -> Callable[..., Any]:
    """Make the differentiable function `(call, arrays, context) -> (o, lse, ...)` of an operation.

    Gradients flow to `arrays`; `context` holds integers. Jitted, so that calls outside of `jit`
    compile once.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attend(call: StaticCall, arrays: Any, context: Any):
        def forward(platform: str, arrays: Any, context: Any):
            inputs = call.inputs(arrays, context)
            spec = op.choose(inputs, call.config, platform, call.implementation)
            return spec.load().forward(inputs, call.config, family_of(platform))

        return by_platform(*op.branches(call, forward), arrays, context)

    def attend_fwd(call: StaticCall, arrays: Any, context: Any):
        outputs = attend(call, arrays, context)
        return outputs, (arrays, context, *outputs[:2])

    def attend_bwd(call: StaticCall, residuals: Any, cotangents: Any):
        arrays, context, o, lse = residuals
        grads = backward_given_lse(op, call, arrays, context, o, lse, *cotangents[:2])
        return tuple(grads)[: len(arrays)], None

    attend.defvjp(attend_fwd, attend_bwd)
    return jax.jit(attend, static_argnums=0)


def backward_given_lse(
    op: Op, call: StaticCall, arrays: Any, context: Any, o, lse, do, dlse
) -> Any:
    """Gradients of an operation, given results that may be of more keys than this call has."""

    def backward(platform: str, arrays: Any, context: Any, o, lse, do, dlse):
        inputs = call.inputs(arrays, context)
        spec = op.choose(inputs, call.config, platform, call.implementation)
        return spec.load().backward(inputs, call.config, family_of(platform), o, lse, do, dlse)

    return by_platform(*op.branches(call, backward), arrays, context, o, lse, do, dlse)


@functools.cache
def _import_pallas() -> None:
    """Import Pallas before a trace begins, unless there are only CPUs.

    It adds settings to the key of a trace. Settings that appeared in the middle of a trace would
    make it another one, to be compiled a second time.
    """
    if jax.default_backend() != "cpu":
        importlib.import_module("jax.experimental.pallas.fuser")


def default_platform() -> str:
    """The platform that a call would run on now."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version else "cuda"


def find_platform(name: str | None) -> str:
    """Validate the name of a platform, present or not; None is the default one.

    One kind of NVIDIA GPU has a name as well: "sm_80" is "cuda" with compute capability 8.0.
    """
    if name is None:
        return default_platform()
    if capability_of(name) is None:
        check_platform(name, "'sm_80' for one kind of it, or pass None")
    return name


def _make_error(reasons: dict[str, str]) -> UnsupportedError:
    names = " and ".join(map(repr, reasons))
    several = len(reasons) > 1
    return UnsupportedError(
        "implementation",
        f"the implementation{'s' * several} {names} cannot serve this call",
        got="; ".join(f"{name}: {why}" if several else why for name, why in reasons.items()),
        fix="pass implementation=None, or read xsake.explain(...) for the reasons of the others",
    )
