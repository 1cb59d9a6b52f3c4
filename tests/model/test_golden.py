"""Logits of checkpoints that Hugging Face transformers made, against its own."""

import functools
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests.model.checkpoints import GOLDEN, NAMES
from xsake.model.huggingface import load

OLDER = sorted(path.parent.name for path in GOLDEN.glob("*/config_v4.json"))
# The promise is 2e-4; twice the worst that was seen, and 30 times below the least mistake.
LIMIT = 4e-5


@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
def _logits(graph, state, tokens):
    return nnx.merge(graph, state)(tokens)


def difference(folder, golden) -> float:
    expected = load_file(golden / "golden.safetensors")
    found = _logits(*nnx.split(load(folder).model), expected["tokens"])
    assert found.dtype == np.float32
    return float(np.abs(found - expected["logits"]).max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, tmp_path):
    assert difference(GOLDEN / name, GOLDEN / name) < LIMIT
    if name in OLDER:
        older = shutil.copytree(GOLDEN / name, tmp_path / name)
        shutil.copy(older / "config_v4.json", older / "config.json")
        assert difference(older, GOLDEN / name) < LIMIT
