"""Registers the layout types with JAX; their arrays are leaves and everything else is static."""

from collections.abc import Callable

import jax


def register_layout[T](
    leaves: tuple[str, ...], static: tuple[str, ...]
) -> Callable[[type[T]], type[T]]:
    """Class decorator: a pytree whose `leaves` are arrays and whose `static` fields are hashed.

    Rebuilding goes around `__init__`: JAX puts placeholders in the place of arrays, and neither
    the invariants nor run-time type checks can hold for those.
    """

    def flatten(value: T):
        return tuple(getattr(value, name) for name in leaves), tuple(
            getattr(value, name) for name in static
        )

    def flatten_with_keys(value: T):
        arrays, rest = flatten(value)
        keys = (jax.tree_util.GetAttrKey(name) for name in leaves)
        return tuple(zip(keys, arrays, strict=True)), rest

    def decorate(cls: type[T]) -> type[T]:
        def unflatten(rest, arrays) -> T:
            value = object.__new__(cls)
            for name, item in zip(leaves + static, (*arrays, *rest), strict=True):
                object.__setattr__(value, name, item)
            return value

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return decorate
