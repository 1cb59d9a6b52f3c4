"""Names and fingerprints of the arrays of a checkpoint, and replicas with a flipped bit.

Copies in several processes are in test_processes.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from tests import processes
from tests.training.checkpoint_processes import find_broken_replicas
from xsake.errors import ArgumentError
from xsake.training import fingerprints
from xsake.training.fingerprints import (
    ReplicaMismatch,
    ReplicaSum,
    bit_sums,
    find_minority,
    find_mismatches,
    leaves_by_name,
    named_arrays,
)

TYPES = ["bool", "uint8", "int16", "bfloat16", "float16", "float32", "int32", "complex64", "int4"]


def fingerprint(array) -> int:
    return fingerprints.fingerprints({"x": array})["x"]


def test_names_are_paths_and_a_variable_adds_nothing_to_them():
    plain = {"a": {"b": jnp.zeros(2)}, "c": (jnp.zeros(1), None, jnp.zeros(1))}
    assert list(leaves_by_name(plain)) == ["a/b", "c/0", "c/2"]
    state = nnx.State({"a": nnx.State({"b": nnx.Param(jnp.zeros(2))})})
    assert list(leaves_by_name(state)) == ["a/b"]


@pytest.mark.parametrize(
    "tree",
    [{"a/b": 1, "a": {"b": 2}}, {"a": 1, "a/b": 2}, {"": 1}, {"a": {"..": 1}}, {"a\n": 1}, 5],
)
def test_names_that_would_clash_or_cannot_be_kept_are_refused(tree):
    with pytest.raises(ArgumentError, match="name"):
        leaves_by_name(tree)


@pytest.mark.parametrize("leaf", [1, 2.5, "text", np.zeros(2, np.float64), np.zeros(2, object)])
def test_a_leaf_that_would_come_back_as_something_else_is_refused(leaf):
    with pytest.raises(ArgumentError, match="'a' cannot be saved"):
        named_arrays({"a": leaf})
    with pytest.raises(ArgumentError, match="XSK-102.no-leaves"):
        named_arrays({"a": None, "b": {}})


@given(
    # One shape each, or most of the time would go into compiling.
    words=st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6),
    place=st.integers(0, 5),
    bit=st.integers(0, 31),
)
def test_every_flipped_bit_changes_both_sums(words, place, bit):
    array = np.array(words, np.uint32)
    flipped = array.copy()
    flipped[place] ^= np.uint32(1 << bit)
    expected = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**32
    assert fingerprint(array) == expected == fingerprint(array.view(np.float32))
    assert fingerprint(flipped) != expected
    sums = [int(bit_sums((each,))[0]) for each in (array, flipped)]
    assert sums[0] == sum(words) % 2**32 != sums[1]


@pytest.mark.parametrize("dtype", [*TYPES, "float8_e4m3fn", "key"])
def test_a_fingerprint_of_any_dtype_notices_elements_that_change_places(dtype):
    if dtype == "key":
        array = jax.random.split(jax.random.key(1), 6)
    else:
        array = jnp.array([1, 0, 1, 1, 0, 0]).astype(dtype)
    assert fingerprint(array) != fingerprint(array[::-1])


def test_every_type_of_leaf_has_a_sum():
    leaves = {name: jnp.ones((2, 3), name) for name in TYPES}
    leaves |= {"key": jax.random.key(1), "numpy": np.ones(3), "scalar": np.float64(2.0)}
    leaves |= {"empty": jnp.zeros((0, 4)), "complex": np.ones(2, np.complex128)}
    assert find_mismatches(leaves) == find_mismatches({}) == ()
    assert fingerprint(np.zeros((0, 3), np.float32)) == 0


@given(
    words=st.lists(st.integers(0, 2), min_size=1, max_size=9),
)
def test_the_outvoted_are_those_who_are_not_most(words):
    places = [(row // 2, row) for row in range(len(words))]
    suspects, is_decided = find_minority(np.array(words, np.uint32), places)
    winners = [word for word in set(words) if 2 * words.count(word) > len(words)]
    assert is_decided == bool(winners)
    expected = range(len(words)) if not winners else np.flatnonzero(np.array(words) != winners[0])
    assert [copy.device for copy in suspects] == list(expected)


def test_of_two_that_differ_both_are_told():
    suspects, is_decided = find_minority(np.array([1, 2], np.uint32), [(0, None), (1, None)])
    found = ReplicaMismatch("layers.0", suspects, 2, is_decided)
    assert found.processes == (0, 1)
    expected = "layers.0: no majority: process 0 has 0x00000001, process 1 has 0x00000002"
    assert str(found) == expected


def test_a_decided_difference_names_the_copy_that_is_alone():
    found = ReplicaMismatch("head", (ReplicaSum(3, 12, 7),), 16, True)
    assert str(found) == "head: process 3 (device 12) against 15 copies that agree"


def test_copies_of_processes_are_compared_leaf_by_leaf(monkeypatch):
    def with_neighbours(mine):
        return np.stack([mine, mine + np.array([0, 1], np.uint32), mine])

    monkeypatch.setattr(fingerprints, "gather", with_neighbours)
    found = find_mismatches({"a": np.ones(3, np.float32), "b": jnp.ones(4)})
    assert [(each.leaf, each.processes, each.is_decided) for each in found] == [("b", (1,), True)]


def test_what_is_no_array_is_refused():
    with pytest.raises(ArgumentError, match="XSK-102.leaf-type") as caught:
        find_mismatches({"a": {"b": "text"}})
    assert "a.b: str" in str(caught.value)


def test_a_copy_that_went_wrong_is_found_among_eight_devices():
    processes.run(find_broken_replicas, devices=8)
