"""The same call gives the same bits: again, in another process, in any batch (N8)."""

import dataclasses
import functools
import hashlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import xsake
from tests.kernels.compiled import compiled
from tests.kernels.implementations import RUNNABLE, each_implementation
from tests.lanes import gate
from xsake.layout import BlockLayout
from xsake.masks import Causal, Full
from xsake.testing.case_table import BY_NAME
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import (
    call,
    compare,
    failures,
    reference_results,
    run_case,
)

CASE = dataclasses.replace(BY_NAME["group_heads_differ"], name="deterministic", sinks=0)


def results(implementation, inputs):
    """Out, lse and all gradients of one jitted call, as bytes."""
    got = call(compiled(CASE, implementation), inputs)
    return {name: got[name].tobytes() for name in sorted(got)}


def fingerprint(implementation):
    return hashlib.sha256(b"".join(results(implementation, CASE.inputs()).values())).hexdigest()


@each_implementation
def test_five_calls_give_the_same_bits(implementation):
    first = results(implementation, CASE.inputs())
    assert all(results(implementation, CASE.inputs()) == first for _ in range(4))


@pytest.mark.slow  # two more processes
def test_another_process_gives_the_same_bits():
    script = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('subject', sys.argv[1])\n"
        "subject = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(subject)\n"
        "print(*(subject.fingerprint(name) for name in sys.argv[2:]))\n"
    )
    command = [sys.executable, "-c", script, __file__, *RUNNABLE]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert answer.stdout.split() == [fingerprint(name) for name in RUNNABLE]


@each_implementation
def test_batch_neighbours_do_not_matter(implementation):
    run, inputs = compiled(CASE, implementation), CASE.inputs()
    swap = lambda array: array[::-1].copy()
    swapped = dataclasses.replace(
        inputs,
        operands={n: a if n == "sinks" else swap(a) for n, a in inputs.operands.items()},
        d_out=swap(inputs.d_out),
        d_lse=swap(inputs.d_lse),
    )
    straight, other = call(run, inputs), call(run, swapped)
    for name in straight.keys() - {"d_sinks"}:  # the sinks' gradient is a sum over the batch
        assert straight[name].tobytes() == swap(other[name]).tobytes(), name


@pytest.mark.slow  # quicker: the same bits in five calls and next to other batch elements
@pytest.mark.parametrize("implementation", gate(["xla"], [x for x in RUNNABLE if x != "reference"]))
def test_the_size_of_the_batch_does_not_matter(implementation):
    """Alone or one of two whose lists differ: sums over rows have an order of their own too.

    The dense reference is made of XLA's batched products, whose order of sums depends on the batch.
    """
    rng = np.random.default_rng(0)
    shape = (2, 256, 4, 16)
    q, k, v, d_out = (rng.normal(size=shape).astype("float32") for _ in range(4))
    visible = rng.random((2, 4, 8, 8)) < np.array([0.3, 0.8])[:, None, None, None]
    visible = visible | np.eye(8, dtype=bool)

    def gradients(some):
        layout = BlockLayout.from_block_mask(
            visible[some], mask=Causal(), q_tokens=256, kv_tokens=256, block_q=32, block_kv=32
        )
        attend = functools.partial(xsake.attention, layout=layout, implementation=implementation)
        out, pull = jax.vjp(attend, q[some], k[some], v[some])
        return out, *pull(jax.numpy.asarray(d_out[some]))

    both = gradients(slice(0, 2))
    for element in range(2):
        alone = gradients(slice(element, element + 1))
        for name, one, of_two in zip(("out", "d_q", "d_k", "d_v"), alone, both, strict=True):
            assert np.asarray(one[0]).tobytes() == np.asarray(of_two[element]).tobytes(), name


@each_implementation
def test_the_order_of_key_blocks_moves_only_rounding(implementation):
    case = ConformanceCase("order", Full(), block=(32, 16), q_tokens=64, kv_tokens=96)
    inputs, truth, plain = reference_results(case)
    order = np.random.default_rng(0).permutation(6)
    tokens = (order[:, None] * 16 + np.arange(16)).reshape(-1)
    moved = inputs.replace(k=inputs.operands["k"][:, tokens], v=inputs.operands["v"][:, tokens])
    got = run_case(xsake.attention, case, implementation, moved)
    back = np.argsort(tokens)
    got |= {name: got[name][:, back] for name in ("d_k", "d_v")}
    assert failures(compare(got, plain, truth, dtype="float32")) == []
