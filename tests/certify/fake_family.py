"""A family that needs no vendor: it 'compiles' with the CPU's compiler, and misbehaves on demand.

The head dimension of a case says how: see `MISCHIEF`.
"""

import os
import sys
import time
from types import SimpleNamespace

import jax

from xsake.certify.family import PeakFigures, Target
from xsake.certify.record import CompileCase, CompileFacts

NAME, PLATFORM, PACKAGES = "fake", "cpu", ("jaxlib",)
KERNELS = SELECTED_KERNELS = PAGED_KERNELS = "tests.certify.fake_family"
PEAK = PeakFigures(1e12, 1e11, 2**30, None, "nowhere")
TARGETS = {"f1": Target("f1", "fake", "f1:1x1", "made up", cores_per_device=1, peak=PEAK)}
FAMILIES = {"fake": KERNELS}
LIMIT = 1  # what the control of a constant takes away


def _refuse():
    raise ValueError(f"\x1b[31mtile too large\x1b[0m in {os.getcwd()}")


def _abort():
    sys.stdout.write("compiler chatter\n")  # must not get between the answers
    sys.stdout.flush()
    os.write(2, b"fatal: stack of the compiler\n")
    os.abort()


def _limit():
    if LIMIT > 1:
        raise ValueError("list too long")


MISCHIEF = {
    1: _refuse,
    2: _abort,
    3: lambda: time.sleep(600),
    4: lambda: os._exit(7),
    5: _limit,
    16: lambda: print("noise on stdout"),
}


def case(name: str, head_dim: int = 16, **changes) -> CompileCase:
    sizes = {"tokens": 32, "q_heads": 4, "kv_heads": 2, "budget": 1.0, "block": 8}
    return CompileCase(
        **{"name": name, "pass_name": "forward", "shape": "fake", "head_dim": head_dim}
        | sizes
        | changes
    )


CONTROLS = (
    case("fake_good"),
    case("fake_good_dq", pass_name="dq", dtype="float32"),
    case("fake_good_dkv", pass_name="dkv", traced=True, budget=0.5),
    case("fake_refused", 1, expects="refused", because="tile too large"),
    case(
        "fake_unsplit", 5, expects="refused", because="too long", constants={f"{KERNELS}.LIMIT": 9}
    ),
    case("bad_crash", 2),
    case("bad_hang", 3),
    case("bad_exit", 4),
    case("bad_refusal", 1),
    case("bad_control", expects="refused", because="tile"),
    case("bad_reason", 1, expects="refused", because="memory"),
    case("bad_constant", constants={f"{KERNELS}.NO_SUCH": 1}),
)


def requirements(jax_version: str) -> tuple[str, ...]:
    return (f"jax=={jax_version}",)


def process_variables(dump) -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu"}


def supports(case: CompileCase) -> bool:
    return True


def device_kind(target) -> str:
    return f"{target.name} of {jax.default_backend()}"


def compile(run, arguments, target, dump) -> CompileFacts:
    assert not list(dump.iterdir()), "the dump folder is not empty"
    (dump / "listing.txt").write_text("bundle")
    start = time.perf_counter()
    jax.jit(run).lower(*arguments).compile()
    return CompileFacts(compile_seconds=time.perf_counter() - start, vmem_bytes=4096, spills=0)


def forward(inputs, config, platform):
    MISCHIEF[inputs.q.shape[-1]]()
    return inputs.q * config.scale, inputs.q[..., 0]


def dq_pass(inputs, config, o, lse, do, dlse):
    return inputs.q + o * lse[..., None] + do


def dkv_pass(inputs, config, o, lse, do, dlse):
    return inputs.k * inputs.layout.row_starts[-1].astype(inputs.k.dtype), inputs.v


def count_passes(inputs, config, platform):
    assert platform == "cpu"
    counts = {
        "listed": 4, "computed": 4, "launches": 1, "steps": 4, "balance": None, "flops": 2_000
    }  # fmt: skip
    return tuple(
        SimpleNamespace(name=name, bytes_read=100, bytes_written=20, **counts)
        for name in ("forward", "dQ", "dK/dV")
    )
