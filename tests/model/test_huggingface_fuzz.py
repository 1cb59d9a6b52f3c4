"""Checkpoints damaged at random: read or refused, but nothing else ever happens."""

import json

import hypothesis
import hypothesis.strategies as st

from tests.model.checkpoints import NAMES, config_of, copied
from xsake.errors import XsakeError
from xsake.model.config import DecoderConfig
from xsake.model.huggingface.configs import read_config
from xsake.model.huggingface.files import CheckpointFolder, parse_object

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**31, 2**64, 10**400, 1e-308, 1e300, -0.0, "", "\ud800", "silu"])
    | st.floats(allow_nan=True)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def malformed(draw) -> dict:
    """A golden config of which a few keys, nested ones too, are deleted or hold something else."""
    values = config_of(draw(st.sampled_from(NAMES)))
    for _ in range(draw(st.integers(1, 4))):
        place = values
        key = draw(st.sampled_from(sorted({*values, "rope_scaling", "rope_theta", "text_config"})))
        while isinstance(place.get(key), dict) and place[key] and draw(st.booleans()):
            place, key = place[key], draw(st.sampled_from(sorted(place[key])))
        if draw(st.integers(0, 3)):
            place[key] = draw(JUNK)
        else:
            place.pop(key, None)
    return values


@hypothesis.settings(max_examples=300, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(malformed())
def test_a_malformed_config_is_read_or_refused_but_never_crashes(values):
    try:
        told = read_config(
            parse_object(json.dumps(values).encode(), "config.json", max_bytes=2**20)
        )
    except XsakeError as error:
        assert error.fix and "\ud800" not in str(error)
    else:
        assert isinstance(told.config, DecoderConfig)


@hypothesis.settings(max_examples=100, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data())
def test_damaged_weights_are_read_or_refused_but_never_crash(data, tmp_path_factory):
    folder = copied("llama", tmp_path_factory.mktemp("damaged"))
    path = folder / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # The header is where damage can mislead.
        damaged[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    path.write_bytes(
        damaged[: data.draw(st.sampled_from([len(damaged), 9, 700, len(damaged) - 1]))]
    )
    try:
        with CheckpointFolder(folder.resolve()).open_tensors() as tensors:
            for tensor in tensors.values():
                assert tensor.read().shape == tensor.shape
    except XsakeError as error:
        assert error.fix
