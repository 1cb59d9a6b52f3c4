"""Equality, hashing and caching of static layouts, which are part of jit's cache key."""

import functools
import hashlib
import weakref
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np


class ComparableLayout:
    """Mixin: static layouts compare by content, traced ones by identity.

    A static layout is part of jit's cache key, so an equal layout reuses the compiled program.
    """

    @property
    def is_static(self) -> bool:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self) or not (self.is_static and other.is_static):
            return False
        return self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash if self.is_static else object.__hash__(self)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    @functools.cached_property
    def _identity(self) -> tuple[object, ...]:
        arrays, sizes_and_mask = jax.tree.flatten(self)
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(np.ascontiguousarray(array))
        return digest.digest(), *(array.shape for array in arrays), sizes_and_mask


def cache_live[F: Callable](build: F) -> F:
    """Cache results of `build` while they are referenced elsewhere.

    JAX holds the layout of every cached program, so these take no extra memory. The last 16
    results are always held.

    Args:
        build: a function of hashable positional arguments.
    """
    live: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    @functools.lru_cache(maxsize=16)
    @functools.wraps(build)
    def reuse(*arguments):
        result = live.get(arguments)
        if result is None:
            result = live[arguments] = build(*arguments)
        return result

    return cast(F, reuse)
