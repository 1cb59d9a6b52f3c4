"""The optimizer: what decays, how fast it moves, and that it is AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.test_config import config
from tests.training.test_guard import drawn_state
from xsake.errors import ArgumentError
from xsake.training.optimizer import (
    make_decay_mask,
    make_optimizer,
    make_schedule,
)
from xsake.training.sections import OptimizerSection
from xsake.training.state import build_optimizer, define_model, flat_parameters

NAMES = {"embedding": ("vocab", "embed"), "head": ("embed", "vocab"), "norm.weight": ("embed",)}


def section(**changes) -> OptimizerSection:
    return OptimizerSection.model_validate({"peak_learning_rate": 0.5} | changes)


def test_norms_biases_and_embeddings_do_not_decay():
    run = config('model.preset="gpt2"', "model.decoder={layers = 2, is_tied = false}")
    found = make_decay_mask(run.optimizer, define_model(run).names)
    matrices = {
        "head", "layers.attention.query", "layers.attention.key", "layers.attention.value",
        "layers.attention.out", "layers.mlp.up", "layers.mlp.down",
    }  # fmt: skip
    assert {path for path, decays in found.items() if decays} == matrices
    assert {"embedding", "positions", "final_norm.bias", "layers.attention.query_bias"} < set(found)


def test_what_decays_is_configured_by_kinds_paths_and_axes():
    kinds = make_decay_mask(section(no_decay=["norms"]), NAMES)
    assert kinds == {"embedding": True, "head": True, "norm.weight": False}
    paths = make_decay_mask(section(no_decay=[], no_decay_paths=["emb*"]), NAMES)
    assert paths == {"embedding": False, "head": True, "norm.weight": True}
    axes = make_decay_mask(section(no_decay=[], no_decay_axes=["vocab"]), NAMES)
    assert axes == {"embedding": False, "head": False, "norm.weight": True}
    with pytest.raises(ArgumentError, match=r"matches no parameter[\s\S]*'hed'[\s\S]*head"):
        make_decay_mask(section(no_decay_paths=["hed"]), NAMES)


def test_decay_alone_shrinks_what_decays_and_nothing_else():
    run = config("optimizer.weight_decay=0.5", "optimizer.warmup_steps=0")
    state, optimizer = drawn_state(run), build_optimizer(run, define_model(run))
    still = jax.tree.map(jnp.zeros_like, state.parameters)
    changes, _ = optimizer.transform.update(still, state.optimizer, state.parameters)
    rate = float(optimizer.learning_rate(0))
    before, after = flat_parameters(state.parameters), flat_parameters(changes)
    for path, decays in make_decay_mask(run.optimizer, define_model(run).names).items():
        expected = -rate * 0.5 * before[path] if decays else np.zeros_like(before[path])
        np.testing.assert_allclose(after[path], expected, rtol=1e-6)


@given(
    warmup=st.integers(0, 20),
    rest=st.integers(1, 50),
    share=st.floats(0, 1),
    peak=st.floats(0.1, 9),
)  # fmt: skip
def test_the_rate_rises_to_its_peak_and_falls_to_its_share(warmup, rest, share, peak):
    chosen = section(warmup_steps=warmup, end_lr_ratio=share, peak_learning_rate=peak)
    total = warmup + rest
    # One length for all, since every other one would be compiled anew.
    found = np.asarray(make_schedule(chosen, total)(jnp.arange(73)))
    assert found.dtype == np.float32 and np.isfinite(found).all()
    rising = peak * np.arange(1, warmup + 1) / max(warmup, 1)
    part = np.arange(1, rest + 1) / rest
    falling = peak * (share + (1 - share) * (1 + np.cos(np.pi * part)) / 2)
    end = np.full(73 - total, peak * share)
    expected = np.concatenate([rising, falling, end])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * peak)


def test_it_is_adamw_with_clipped_gradients():
    rng = np.random.default_rng(0)
    draw = lambda: {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in (("embedding", (5, 3)), ("head", (3, 5)))
    }
    chosen = section(clip_norm=0.3, weight_decay=0.2, beta1=0.8, beta2=0.9, epsilon=1e-6)
    names = {name: NAMES[name] for name in ("embedding", "head")}
    optimizer, parameters = make_optimizer(chosen, names, total_steps=10), draw()
    reference = optax.chain(
        optax.clip_by_global_norm(0.3),
        optax.adamw(
            lambda count: 0.5 * (0.1 + 0.9 * (1 + jnp.cos(jnp.pi * (count + 1) / 10)) / 2),
            0.8, 0.9, 1e-6, weight_decay=0.2, mask={"embedding": False, "head": True},
        ),
    )  # fmt: skip
    gradients = [draw() for _ in range(3)]

    def train(transform):
        weights, state = parameters, transform.init(parameters)
        for each in gradients:
            changes, state = transform.update(each, state, weights)
            weights = optax.apply_updates(weights, changes)
        return weights, state

    (found, state), (expected, _) = train(optimizer.transform), train(reference)
    assert int(optimizer.updates(state)) == 3
    for name, weights in expected.items():
        assert np.abs(weights - parameters[name]).max() > 0.1
        np.testing.assert_allclose(found[name], weights, rtol=2e-5, atol=1e-5)


def test_gradients_are_not_clipped_at_0():
    free = make_optimizer(section(clip_norm=0.0), {"head": NAMES["head"]}, total_steps=10)
    assert isinstance(free.transform.init({"head": jnp.ones((3, 5))})[0], optax.EmptyState)
    big = {"head": jnp.full((3, 5), 1e6)}
    _, state = free.transform.update(big, free.transform.init(big), big)
    assert float(state[1].mu["head"][0, 0]) == pytest.approx(1e5)
