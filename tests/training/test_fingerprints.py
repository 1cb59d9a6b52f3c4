"""A flipped bit in one copy is found, and the copy is named.

Copies in several processes are in test_processes.py.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsake.errors import ArgumentError
from xsake.training import fingerprints
from xsake.training.fingerprints import (
    ReplicaMismatch,
    ReplicaSum,
    bit_sums,
    find_minority,
    find_mismatches,
)

TYPES = ["bool", "uint8", "int16", "bfloat16", "float16", "float32", "int32", "complex64", "int4"]


@given(data=st.data(), dtype=st.sampled_from(["uint8", "uint16", "uint32"]), size=st.integers(1, 8))
def test_any_flipped_bit_changes_the_sum(data, dtype, size):
    bits = np.iinfo(dtype).bits
    words = st.lists(st.integers(0, 2**bits - 1), min_size=size, max_size=size)
    values = np.array(data.draw(words), dtype)
    flipped = values.copy()
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, bits - 1))
    flipped[place] ^= values.dtype.type(1 << bit)
    assert _sum(values) != _sum(flipped)


def _sum(values):
    """Always of eight, so that one compiled program is enough."""
    padded = np.zeros(8, values.dtype)
    padded[: len(values)] = values
    return int(bit_sums((padded,))[0])


def test_sums_are_those_of_the_words():
    values = np.array([1.5, -2.25, np.nan, -0.0], np.float32)
    expected = int(values.view(np.uint32).astype(np.uint64).sum() % 2**32)
    assert int(bit_sums((values,))[0]) == expected
    assert int(bit_sums((np.full(2, 2**31, np.uint32),))[0]) == 0  # the sum wraps


def test_zero_and_minus_zero_are_not_the_same():
    zeros = bit_sums((jnp.zeros(3), -jnp.zeros(3)))
    assert int(zeros[0]) != int(zeros[1])


def test_every_type_of_leaf_has_a_sum():
    leaves = {name: jnp.ones((2, 3), name) for name in TYPES}
    leaves |= {"key": jax.random.key(1), "numpy": np.ones(3), "scalar": np.float64(2.0)}
    leaves |= {"empty": jnp.zeros((0, 4)), "complex": np.ones(2, np.complex128)}
    assert find_mismatches(leaves) == ()
    assert find_mismatches({}) == ()


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
    with pytest.raises(ArgumentError, match="a leaf that is not an array") as caught:
        find_mismatches({"a": {"b": "text"}})
    assert "a.b: str" in str(caught.value)


EIGHT_DEVICES = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from xsake.training.fingerprints import find_mismatches

mesh = jax.make_mesh((4, 2), ("data", "model"))
values = np.arange(24, dtype=np.float32).reshape(4, 6)

def placed(spec, broken=()):
    sharding, parts = NamedSharding(mesh, spec), []
    for device, index in sharding.addressable_devices_indices_map(values.shape).items():
        part = values[index].copy()
        if device.id in broken:
            part.reshape(-1).view(np.uint32)[1] ^= 1 << 30
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(values.shape, sharding, parts)

def show(**tree):
    return [(found.leaf, [copy.device for copy in found.suspects], found.copies, found.is_decided)
            for found in find_mismatches(tree)]

position = {device.id: row for row, device in enumerate(mesh.devices.flat)}
assert list(position) == [device.id for device in mesh.devices.flat]
ids = list(position)
everywhere, by_model, by_all = P(), P(None, "model"), P("data", "model")
assert show(a=placed(everywhere), b=placed(by_model), c=placed(by_all)) == []
assert show(a=placed(everywhere), b=placed(everywhere, {ids[5]})) == [("b", [ids[5]], 8, True)]
# Column halves: devices of even and odd position hold different ones, four copies each.
assert show(b=placed(by_model, {ids[3]})) == [("b", [ids[3]], 4, True)]
assert show(b=placed(by_model, {ids[1], ids[3]})) == [("b", ids[1::2], 4, False)]
assert show(c=placed(by_all, {ids[2]})) == []  # exists once
assert show(k=jax.device_put(jax.random.key(3), NamedSharding(mesh, P()))) == []
print("all found")
"""


def test_a_copy_that_went_wrong_is_found_among_eight_devices():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-W", "error", "-c", EIGHT_DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all found\n"
