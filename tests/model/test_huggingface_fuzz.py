"""Checkpoints damaged at random: read or refused, but nothing else ever happens."""

import json

import hypothesis
import hypothesis.strategies as st

from tests.malformed import damaged
from tests.model.checkpoints import NAMES, config_of, copied
from xsake.errors import XsakeError
from xsake.model.config import DecoderConfig
from xsake.model.huggingface.configs import read_config
from xsake.model.huggingface.files import CheckpointFolder, parse_object

configs = st.sampled_from(NAMES).flatmap(
    lambda name: damaged(config_of(name), ("rope_scaling", "rope_theta", "text_config"))
)


@hypothesis.settings(max_examples=300, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(configs)
def test_a_malformed_config_is_read_or_refused_but_never_crashes(values):
    try:
        text = json.dumps(values).encode()
        description = read_config(parse_object(text, "config.json", max_bytes=2**20))
    except XsakeError as error:
        assert error.fix and "\ud800" not in str(error)
    else:
        assert isinstance(description.config, DecoderConfig)


@hypothesis.settings(max_examples=100, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data())
def test_damaged_weights_are_read_or_refused_but_never_crash(data, tmp_path_factory):
    folder = copied("llama", tmp_path_factory.mktemp("damaged"))
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # The header is where damage can mislead.
        content[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    path.write_bytes(
        content[: data.draw(st.sampled_from([len(content), 9, 700, len(content) - 1]))]
    )
    try:
        for tensor in CheckpointFolder(folder.resolve()).list_tensors().values():
            assert len(tensor.read_bytes()) == tensor.size
    except XsakeError as error:
        assert error.fix
