"""Observers: one layer on the device at a time gives the results of the whole model."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from tests import processes
from tests.hads.sample import documents, model
from xsake import hads
from xsake.model import Decoder, DecoderConfig, LayerKind, Rope
from xsake.model.observer import Observer, StreamingObserver

KINDS = LayerKind(window=24, rope=Rope()), LayerKind(rope=Rope(base=1e6))
CONFIGS = {
    "llama": DecoderConfig.tiny(),
    "two kinds": DecoderConfig.tiny(kinds=KINDS, kind_of_layer=(0, 1, 0)),
    "learned positions": DecoderConfig.tiny(
        kinds=(LayerKind(),), has_learned_positions=True, is_tied=False, norm="layer"
    ),
}
SETTINGS = hads.CalibrationSettings(
    block=8, selectors=(hads.make_selector("sampled"),), effect_documents=2, copied_documents=1
)


def profile_of(observe, config: DecoderConfig) -> hads.Profile:
    sizes = model(config.layers, config.q_heads, config.kv_heads)
    return hads.calibrate(observe, sizes, documents(3, 64, vocabulary=96), SETTINGS)


def compare_profiles(name: str, mesh: Mesh | None) -> None:
    config = CONFIGS[name]
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    found = profile_of(StreamingObserver(decoder, mesh=mesh), config)
    expected = profile_of(Observer(decoder), config)
    for field in ("entropy", "outside", "offset_mass", "column_mass"):
        np.testing.assert_allclose(
            getattr(found, field), getattr(expected, field), rtol=1e-4, atol=1e-6
        )
    effects = found.effects["sampled"], expected.effects["sampled"]
    assert effects[1].max() > 1e-3
    np.testing.assert_allclose(*effects, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("name", ["two kinds", "learned positions"])
def test_one_layer_at_a_time_measures_the_same(name):
    compare_profiles(name, None)


def compare_on_two_devices() -> None:
    assert len(jax.devices()) == 2
    compare_profiles("llama", Mesh(jax.devices(), ("tensor",)))


def test_two_devices_that_share_a_layer_measure_the_same():
    processes.run(compare_on_two_devices, devices=2)


def test_the_device_holds_one_layer_and_the_next(monkeypatch):
    config = DecoderConfig.tiny(layers=12, width=128, vocab_size=64)
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    layer = sum(x.nbytes for x in jax.tree.leaves(nnx.split(decoder.layers)[1])) // 12
    observe = StreamingObserver(decoder)
    del decoder
    live = lambda: gc.collect() + sum(x.nbytes for x in jax.live_arrays())
    before, seen, fetch = live(), [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: (seen.append(live() - before), fetch(x))[1])
    observe(jnp.zeros((1, 16), jnp.int32), lambda q, k, v, call: q.mean())
    assert len(seen) == 12 and layer < max(seen) < 4 * layer
