"""Picks the implementation of an operation for every platform, and tells why others declined."""

import jax

from xsake.errors import ArgumentError, UnsupportedError
from xsake.kernels.block_sparse import op as block_sparse
from xsake.kernels.block_sparse.op import Backend, Choice
from xsake.kernels.block_sparse.problem import Operands, Problem
from xsake.kernels.platforms import PLATFORMS, Refusal, capability_named, family_of

# Operation -> its backends, best first. `None` as implementation never picks the reference.
OPERATIONS = {"block_sparse": block_sparse.BACKENDS}
_ON_REQUEST = {"reference": "dense truth for small sizes; runs only when named"}
_ANY_OTHER = "other"  # stands for every platform without a name in PLATFORMS


def implementations(operation: str = "block_sparse") -> dict[str, str | None]:
    """Every implementation, and None if it can run on the default device, else the reason."""
    platform = default_platform()
    return {name: _elsewhere(b, platform) for name, b in OPERATIONS[operation].items()}


def default_platform() -> str:
    """The platform that a call would run on now."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version else "cuda"


def platform_named(name: str | None) -> str:
    """The platform of this name, whether there is one here or not; None is the default.

    A kind of NVIDIA GPU has a name as well: "sm_80" is "cuda" with compute capability 8.0.
    """
    if name is None:
        return default_platform()
    if name not in PLATFORMS and capability_named(name) is None:
        raise ArgumentError(
            "no platform of this name",
            got=repr(name),
            expected=" or ".join(map(repr, PLATFORMS)),
            fix="name 'cuda' or 'rocm' for a GPU, 'sm_80' for one kind of it, or pass None",
        )
    return name


def verdicts(operands: Operands, problem: Problem, platform: str) -> dict[str, str | None]:
    """For each implementation why it declines this call; None if it would serve it."""
    backends = OPERATIONS["block_sparse"]
    return {name: _verdict(b, operands, problem, platform) for name, b in backends.items()}


def _verdict(backend: Backend, operands, problem, platform: str) -> str | None:
    return _elsewhere(backend, platform) or backend.unsupported(operands, problem, platform)


def _elsewhere(backend: Backend, platform: str) -> str | None:
    """Why a backend never runs on a platform; None if it may."""
    own = backend.platforms()
    is_own = own is None or family_of(platform) in own
    return None if is_own else f"it runs on {' and '.join(own)} only"


def choose(operands: Operands, problem: Problem, platform: str, name: str | None) -> str:
    """The implementation for one platform: the named one or an error, or the best that serves."""
    if name is None:
        found = verdicts(operands, problem, platform)
        return next(name for name, no in found.items() if no is None and name not in _ON_REQUEST)
    reason = _verdict(_named(name), operands, problem, platform)
    if reason is not None:
        raise _declined(name, f"on {platform}: {reason}")
    return name


def choices(operands: Operands, problem: Problem, name: str | None) -> Choice:
    """The implementation for every platform, as the program may be lowered for any.

    A named one that declines everywhere is an error now. Where it declines on some platforms, a
    refusal takes its place, which becomes the error of whoever lowers for one of these.
    """
    everywhere = (*PLATFORMS, _ANY_OTHER)
    if name is None:
        return tuple((where, choose(operands, problem, where, None)) for where in everywhere)
    backend = _named(name)
    found = {where: _verdict(backend, operands, problem, where) for where in everywhere}
    if None not in found.values():
        own = backend.platforms() or everywhere
        raise _declined(name, "; ".join(dict.fromkeys(str(found[where]) for where in own)))
    return tuple((where, name if no is None else _refusal(name, no)) for where, no in found.items())


def _named(name: str) -> Backend:
    backends = OPERATIONS["block_sparse"]
    if name not in backends:
        raise ArgumentError(
            "no such implementation",
            got=repr(name),
            expected=" or ".join(map(repr, backends)),
            fix="pass implementation=None to let xsake pick",
        )
    return backends[name]


def _declined(name: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"the implementation {name!r} cannot serve this call",
        got=reason,
        fix="pass implementation=None, or read xsake.explain(...) for the others' reasons",
    )


def _refusal(name: str, reason: str) -> Refusal:
    return Refusal(
        f"the implementation {name!r} cannot serve this call on this platform",
        reason,
        "pass implementation=None, or compile for a platform that it serves",
    )


def declined(operands: Operands, problem: Problem, platform: str, chosen: str) -> dict[str, str]:
    """Why each implementation but the chosen one does not run."""
    found = verdicts(operands, problem, platform)
    reasons = {
        name: no or _ON_REQUEST.get(name, "another one was named, or comes first")
        for name, no in found.items()
    }
    return {name: reason for name, reason in reasons.items() if name != chosen}
