"""Compiles the train step of a case, without a chip, and records the compiler's figures."""

import contextlib
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.scale import hlo
from benchmarks.scale.cases import Machine, ScaleCase
from xsake._io import atomic_write
from xsake._provenance import (
    checkout_root,
    environment,
    installed_versions,
    source_digest,
)
from xsake.attention import BlockSparseAttention
from xsake.certify import gpu_specs
from xsake.distributed import (
    ContextParallel,
    MeshShape,
    NamedShape,
    batch_sharding,
    logical_sharding,
    make_mesh,
)
from xsake.errors import ArgumentError
from xsake.training.attention import make_attention
from xsake.training.state import (
    Shardings,
    abstract_state,
    build_optimizer,
    define_model,
    state_shardings,
)
from xsake.training.step import make_step

RESULTS = Path(__file__).parents[1] / "results" / "scale"
NOTES = {
    "memory": "bytes of one device, from the compiler's buffer assignment; nothing was allocated",
    "collectives": "of one device and one step; bytes without padding, loops as often as they run",
    "compiler_cost": "as the compiler counts: a loop's body once, kernels as they say themselves",
    "seconds": "of the compiler on this machine's two shared cores; no device ran anything",
}
COMPILERS = ("flax", "optax", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
_MOST_WORDS = 4000


def compiled_case(case: ScaleCase, text_file: Path | None = None) -> dict[str, Any]:
    """Compile one case; a refusal is an outcome too, in the compiler's own words.

    Args:
        case: what to compile.
        text_file: where to leave the compiled program as text; None: nowhere.
    """
    mesh, machine = topology_mesh(case), case.machine
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    traced = traced_step(case, mesh)
    seconds["trace"] = round(time.perf_counter() - start, 1)
    start = time.perf_counter()
    with named_device(case.machine, mesh):
        lowered = traced.lower(lowering_platforms=(machine.platform,))
    seconds["lower"] = round(time.perf_counter() - start, 1)
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        seconds["compile"] = round(time.perf_counter() - start, 1)
        return {"verdict": "refused", "message": str(error)[:_MOST_WORDS], "seconds": seconds}
    seconds["compile"] = round(time.perf_counter() - start, 1)
    text = compiled.as_text() or ""
    if text_file is not None:
        text_file.write_text(text, encoding="utf-8")
    return {
        "verdict": "compiled",
        "message": None,
        "seconds": seconds,
        "memory": memory_of(compiled, case.machine),
        "kernels": len(re.findall(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*)"', text)),
        "loop_rounds": hlo.loop_rounds(text),
        "collectives": [dataclasses.asdict(one) for one in hlo.collectives(text)],
        "compiler_cost": _cost(compiled),
    }


def topology_mesh(case: ScaleCase) -> Mesh:
    """The mesh of a case over devices that only their compiler knows."""
    return make_mesh(MeshShape(**case.mesh.model_dump()), topology_devices(case.machine))


def topology_devices(machine: Machine) -> Any:
    """Devices that only their compiler knows."""
    from jax.experimental import topologies

    package = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin"}[machine.platform]
    if not installed_versions((package,)):
        extra = {"tpu": "tpu", "cuda": "cuda13"}[machine.platform]
        raise ArgumentError(
            "no-compiler",
            "the compiler for these chips is not installed",
            expected=f"the package {package} that belongs to this jax",
            fix=f'run pip install "jax[{extra}]" in an environment of its own',
        )
    if machine.platform == "cuda":
        return gpu_specs.devices(machine.chip, machine.topology)
    named = {"platform": "tpu", "topology_name": machine.topology}
    return topologies.get_topology_desc(**named).devices


def traced_step(case: ScaleCase, mesh: Mesh):
    """The step of `xsake.training` on abstract arrays, placed as `xsake.training.state` does."""
    config = case.config
    place = lambda path, names, shape: logical_sharding(NamedShape(path, names, shape), mesh)
    placed = state_shardings(config, place, NamedSharding(mesh, PartitionSpec()))
    shardings = Shardings(placed, batch_sharding(mesh))
    definition = define_model(config)
    attention = make_attention(
        config.attention, config.model.decoder, operator=_operator(case, mesh)
    )
    optimizer = build_optimizer(config, definition)
    step = make_step(config, definition, optimizer, attention.attend(0), shardings)
    state = jax.tree.map(
        lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own),
        abstract_state(config),
        placed,
    )
    shape = (case.batch, case.context + 1)
    tokens = jax.ShapeDtypeStruct(shape, "int32", sharding=shardings.tokens)
    with named_device(case.machine, mesh):
        return step.trace(state, tokens)


def named_device(machine: Machine, mesh: Mesh):
    """Kernels for GPUs ask the default device which one they are lowered for."""
    if machine.platform == "cuda":
        return jax.default_device(mesh.devices.flat[0])
    return contextlib.nullcontext()


def _operator(case: ScaleCase, mesh: Mesh) -> BlockSparseAttention:
    settings: dict[str, Any] = {
        "mesh": mesh,
        "block_q": case.machine.block,
        "block_kv": case.machine.block,
        "implementation": case.machine.implementation,
    }
    if case.mesh.context > 1:
        return ContextParallel(exchange=case.exchange, **settings)
    return BlockSparseAttention(**settings)


def memory_of(compiled: Any, machine: Machine) -> dict[str, int | bool]:
    """What one device needs, and whether the chip has it."""
    said = compiled.memory_analysis()
    found = {
        "arguments": int(said.argument_size_in_bytes),
        "outputs": int(said.output_size_in_bytes),
        "shared_by_both": int(said.alias_size_in_bytes),
        "temporaries": int(said.temp_size_in_bytes),
        "program": int(said.generated_code_size_in_bytes),
        "peak": int(getattr(said, "peak_memory_in_bytes", 0)),
    }
    needed = (
        found["arguments"] + found["outputs"] - found["shared_by_both"]
        + found["temporaries"] + found["program"]
    )  # fmt: skip
    limit = machine.memory_bytes
    return found | {"needed": needed, "limit": limit, "fits": needed <= limit}


def _cost(compiled: Any) -> dict[str, float]:
    said = compiled.cost_analysis() or {}
    keys = {"flops": "flops", "bytes accessed": "bytes"}
    return {name: float(said[key]) for key, name in keys.items() if key in said}


def record(case: ScaleCase, outcome: dict[str, Any], command: str) -> dict[str, Any]:
    """An outcome with its case and circumstances, as it is kept."""
    here = environment(checkout_root())
    return {
        "case": case.model_dump(mode="json") | {"name": case.name},
        **outcome,
        "notes": NOTES,
        "command": command,
        "made_at": here.utc,
        "commit": here.commit,
        "dirty": here.dirty,
        "source": source_digest(),
        "versions": here.versions | installed_versions(COMPILERS),
        "host": {"processor": here.cpu, "cores": here.cores, "load_average": here.load_average},
    }


def write(document: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Keep an outcome in a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['case']['name']}.json"
    atomic_write(path, json.dumps(document, indent=1) + "\n")
    return path
