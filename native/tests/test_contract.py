"""What a caller relies on: refusals, versions, threads, transformations."""

import dataclasses
import os
import subprocess
import sys

import jax
import native_call
import numpy as np
import oracle
import pytest
import xsake_cpu
from cases import causal


def _case(**kwargs):
    return oracle.build_case(np.random.default_rng(0), **kwargs)


REFUSALS = {
    "batch of k": lambda c: {"k": np.concatenate([c.k, c.k])},
    "tokens of v": lambda c: {"v": c.v[:, :-1]},
    "dtype of k": lambda c: {"k": c.k.astype(np.float16)},
    "rank of q": lambda c: {"q": c.q[None]},
    "block_kv 0": lambda c: {"block_kv": 0},
    "block_q negative": lambda c: {"block_q": -8},
    "row_starts too short": lambda c: {"row_starts": c.row_starts[:-1]},
    "is_partial too short": lambda c: {"is_partial": c.is_partial[:-1]},
    "layout_heads": lambda c: {"layout_heads": 3},
    "layout_batch": lambda c: {"layout_batch": 2},
    "positions": lambda c: {"q_positions": np.zeros((1, 3), np.int32)},
    "one segment side": lambda c: {"q_segment_ids": np.zeros((1, c.q.shape[1]), np.int32)},
    "bias shape": lambda c: {"bias": np.zeros((1, 1, 5, 5), np.float32)},
    "bias heads": lambda c: {"bias": np.zeros((1, 3, c.q.shape[1], c.k.shape[1]), np.float32)},
    "program operation": lambda c: {"program": (1, 4, 0, 0, 99, *[0] * 9)},
    "program length": lambda c: {"program": (2, 4, 0, 0, 0, *[0] * 9)},
    "program later step": lambda c: {"program": (1, 4, 0, 0, 3, 4, 0, 0, *[0] * 6)},
    "program table": lambda c: {"program": (1, 4, 0, 0, 3, 3, 5, 0, *[0] * 6)},
    "program answer": lambda c: {"program": (0, 4, 0, 0)},
    "program without terms": lambda c: {"program": (1, 4, 0, 0, 8, *[0] * 9)},
}


@pytest.mark.parametrize("target", ["forward", "decode"])
@pytest.mark.parametrize("name", REFUSALS)
def test_inconsistent_calls_raise(name, target):
    case = _case(**causal())
    results = native_call._outputs(case)
    size = xsake_cpu.workspace(target, **native_call.workspace_sizes(case))
    bad = dataclasses.replace(case, **REFUSALS[name](case))
    results = (*results, native_call._workspace(size))
    with pytest.raises(native_call.ERRORS, match="xsake_cpu: "):
        native_call._call(
            f"xsake_cpu_{target}",
            results,
            native_call._arguments(bad),
            native_call._attributes(bad),
        )


def test_mask_index_out_of_range_raises():
    case = _case(mask_blocks=True)
    case.mask_index = case.mask_index.copy()
    case.mask_index[3] = len(case.mask_blocks)
    with pytest.raises(native_call.ERRORS, match="mask_index"):
        native_call.forward(case)


def test_small_workspace_raises():
    case = _case()
    results = (*native_call._outputs(case), native_call._workspace(1000))
    with pytest.raises(native_call.ERRORS, match="workspace"):
        native_call._call(
            "xsake_cpu_forward",
            results,
            native_call._arguments(case),
            native_call._attributes(case),
        )


def test_workspace_is_at_most_twice_k_and_v():
    sizes = {
        "batch": 2,
        "q_tokens": 4096,
        "kv_tokens": 4096,
        "q_heads": 8,
        "kv_heads": 8,
        "dim": 64,
        "v_dim": 64,
        "block_kv": 128,
    }
    arrays = 2 * 2 * 4096 * 8 * 64 * 4
    one, two = (xsake_cpu.workspace("forward", **sizes, workers=n) for n in (1, 2))
    assert one - (two - one) <= 2 * arrays
    assert two - one < 2**20


def test_versions():
    built, runtime = xsake_cpu.ffi_api_version(), xsake_cpu.runtime_ffi_api_version()
    assert built[0] == runtime[0] and built[1] <= runtime[1]
    assert xsake_cpu.isa() in ("amx", "avx512", "avx2", "base", "neon")


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_lower_isa_can_be_forced(isa):
    if xsake_cpu.isa() == "neon":
        pytest.skip("one ISA on aarch64")
    code = "import xsake_cpu; print(xsake_cpu.isa())"
    environment = {**os.environ, "XSAKE_CPU_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True
    )
    assert done.stdout.strip() == isa


def test_empty_arrays():
    for shape in ({"q_tokens": 0, "kv_tokens": 8}, {"q_tokens": 8, "kv_tokens": 0}, {"batch": 0}):
        case = _case(**shape)
        for o, lse in (native_call.forward(case), native_call.decode(case)):
            assert not o.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hundred_runs_are_equal_bit_by_bit(workers):
    case = _case(q_tokens=160, q_heads=4, kv_heads=2, dim=24, density=0.7, **causal())
    do = np.random.default_rng(1).standard_normal(case.q.shape).astype(np.float32)

    def run():
        o, lse = native_call.forward(case, workers)
        return (
            o,
            lse,
            *native_call.decode(case, workers),
            *native_call.backward(case, o, lse, do, np.zeros_like(lse), workers),
        )

    expected = [x.tobytes() for x in run()]
    for _ in range(100):
        assert [x.tobytes() for x in run()] == expected


_DEVICES = """
import sys; sys.path.insert(0, {tests!r})
import jax, numpy as np, oracle, native_call
from cases import causal
assert jax.device_count() == 8
sizes = dict(q_tokens=256, q_heads=4, dim=32)
case = oracle.build_case(np.random.default_rng(0), **sizes, **causal())
expected = native_call.forward(case)
size = native_call.xsake_cpu.workspace("forward", **native_call.workspace_sizes(case, 8))
results = (*native_call._outputs(case), native_call._workspace(size))
key = tuple((x.shape, np.dtype(x.dtype)) for x in results)
call = native_call._compile("xsake_cpu_forward", key, tuple(native_call._attributes(case).items()))
arguments = native_call._arguments(case)
placed = [[jax.device_put(x, device) for x in arguments] for device in jax.devices()]
for _ in range(40):
    outputs = [call(*x) for x in placed]
    for o, lse in outputs:
        assert np.array_equal(o, expected[0]) and np.array_equal(lse, expected[1])
print("done")
"""


def test_many_devices_do_not_deadlock():
    code = _DEVICES.format(tests=os.path.dirname(__file__))
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "done", done.stderr[-2000:]


def test_scan_and_sequential_vmap():
    case = _case(batch=1, q_tokens=100, **causal())
    size = xsake_cpu.workspace("forward", **native_call.workspace_sizes(case))
    native_call.register()
    call = jax.ffi.ffi_call(
        "xsake_cpu_forward",
        (*native_call._outputs(case), native_call._workspace(size)),
        vmap_method="sequential",
    )
    attributes = native_call._attributes(case)
    attributes["program"] = np.array(attributes["program"], np.int32)
    rest = native_call._arguments(case)[1:]
    attend = lambda q: call(q, *rest, **attributes)[0]
    queries = np.stack([case.q, 2 * case.q, -case.q])
    scanned = jax.lax.scan(lambda _, q: (None, attend(q)), None, queries)[1]
    mapped = jax.vmap(attend)(queries)
    assert np.array_equal(scanned, mapped) and np.array_equal(
        mapped[0], native_call.forward(case)[0]
    )
