"""Branches by platform, each lowered for its own platform and no other.

`lax.platform_dependent` lowers every branch for every platform of a multi-platform export, which
fails for a kernel that exists on one platform. Here one exported artefact can hold a TPU kernel and
a CPU loop.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from xsake.errors import ArgumentError, UnsupportedError

# The platforms that have names here; every other one gets the default branch.
PLATFORMS = ("cpu", "tpu", "cuda", "rocm")
# The CPU of `jax.export`: an artefact must not depend on a library of the machine that made it.
EXPORTED_CPU = "exported cpu"


def capability_of(platform: str) -> tuple[int, int] | None:
    """The compute capability in a platform's name: (8, 0) for "sm_80"; None if it names none."""
    digits = platform.removeprefix("sm_").rstrip("af")
    if not platform.startswith("sm_") or not digits.isdecimal() or len(digits) < 2:
        return None
    return int(digits[:-1]), int(digits[-1])


def family_of(platform: str) -> str:
    """The platform that programs are lowered for: "cuda" for the name of one kind of GPU."""
    if platform == EXPORTED_CPU:
        return "cpu"
    return platform if capability_of(platform) is None else "cuda"


def check_platform(name: str, fix: str) -> None:
    """Raise ArgumentError unless a platform has a name here."""
    if name not in (*PLATFORMS, EXPORTED_CPU):
        raise ArgumentError(
            "platform-name",
            "no platform of this name",
            got=repr(name),
            expected=" or ".join(map(repr, PLATFORMS)),
            fix=f"name 'cuda' or 'rocm' for a GPU, and {fix}",
        )


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """Placeholder for a platform without a branch; raised when a program is lowered for it."""

    what: str  # cannot be done
    reason: str  # why not on this platform
    fix: str


type Branch = Callable[..., Any] | Unsupported


def by_platform(branches: Mapping[str, Branch], default: Branch | None, *operands: Any) -> Any:
    """`branches[platform](*operands)` for the platform that the code is lowered for.

    Branches are traced when they are needed: one now, for the shapes of the results, others when
    the code is lowered for their platform. They must agree on shapes and dtypes of their results,
    and may close over constants only. `default` is the branch of every other platform; None refuses
    them. Without others it is called directly, and can be differentiated.

    Works under `jit`, `vmap`, `shard_map`, `jax.checkpoint`, loops and `jax.export`, outside of
    them too. It has no derivative: call it inside the two functions of a `jax.custom_vjp`.
    """
    for platform in branches:
        check_platform(platform, "leave other platforms to the default")
    default = default or Unsupported(
        "this computation has no code for the platform it is lowered for",
        f"there is code for {', '.join(branches)} only",
        "lower it for one of these platforms, or give by_platform a default",
    )
    if not branches and not isinstance(default, Unsupported):
        return default(*operands)
    choices = {**branches, "default": default}
    functions = [x for x in choices.values() if not isinstance(x, Unsupported)]
    if not functions:
        raise ArgumentError(
            "platform-branches", "there must be a branch that computes something", got=choices
        )
    flat, tree = jax.tree.flatten(operands)
    here = choices.get(jax.default_backend(), default)
    first = functions[0] if isinstance(here, Unsupported) else here
    jaxpr, out = jax.make_jaxpr(first, return_shape=True)(*operands)  # cached by function, shapes
    _check_constants(jaxpr)
    mesh = jax.sharding.get_abstract_mesh()
    deferred = lambda x: _Traced(jaxpr, mesh) if x is first else _Deferred(x, tree, mesh)
    table = tuple(
        (name, x if isinstance(x, Unsupported) else deferred(x)) for name, x in choices.items()
    )
    types = tuple(_types(jaxpr))
    results = dispatch_p.bind(
        *flat, table=table, types=types, side_effects=frozenset(jaxpr.effects)
    )
    return jax.tree.unflatten(jax.tree.structure(out), results)


@dataclasses.dataclass(frozen=True)
class _Deferred:
    """A branch that is traced when it is lowered, in the mesh of its call."""

    function: Callable
    tree: Any
    mesh: Any

    def __call__(self, *flat) -> list:
        return jax.tree.leaves(self.function(*jax.tree.unflatten(self.tree, flat)))


@dataclasses.dataclass(frozen=True)
class _Traced:
    """The branch that was traced for the shapes of the results, so that it is not traced twice."""

    jaxpr: Any
    mesh: Any

    def __call__(self, *flat) -> list:
        return core.jaxpr_as_fun(self.jaxpr)(*flat)


