"""Pytree registration of layouts: arrays are leaves, everything else is static."""

from collections.abc import Callable

import jax


def register_layout[T](
    leaves: tuple[str, ...], static: tuple[str, ...]
) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that registers `leaves` as children and `static` as aux data.

    Unflattening bypasses `__init__`: JAX passes placeholders instead of arrays, for which neither
    invariants nor run-time type checks hold.
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
