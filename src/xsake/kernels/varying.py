"""Types of values inside `jax.shard_map`: the mesh axes they vary over; knows no operation.

Operands of an operation may vary over different axes, and what a loop carries must have one type
from its first step on. So an operation gives all operands the axes of all of them, outside its
`custom_vjp`, where autodiff sums the gradients of what was shared; loops start from there.
"""

from typing import Any

import jax
from jax import lax


def axes_of(*trees: Any) -> frozenset[str]:
    """Mesh axes that some array varies over; none outside `shard_map`, or without its checks."""
    return frozenset().union(*map(_axes, jax.tree.leaves(trees)))


def _axes(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def vary[T](tree: T, axes: frozenset[str]) -> T:
    """The same arrays, typed as varying over `axes` too."""

    def cast(x):
        missing = tuple(sorted(axes - _axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def vary_alike[T](tree: T) -> T:
    """The same arrays, each varying over every axis that one of them varies over."""
    return vary(tree, axes_of(tree))


def shape_of_result(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """What a kernel gives that varies over the axes of `like`."""
    axes = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes)
