"""Compiles the calibration of an 8B model, one layer at a time, without a chip.

python -m benchmarks.scale.calibration --target v5e-1

Needs libtpu or the CUDA plugin in addition to jax. One target is one process.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

# Before jax starts: no device is touched, and libtpu does not lock the machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.scale.cases import BLOCK, CONTEXT, LLAMA_8B, Machine
from benchmarks.scale.compiling import (
    COMPILERS,
    NOTES,
    memory_of,
    named_device,
    topology_devices,
)
from benchmarks.scale.page import CALIBRATION
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment, installed_versions, source_digest
from xsake.hads.budget import ForcedBlocks
from xsake.hads.hooks import make_mass_hook
from xsake.hads.selectors import Sampled
from xsake.hads.sensitivity import make_effect_hook
from xsake.layout.grid import count_blocks
from xsake.model import Decoder
from xsake.model.observer import StreamingObserver, weight_shardings

PLAN_BLOCK = 64
TARGETS = {
    "v5e-1": (Machine("tpu", "v5e", "v5e:2x4", "mosaic_tpu", BLOCK), 1),
    "v5e-8": (Machine("tpu", "v5e", "v5e:2x4", "mosaic_tpu", BLOCK), 8),
    "h100-1": (Machine("cuda", "sm_90a", "1x1x1", "mosaic_gpu_hopper", 128), 1),
}
"""By name: how the compiler knows the chips, and how many of them share a layer."""


class Programs:
    """Programs of a streamed calibration in bfloat16, with their abstract arguments.

    Args:
        machine: that they are compiled for.
        chips: that share a layer.
    """

    def __init__(self, machine: Machine, chips: int):
        self.machine, config = machine, LLAMA_8B
        self.mesh = Mesh(np.asarray(topology_devices(machine))[:chips], ("tensor",))
        make = lambda: Decoder(
            config, rngs=nnx.Rngs(0), compute_dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
        )
        graph, shapes = nnx.split(nnx.eval_shape(make))
        # No memory: all elements are the same one.
        weights = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), shapes)
        self.observer = StreamingObserver(
            nnx.merge(graph, weights), mesh=self.mesh, implementation=machine.implementation
        )
        selectors = (Sampled(),)
        components = np.tile(np.arange(config.head_dim), (config.layers, config.kv_heads, 1))
        corrections = {"sampled": np.ones((config.layers, config.q_heads, 3))}
        self.watch = make_mass_hook(PLAN_BLOCK, selectors, components)
        self.tap = make_effect_hook(selectors, corrections, components, PLAN_BLOCK, ForcedBlocks())

    def named(self) -> dict[str, tuple[Callable, tuple[Any, ...]]]:
        """Return each function and its arguments; the layer's number is traced."""
        config, observer = LLAMA_8B, self.observer
        x = self._array((1, CONTEXT, config.width), jnp.bfloat16)
        number = self._array((), jnp.int32)
        levels = count_blocks(CONTEXT, PLAN_BLOCK) + 1
        zeros = {"sampled": self._array((config.layers, 1, config.q_heads, levels), jnp.float32)}
        layer, ends = self._placed(observer.layer_weights(0)), self._placed(observer.end_weights)
        masses = lambda weights, x, number: observer.run_layer(self.watch, weights, x, number, 0)
        effects = lambda weights, x, grad, number, zeros: observer.layer_gradient(
            self.tap, weights, x, grad, number, 0, zeros
        )
        seeds = self._array((1,), jnp.int32)
        return {
            "masses of a layer": (masses, (layer, x, number)),
            "effects of a layer": (effects, (layer, x, x, number, zeros)),
            "gradient of the end": (observer.end_gradient, (ends, x, seeds)),
        }

    def _array(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    def _placed(self, variables: nnx.State) -> nnx.State:
        shardings = weight_shardings(variables, self.mesh)
        place = lambda sharding, variable: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), variable
        )
        return jax.tree.map(place, shardings, variables)


def compiled(programs: Programs, run: Callable, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Compile one program; a refusal is an outcome too."""
    with named_device(programs.machine, programs.mesh):
        lowered = (
            jax.jit(run).trace(*arguments).lower(lowering_platforms=(programs.machine.platform,))
        )
    try:
        built = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return {"verdict": "refused", "message": str(error)[:2000]}
    return {"verdict": "compiled", "memory": memory_of(built, programs.machine)}


def main() -> None:
    """Compile the programs of one target and keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="v5e-1", choices=tuple(TARGETS))
    given = parser.parse_args()
    machine, chips = TARGETS[given.target]
    programs = Programs(machine, chips)
    outcomes = {}
    for name, (run, arguments) in programs.named().items():
        outcomes[name] = compiled(programs, run, arguments)
        print(name, outcomes[name], flush=True)
    here = environment(checkout_root())
    document = {
        "target": given.target, "chips": chips, "context": CONTEXT, "block": PLAN_BLOCK,
        "model": LLAMA_8B.model_dump(mode="json"), "dtype": "bfloat16", "programs": outcomes,
        "notes": {"memory": NOTES["memory"]},
        "command": shlex.join(["python", "-m", "benchmarks.scale.calibration", *sys.argv[1:]]),
        **here.fields("utc", "commit", "dirty"), "source": source_digest(),
        "versions": here.versions | installed_versions(COMPILERS),
    }  # fmt: skip
    CALIBRATION.mkdir(parents=True, exist_ok=True)
    atomic_write(CALIBRATION / f"{given.target}.json", json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
