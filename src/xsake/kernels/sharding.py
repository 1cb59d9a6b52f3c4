"""Arrays whose types name mesh axes: explicit sharding, and `shard_map` with its checks.

Explicit sharding: kernels reshape and gather along every axis, which JAX refuses for a split one.
So each device computes its part of the batch and of the heads.

`shard_map`: inputs of an operation may vary over different mesh axes, and the carry of a loop must
have one type from its first step on. So an operation gives all inputs the axes of all of them,
outside its `custom_vjp`, where autodiff sums the gradients of shared arrays.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, reshard

from xsake.errors import UnsupportedError

type Axes = str | tuple[str, ...] | None


class Placing(NamedTuple):
    """Mesh axes that batch and heads of a call are split over, by the types of its arrays."""

    mesh: AbstractMesh
    batch: Axes
    heads: Axes

    @property
    def parts(self) -> tuple[int, int]:
        """Into how many parts the batch and the heads are split."""
        names = ((x,) if isinstance(x, str) else x or () for x in (self.batch, self.heads))
        batch, heads = (math.prod(self.mesh.shape[axis] for axis in axes) for axes in names)
        return batch, heads

    @property
    def spec(self) -> PartitionSpec:
        """Of arrays [B, T, heads, ...]."""
        return PartitionSpec(self.batch, None, self.heads)


def placing_of(**arrays: Any) -> Placing | None:
    """How arrays [B, T, heads, ...] are split; None if no type names an axis.

    Tokens and features stay together, and arrays that are split are split alike; an error else.
    """
    split = {name: spec for name, x in arrays.items() if any(spec := _spec(x))}
    if not split:
        return None
    mesh = next(jax.typeof(arrays[name]).sharding.mesh for name in split)
    batch, heads = ({spec[i] for spec in split.values()} - {None} for i in (0, 2))
    apart = [name for name, spec in split.items() if spec[1] or any(spec[3:])]
    if apart or len(batch) > 1 or len(heads) > 1:
        raise UnsupportedError(
            "sharding-axes",
            "attention splits the batch and the heads over devices, and nothing else",
            got=", ".join(f"{name} {PartitionSpec(*spec)}" for name, spec in split.items()),
            expected="[B, T, heads, ...] split along B and heads, q, k and v alike",
            fix="jax.sharding.reshard the arrays, or use xsake.distributed.ContextParallel, "
            "which splits tokens",
        )
    placing = Placing(mesh, *(next(iter(x), None) for x in (batch, heads)))
    for name, x in arrays.items():
        for size, parts in zip((x.shape[0], x.shape[2]), placing.parts, strict=True):
            if size % parts:
                raise UnsupportedError(
                    "mesh-sharding",
                    "an array cannot be split over the mesh as the others are",
                    got=f"{name} {x.shape}, {parts} parts",
                    expected=f"a multiple of {parts} instead of {size}",
                    fix="split fewer heads, or repeat kv heads until every device has one",
                )
    return placing


def place(name: str, x: Any, mesh: AbstractMesh, spec: PartitionSpec) -> Any:
    """An array split as `spec` says; what is split otherwise is not gathered in silence."""
    own, target = _spec(x), (*spec, *(None,) * (x.ndim - len(spec)))
    if any(axes not in (None, there) for axes, there in zip(own, target, strict=True)):
        raise UnsupportedError(
            "operand-sharding",
            f"{name} is split over other axes than the call",
            got=f"{name} {PartitionSpec(*own)}",
            expected=f"{spec}, or not split",
            fix="jax.sharding.reshard it",
        )
    return reshard(x, NamedSharding(mesh, spec))


def explicit_axes(mesh: AbstractMesh) -> frozenset[str]:
    """The axes of a mesh that types name."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind == AxisType.Explicit)


def each_part(placing: Placing | None, function: Callable, *arrays: Any) -> Any:
    """`function(*arrays)`, by every device for its part; `placing` None: the call as it is.

    Arrays and results are trees of [B, T, heads, ...]; an array with two axes is [B or 1, T].
    """
    if placing is None:
        return function(*arrays)
    mesh = placing.mesh

    def spec(x) -> PartitionSpec:
        batch = placing.batch if x.shape[0] > 1 else None
        return PartitionSpec(batch) if x.ndim == 2 else PartitionSpec(batch, None, placing.heads)

    specs = jax.tree.map(spec, arrays)
    run = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=placing.spec,
        axis_names=explicit_axes(mesh), check_vma=False,
    )  # fmt: skip

    def whole(*arrays):
        return run(*jax.tree.map(lambda x, y: place("an argument", x, mesh, y), arrays, specs))

    # An array that lies on one device is spread under `jit` only.
    return jax.jit(whole)(*arrays)


def _spec(x: Any) -> tuple[Axes, ...]:
    """Mesh axes of each axis of an array; abstract arrays have none."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return (None,) * len(x.shape)
    return tuple(jax.typeof(x).sharding.spec)


def axes_of(*trees: Any) -> frozenset[str]:
    """Mesh axes that some array varies over; none outside `shard_map`, or without its checks."""
    return frozenset().union(*map(_varying_axes, jax.tree.leaves(trees)))


def _varying_axes(x: Any) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def vary[T](tree: T, axes: frozenset[str]) -> T:
    """The same arrays, typed as varying over `axes` too."""

    def cast(x):
        missing = tuple(sorted(axes - _varying_axes(x)))
        if not missing:
            return x
        if hasattr(lax, "pcast"):
            return lax.pcast(x, missing, to="varying")
        return getattr(lax, "pvary")(x, missing)  # noqa: B009 (jax 0.8)

    return jax.tree.map(cast, tree) if axes else tree


def vary_alike[T](tree: T) -> T:
    """The same arrays, each varying over every axis that one of them varies over."""
    return vary(tree, axes_of(tree))


def result_shape(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """Shape of a kernel result that varies over the axes of `like`."""
    axes = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes)
