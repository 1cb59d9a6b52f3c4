"""Copies of the golden checkpoints, to be changed: their config, their tensors, their files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
ABSENT = object()

Tensors = dict[str, np.ndarray]


def config_of(name: str, file: str = "config.json") -> dict:
    return json.loads((GOLDEN / name / file).read_text())


def tensors_of(folder: Path) -> Tensors:
    return {
        name: tensor
        for file in sorted(folder.glob("model*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def copied(name: str, folder: Path, **changes) -> Path:
    """A golden checkpoint in `folder`, some keys of its config changed or `ABSENT`."""
    made = folder / name
    shutil.copytree(GOLDEN / name, made, ignore=shutil.ignore_patterns("golden.*", "config_v4*"))
    values = config_of(name) | changes
    kept = {key: value for key, value in values.items() if value is not ABSENT}
    (made / "config.json").write_text(json.dumps(kept))
    return made


def rewritten(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The same checkpoint with other tensors, all in one file."""
    tensors = change(tensors_of(folder))
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weights_of(model) -> dict:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(path): variable.get_value() for path, variable in state}


def assert_same_weights(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
