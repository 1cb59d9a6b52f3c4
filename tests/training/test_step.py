"""The step: it learns, gives the same bits again, and cuts its work without changing it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import processes
from tests.lanes import slow
from tests.training.test_config import config
from xsake import BlockSparseAttention
from xsake.model import Decoder, DecoderConfig, DenseAttention
from xsake.sharding import named_sharding
from xsake.training.optimizer import make_schedule
from xsake.training.state import (
    Shardings,
    abstract_state,
    build_optimizer,
    define_model,
    digest,
    init_state,
    state_shardings,
    step_key,
)
from xsake.training.step import make_loss, make_step, next_token_loss

SHORT = ("data.context=32", "model.loss_chunk_size=16")
RUN = config(*SHORT)
TOKENS = (np.arange(33)[None] * np.arange(1, 9)[:, None] % 90).astype(np.int32)


def compiled(run):
    definition = define_model(run)
    return make_step(run, definition, build_optimizer(run, definition), DenseAttention())


@pytest.fixture(scope="module")
def step():
    return compiled(RUN)


@pytest.fixture(scope="module")
def in_parts():
    return compiled(config(*SHORT, "optimizer.grad_accum_steps=4"))


@pytest.fixture(scope="module")
def first():
    return init_state(RUN)


@pytest.fixture
def state(first):
    return jax.tree.map(jnp.copy, first)


def trained(step, state, steps: int):
    told = []
    for _ in range(steps):
        state, metrics = step(state, TOKENS)
        told.append(metrics)
    return state, told


def test_the_loss_falls_and_every_number_is_told(step, state):
    given = jax.tree.leaves(state)
    state, told = trained(step, state, 30)
    assert all(leaf.is_deleted() for leaf in given)  # a step uses its state up
    losses = np.array([metrics.loss for metrics in told])
    assert np.isfinite(losses).all() and abs(losses[0] - np.log(96)) < 1
    assert losses[-1] < 0.1 * losses[0]
    rate = make_schedule(RUN.optimizer, 100)
    for count, metrics in enumerate(told):
        assert float(metrics.learning_rate) == pytest.approx(float(rate(count)), rel=1e-6)
        assert int(metrics.tokens) == 8 * 32 and not bool(metrics.is_skipped)
        assert np.isfinite(metrics.gradient_norm) and metrics.gradient_norm > 0
    assert int(state.step) == int(state.guard.accepted) == 30
    assert step._cache_size() == 1


def test_runs_give_the_same_bits_with_and_without_a_stop(step, state):
    other = jax.tree.map(jnp.copy, state)
    found = digest(trained(step, state, 4)[0])
    half = jax.device_get(trained(step, other, 2)[0])
    assert digest(trained(step, jax.tree.map(jnp.asarray, half), 2)[0]) == found
    assert digest(trained(step, init_state(RUN), 4)[0]) == found
    assert digest(trained(step, init_state(config(*SHORT, "run.seed=1")), 4)[0]) != found


@pytest.mark.parametrize("padded", [20, slow(0)])
def test_microbatches_are_one_large_batch(step, in_parts, state, padded):
    tokens = np.array(TOKENS)
    tokens[0, 33 - padded :] = -1  # one microbatch has fewer tokens than the others
    other = jax.tree.map(jnp.copy, state)
    (one, told), (four, told_in_parts) = step(state, tokens), in_parts(other, tokens)
    assert int(told.tokens) == int(told_in_parts.tokens) == 256 - padded
    for name in ("loss", "gradient_norm"):
        ours, theirs = float(getattr(told, name)), float(getattr(told_in_parts, name))
        assert np.isfinite(ours) and abs(ours - theirs) < 1e-6 * max(1, ours)
    first_moments = zip(*(jax.tree.leaves(x.optimizer[1].mu) for x in (one, four)), strict=True)
    for ours, theirs in first_moments:  # a tenth of the clipped gradients
        assert np.isfinite(ours).all() and np.abs(ours - theirs).max() < 1e-6
    assert int(four.optimizer[1].count) == 1


@pytest.mark.slow  # quicker: the other numbers of microbatches and chunks
def test_bfloat16_keeps_float32_weights_and_stays_finite(step, state):
    run = config(*SHORT, 'model.compute_dtype="bfloat16"', "model.remat=true")
    low = compiled(run)
    assert "bf16" in low.lower(state, TOKENS).as_text()
    _, exact = trained(step, jax.tree.map(jnp.copy, state), 12)
    state, told = trained(low, state, 12)
    leaves = jax.tree.leaves((state.parameters, state.optimizer[1].mu, state.optimizer[1].nu))
    assert all(leaf.dtype == jnp.float32 and np.isfinite(leaf).all() for leaf in leaves)
    losses, expected = (np.array([metrics.loss for metrics in x]) for x in (told, exact))
    assert np.isfinite(losses).all() and losses[-1] < 0.5 * losses[0]
    assert np.abs(losses[0] - expected[0]) < 0.02 and np.abs(losses - expected).max() < 0.2


@pytest.mark.parametrize("at_once", [5, 32, slow(1), slow(16), slow(100)])
def test_chunks_of_positions_change_no_loss(at_once):
    model = Decoder(DecoderConfig.tiny(layers=1, logit_softcap=5.0), rngs=nnx.Rngs(0))
    hidden = jax.random.normal(jax.random.key(1), (2, 32, 48))
    targets = jnp.asarray(TOKENS[:2, 1:]).at[1, 20:].set(-1)

    def plain(hidden):
        log_p = jax.nn.log_softmax(model.logits(hidden))
        found = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return -jnp.where(targets >= 0, found, 0).sum()

    chunked = lambda hidden: next_token_loss(model, hidden, targets, at_once)
    (loss, count), slope = jax.value_and_grad(chunked, has_aux=True)(hidden)
    expected, expected_slope = jax.value_and_grad(plain)(hidden)
    assert int(count) == 32 + 20 and np.isfinite(loss)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(slope, expected_slope, atol=1e-5)


def test_logits_never_exist_whole():
    run = config(*SHORT, "model.decoder.vocab_size=97")  # no other axis is so long
    loss_of = make_loss(run, define_model(run), DenseAttention())
    traced = jax.make_jaxpr(jax.grad(lambda p, x: loss_of(p, x)[0]))
    shapes = set(_shapes(traced(abstract_state(run).parameters, TOKENS).jaxpr))
    with_vocabulary = {shape for shape in shapes if 97 in shape}
    assert (8, 16, 97) in with_vocabulary
    assert max(map(np.prod, with_vocabulary)) == 8 * 16 * 97


def _shapes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (tuple(getattr(x.aval, "shape", ())) for x in equation.outvars)
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _shapes(inner)


def test_every_step_has_a_key_of_its_own(state):
    later = dataclasses.replace(state, step=state.step + 1)
    draws = [float(jax.random.uniform(step_key(x))) for x in (state, state, later)]
    assert draws[0] == draws[1] != draws[2]


def test_a_digest_tells_bits_types_shapes_and_names_apart():
    one = {"a": np.zeros((2, 3), np.float32)}
    others = [
        {"b": one["a"]}, {"a": -one["a"]}, {"a": one["a"].T}, {"a": one["a"].view(np.int32)},
        {"a": one["a"], "b": one["a"]},
    ]  # fmt: skip
    assert digest(one) == digest({"a": jnp.zeros((2, 3))})
    assert len({digest(x) for x in [one, *others]}) == 6


def step_on_eight_devices(expected) -> None:
    """Check losses and norms of three steps on a mesh, in a process of its own."""
    mesh_sizes = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    run = config(*SHORT, *mesh_sizes, "optimizer.grad_accum_steps=2")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    axes = ("vocab", "q_heads", "kv_heads", "mlp")
    rules = {"embed": "fsdp", **dict.fromkeys(axes, "tensor")}
    place = lambda path, names, shape: named_sharding(path, names, shape, mesh, rules)
    shardings = Shardings(
        state_shardings(run, place, NamedSharding(mesh, P())),
        NamedSharding(mesh, P(("data", "fsdp"))),
    )
    state = jax.jit(lambda: init_state(run), out_shardings=shardings.state)()
    definition = define_model(run)
    attend = DenseAttention(BlockSparseAttention(mesh=mesh))
    step = make_step(run, definition, build_optimizer(run, definition), attend, shardings)
    losses = []
    for _ in range(3):
        state, metrics = step(state, jax.device_put(TOKENS, shardings.tokens))
        losses.append([float(metrics.loss), float(metrics.gradient_norm)])
    assert np.isfinite(losses).all() and step._cache_size() == 1
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    up, moment = state.parameters["layers"]["mlp"]["up"], state.optimizer[1].mu["embedding"]
    assert (up.shape, up.addressable_shards[0].data.shape) == ((2, 48, 64), (2, 24, 32))
    assert (moment.shape, moment.addressable_shards[0].data.shape) == ((96, 48), (48, 24))


def test_a_step_on_eight_devices_is_the_step_on_one(step, state):
    _, told = trained(step, state, 3)
    expected = [[float(metrics.loss), float(metrics.gradient_norm)] for metrics in told]
    processes.run(step_on_eight_devices, expected, devices=8)
