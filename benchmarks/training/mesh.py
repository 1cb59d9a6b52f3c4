"""The same run on one device and on meshes of eight simulated ones, and balanced heads counted.

python -m benchmarks.training.mesh

Devices are simulated: the rows say that losses agree and how many blocks each shard computes, and
nothing about time. Rows go to results/training/mesh.jsonl.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.training.openwebtext import RESULTS, build_corpus
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.hads import Profile
from xsake.model.observer import Observer
from xsake.observability import read_metrics
from xsake.training.attention import choose_placement, make_attention, to_kv_order
from xsake.training.config import TrainingConfig
from xsake.training.state import DeviceSetup, define_model, reorder_heads
from xsake.training.train import recalibrate, train

STEPS, CONTEXT, BLOCK = 20, 512, 16
DECODER = {"vocab_size": 8192, "context": CONTEXT}
BALANCED_HEADS = (32, 8)  # the runs take the plan of the last
ATTENTION = {
    "dense": {},
    "mask": {"kind": "mask", "mask": "window(63, 0) | sinks(16)"},
    "plan": {"kind": "plan", "budget": 0.6, "block": BLOCK, "profile": "profile.json"},
    "native_sparse": {"kind": "native_sparse"},
}
NATIVE = {"length": 16, "stride": 8, "size": BLOCK, "count": 6, "window": 64}
MESHES = (
    {"data": 8},
    {"fsdp": 8},
    {"data": 2, "tensor": 4},
    {"data": 2, "tensor": 2, "context": 2},
    {"fsdp": 2, "context": 4},
)


def main() -> None:
    """Train every kind of attention on every mesh and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of tokens, made if absent")
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    build_corpus(asked.data)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kv_heads in BALANCED_HEADS:
            rows += _balance(_config(asked.data, folder, "dense", {}, kv_heads), folder)
        for attention in ATTENTION:
            alone = _losses(_config(asked.data, folder, attention, {}))
            for mesh in MESHES:
                if attention == "native_sparse" and "context" in mesh:
                    continue  # it keeps the tokens of a sequence together
                losses = _losses(_config(asked.data, folder, attention, mesh))
                apart = float(np.abs(losses / alone - 1).max())
                rows.append({
                    "attention": attention, "mesh": mesh, "steps": STEPS,
                    "first_loss": float(losses[0]), "last_loss": float(losses[-1]),
                    "largest_relative_difference": apart,
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
                _write(rows)


def _write(rows: list[dict[str, Any]]) -> None:
    head = {"environment": dataclasses.asdict(environment(checkout_root()))}
    RESULTS.mkdir(parents=True, exist_ok=True)
    atomic_write(RESULTS / "mesh.jsonl", "".join(json.dumps(row) + "\n" for row in [head, *rows]))


def _config(
    data: Path, folder: Path, attention: str, mesh: dict[str, int], kv_heads: int = 8
) -> TrainingConfig:
    section = dict(ATTENTION[attention])
    if "profile" in section:
        section["profile"] = str(folder / section["profile"])
    name = "-".join([attention, *(f"{axis}{size}" for axis, size in mesh.items())])
    decoder = DECODER | {"q_heads": kv_heads, "kv_heads": kv_heads}
    decoder |= {"native_sparse": NATIVE} if attention == "native_sparse" else {}
    return TrainingConfig.from_dict({
        "model": {"preset": "tiny", "compute_dtype": "float32", "decoder": decoder},
        "data": {"folder": str(data), "context": CONTEXT, "batch": 8},
        "optimizer": {"peak_learning_rate": 1e-3, "warmup_steps": 2},
        "attention": section,
        "mesh": mesh,
        "checkpoint": {"folder": str(folder / name), "save_interval": 0},
        "run": {"steps": STEPS, "log_interval": 0},
    })  # fmt: skip


def _losses(config: TrainingConfig) -> np.ndarray:
    train(config)
    lines = read_metrics(config.checkpoint.folder / "metrics.jsonl")
    found = np.array([line["loss"] for line in lines])
    assert len(found) == STEPS and np.isfinite(found).all(), found
    return found


def _balance(config: TrainingConfig, folder: Path) -> list[dict[str, Any]]:
    """Blocks of each tensor shard with a plan of unequal heads, foretold and counted.

    The first weights of a model look at everything alike, so the heads of their profile are made
    unequal: what each would lose is multiplied by 1/16 to 16, drawn for every head.
    """
    section = TrainingConfig.from_dict(config.model_dump() | {
        "attention": {"kind": "plan", "budget": 0.6, "block": BLOCK}
    }).attention  # fmt: skip
    devices = DeviceSetup.from_config(config)
    state = devices.init_state(config)
    found = recalibrate(config.model_copy(update={"attention": section}), devices, state)
    drawn = 16.0 ** np.random.default_rng(0).uniform(-1, 1, found.entropy.shape)
    curves = {name: curve * drawn[..., None] for name, curve in found.curves.items()}
    profile: Profile = found.model_copy(update={"curves": curves})
    profile.save(folder / "profile.json")
    definition, rows = define_model(config), []
    tokens = np.random.default_rng(1).integers(0, DECODER["vocab_size"], (2, CONTEXT))
    for shards in (2, 4):
        attention = make_attention(section, config.model.decoder, profile=profile)
        placement = choose_placement(attention, shards=shards)
        assert placement is not None
        order = to_kv_order(placement)
        placed = make_attention(section, config.model.decoder, profile=profile, kv_order=order)
        moved = reorder_heads(order, state.parameters, definition.names)
        counted = {
            "given": _counted(attention, definition.merge(state.parameters), tokens, shards),
            "balanced": _counted(placed, definition.merge(moved), tokens, shards),
        }
        assert (counted["given"] == placement.before).all()
        assert (counted["balanced"] == placement.after).all()
        rows.append({
            "tensor_shards": shards, "kv_heads": config.model.decoder.kv_heads,
            "budget": section.budget,
            **{
                f"{name}_busiest_over_mean": round(float((x.max(1) / x.mean(1)).max()), 4)
                for name, x in counted.items()
            },
            "foretold_excess_given": round(placement.excess_before, 4),
            "foretold_excess_balanced": round(placement.excess_after, 4),
            **{f"{name}_blocks": x.tolist() for name, x in counted.items()},
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _counted(attention, model, tokens: np.ndarray, shards: int) -> np.ndarray:
    """Blocks that shards list in each layer, mean over sequences, while the model reads: [L, S]."""
    attend = attention.attends[-1]
    lengths = lambda q, k, v, call: jnp.diff(attend.planned.layout(q, k, call).row_starts)
    found = np.asarray(Observer(model, attend=attend)(jnp.asarray(tokens), lengths))
    return found.reshape(len(found), len(tokens), shards, -1).sum((1, 3)) / len(tokens)


if __name__ == "__main__":
    main()
