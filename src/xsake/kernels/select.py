"""Picks the implementation of an operation, and tells why the others declined."""

import jax

from xsake.errors import ArgumentError, UnsupportedError
from xsake.kernels.block_sparse import op as block_sparse
from xsake.kernels.block_sparse.problem import Operands, Problem

# Operation -> its backends, best first. `None` as implementation never picks the reference.
OPERATIONS = {"block_sparse": block_sparse.BACKENDS}
_ON_REQUEST = {"reference": "dense truth for small sizes; runs only when named"}


def implementations(operation: str = "block_sparse") -> dict[str, str | None]:
    """Every implementation, and None if it can run on the default device, else the reason."""
    return dict.fromkeys(OPERATIONS[operation])


def default_platform() -> str:
    """The platform that a call would run on now."""
    return jax.default_backend()


def verdicts(operands: Operands, problem: Problem, platform: str) -> dict[str, str | None]:
    """For each implementation why it declines this call; None if it would serve it."""
    backends = OPERATIONS["block_sparse"]
    return {name: b.unsupported(operands, problem, platform) for name, b in backends.items()}


def choose(operands: Operands, problem: Problem, platform: str, name: str | None) -> str:
    """The implementation to run: the named one or an error, or the best that can serve the call."""
    found = verdicts(operands, problem, platform)
    if name is None:
        return next(name for name, no in found.items() if no is None and name not in _ON_REQUEST)
    if name not in found:
        raise ArgumentError(
            "no such implementation",
            got=repr(name),
            expected=" or ".join(map(repr, found)),
            fix="pass implementation=None to let xsake pick",
        )
    if found[name] is not None:
        raise UnsupportedError(
            f"the implementation {name!r} cannot serve this call",
            got=found[name],
            fix="pass implementation=None, or read xsake.explain(...) for the others' reasons",
        )
    return name


def declined(operands: Operands, problem: Problem, platform: str, chosen: str) -> dict[str, str]:
    """Why each implementation but the chosen one does not run."""
    found = verdicts(operands, problem, platform)
    reasons = {
        name: no or _ON_REQUEST.get(name, "another one was named, or comes first")
        for name, no in found.items()
    }
    return {name: reason for name, reason in reasons.items() if name != chosen}
