"""Names of leaves, fingerprints of arrays, and the comparison of trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from xsake.errors import ArgumentError
from xsake.training import fingerprints


def fingerprint(array) -> int:
    return fingerprints.fingerprints({"x": array})["x"]


def test_names_are_paths_and_a_variable_adds_nothing_to_them():
    plain = {"a": {"b": jnp.zeros(2)}, "c": (jnp.zeros(1), None, jnp.zeros(1))}
    assert list(fingerprints.leaves_by_name(plain)) == ["a/b", "c/0", "c/2"]
    state = nnx.State({"a": nnx.State({"b": nnx.Param(jnp.zeros(2))})})
    assert list(fingerprints.leaves_by_name(state)) == ["a/b"]


@pytest.mark.parametrize(
    "tree",
    [{"a/b": 1, "a": {"b": 2}}, {"a": 1, "a/b": 2}, {"": 1}, {"a": {"..": 1}}, {"a\n": 1}, 5],
)
def test_names_that_would_clash_or_cannot_be_kept_are_refused(tree):
    with pytest.raises(ArgumentError, match="name"):
        fingerprints.leaves_by_name(tree)


@pytest.mark.parametrize("leaf", [1, 2.5, "text", np.zeros(2, np.float64), np.zeros(2, object)])
def test_a_leaf_that_would_come_back_as_something_else_is_refused(leaf):
    with pytest.raises(ArgumentError, match="'a' cannot be saved"):
        fingerprints.named_arrays({"a": leaf})


def test_a_tree_without_leaves_is_refused():
    with pytest.raises(ArgumentError, match="no arrays to save"):
        fingerprints.named_arrays({"a": None, "b": {}})


@given(
    # One shape each, or most of the time would go into compiling.
    words=st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6),
    place=st.integers(0, 5),
    bit=st.integers(0, 31),
)
def test_a_fingerprint_notices_every_flipped_bit_and_ignores_what_bits_mean(words, place, bit):
    array = np.array(words, np.uint32)
    flipped = array.copy()
    flipped[place] ^= np.uint32(1 << bit)
    expected = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**32
    assert fingerprint(array) == expected == fingerprint(array.view(np.float32))
    assert fingerprint(flipped) != expected


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int8),
        np.arange(6, dtype=np.float16),
        np.array([True, False, True, True, False, False]),
        np.arange(6, dtype=np.complex64) * (1 + 2j),
        jnp.arange(6).astype(jnp.bfloat16),
        jnp.arange(6).astype(jnp.float8_e4m3fn),
        jnp.arange(6).astype(jnp.int4),
        jax.random.split(jax.random.key(1), 6),
    ],
    ids=lambda array: str(array.dtype),
)
def test_a_fingerprint_of_any_dtype_notices_elements_that_change_places(array):
    assert fingerprint(array) != fingerprint(array[::-1])


def test_an_array_without_elements_has_a_fingerprint():
    assert fingerprint(np.zeros((0, 3), np.float32)) == 0