@dataclasses.dataclass(frozen=True)
class _Batched:
    """A branch under `vmap`; results have the new axis first."""

    branch: "_Deferred | _Traced | _Batched"
    size: int
    dims: tuple

    @property
    def mesh(self):
        return self.branch.mesh

    def __call__(self, *flat) -> list:
        return jax.vmap(self.branch, self.dims, 0, axis_size=self.size)(*flat)


def _check_constants(jaxpr) -> None:
    for value in jaxpr.consts:
        if isinstance(value, jax.core.Tracer):
            raise ArgumentError(
                "platform-closure",
                "a branch uses a traced array that is not among its operands",
                got=str(value),
                expected="branches that close over constants only",
                fix="pass the array to by_platform as an operand",
            )


def _types(jaxpr) -> list:
    """Types of the results; whether a dtype was a Python number's is not part of them."""
    return [aval.update(weak_type=False) for aval in jaxpr.out_avals]


dispatch_p = core.Primitive("xsake_by_platform")
dispatch_p.multiple_results = True


@functools.partial(jax.jit, static_argnames=("table", "types", "side_effects"))
def _call(*operands, **static):
    return dispatch_p.bind(*operands, **static)


@dispatch_p.def_impl
def _compute(*operands, **static):
    # A primitive is compiled even where `jax.disable_jit` has everything else run step by step.
    with jax.disable_jit(False):
        return _call(*operands, **static)


@dispatch_p.def_effectful_abstract_eval
def _results(*_, table, types, side_effects):
    return list(types), side_effects


def _lower(platform: str, ctx: mlir.LoweringRuleContext, *operands, table, types, side_effects):
    choices = dict(table)
    if platform == "cpu" and ctx.module_context.lowering_parameters.for_export:
        platform = EXPORTED_CPU if EXPORTED_CPU in choices else platform
    choice = choices.get(platform, choices["default"])
    if isinstance(choice, Unsupported):
        here = ", ".join(ctx.platforms or ctx.module_context.platforms)
        raise UnsupportedError(
            "platform-unsupported",
            choice.what,
            got=f"lowering for {here}: {choice.reason}",
            fix=choice.fix,
        )
    if len(ctx.module_context.platforms) > 1:
        # JAX keeps one body of an inner `jit` per module, whichever platform it was lowered for.
        own = ctx.module_context.replace(cached_primitive_lowerings={})
        ctx = ctx.replace(module_context=own)
    with jax.sharding.use_abstract_mesh(choice.mesh):
        is_traced = isinstance(choice, _Traced)
        jaxpr = choice.jaxpr if is_traced else jax.make_jaxpr(choice)(*ctx.avals_in)
        _check_agreement(_types(jaxpr), types)
        return mlir.lower_fun(core.jaxpr_as_fun(jaxpr))(ctx, *operands)


def _check_agreement(got: list, expected: tuple) -> None:
    if [str(x) for x in got] != [str(x) for x in expected]:
        raise ArgumentError(
            "platform-results",
            "branches for different platforms must return the same shapes and dtypes",
            got=", ".join(map(str, got)),
            expected=", ".join(map(str, expected)),
            fix="make the branches return alike; inside shard_map also vary over the same axes",
        )


mlir.register_lowering(dispatch_p, functools.partial(_lower, "default"))
for _platform in PLATFORMS:
    mlir.register_lowering(dispatch_p, functools.partial(_lower, _platform), platform=_platform)


def _batch(axis, operands, dims, *, table, types, side_effects):
    """`vmap`: of every branch, and every result gets the new axis first."""
    batched = tuple(
        (name, x if isinstance(x, Unsupported) else _Batched(x, axis.size, tuple(dims)))
        for name, x in table
    )
    wider = tuple(x.update(shape=(axis.size, *x.shape)) for x in types)
    results = dispatch_p.bind(*operands, table=batched, types=wider, side_effects=side_effects)
    return results, [0] * len(results)


batching.fancy_primitive_batchers[dispatch_p] = _batch


def _differentiate(primals, tangents, **_):
    raise UnsupportedError(
        "platform-derivative",
        "code that is chosen by platform has no derivative of its own",
        got="a derivative taken through xsake.kernels.lowering.by_platform",
        expected="one first derivative, by jax.grad or jax.vjp, which xsake defines itself",
        fix="for derivatives of gradients pass implementation='reference'",
    )


ad.primitive_jvps[dispatch_p] = _differentiate
