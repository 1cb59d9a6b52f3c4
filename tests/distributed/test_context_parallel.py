"""Context parallelism on simulated devices: the results and gradients of one device, everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import xsake
from tests.distributed.devices import run_in_two_processes, run_on_eight_devices
from xsake.distributed import ContextParallel, MeshShape, make_mesh
from xsake.errors import ArgumentError, UnsupportedError
from xsake.masks import Causal

ONE = make_mesh(MeshShape(), jax.devices()[:1])

CASES = """
    import dataclasses
    from jax.sharding import Mesh
    import xsake
    from xsake.distributed import ContextParallel, MeshShape, make_mesh
    from xsake.layout import BlockLayout
    from xsake.masks import Causal, Window

    T = 70  # 9 blocks of 8, the last one overhangs
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v, sinks = draw(2, T, 4, 8), draw(2, T, 2, 8), draw(2, T, 2, 6), draw(4)
    sizes = dict(q_tokens=T, kv_tokens=T, block_q=8, block_kv=8)
    budget = np.array([0.1, 0.9, 0.3, 0.6])[:, None, None]
    by_head = BlockLayout.from_block_mask(rng.random((4, 9, 9)) < budget, mask=Causal(), **sizes)
    by_batch = BlockLayout.from_block_mask(rng.random((2, 2, 9, 9)) < 0.4, **sizes)
    ids = jnp.asarray(np.repeat([[0, 1, -1], [0, 0, 2]], [30, 30, 10], axis=1), jnp.int32)
    later = jnp.arange(T) * 2 + 5
    quick = {"xla_backend_optimization_level": 0}  # compiles faster, means the same

    def results(operator, sinks, arguments):
        def loss(q, k, v, sinks):
            out, lse = operator(q, k, v, sinks=sinks, **arguments)
            some = jnp.where(jnp.isfinite(lse), lse, 0)
            return (out**2).sum() + jnp.sin(some).sum(), (out, lse)

        argnums = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
        run = jax.value_and_grad(loss, argnums=argnums, has_aux=True)
        return jax.jit(run, compiler_options=quick)(q, k, v, sinks)

    def compare(what, mesh, sinks=None, implementation="reference", blocks=(8, 8), **more):
        options = {name: more.pop(name) for name in ("exchange", "assignment") if name in more}
        plain = xsake.BlockSparseAttention(
            block_q=blocks[0], block_kv=blocks[1], implementation=implementation)
        settings = {x.name: getattr(plain, x.name) for x in dataclasses.fields(plain)}
        split = ContextParallel(**{**settings, "mesh": mesh, **options})
        expected = results(dataclasses.replace(plain, implementation="reference"), sinks, more)
        found = results(split, sinks, more)
        worst = 0.0
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            one, other = np.asarray(one), np.asarray(other)
            np.testing.assert_array_equal(one == -np.inf, other == -np.inf)
            one, other = (np.where(x == -np.inf, 0, x) for x in (one, other))
            assert np.isfinite(one).all(), what
            worst = max(worst, np.abs(one - other).max() / np.abs(other).max())
        assert worst <= 1e-5, (what, worst)
        print(f"{what}: {worst:.1e}", flush=True)

    cube = make_mesh(MeshShape(data=2, tensor=2, context=2))
    line = make_mesh(MeshShape(context=8))
    wide = make_mesh(MeshShape(fsdp=2, context=3), jax.devices()[:6])
    bare = Mesh(np.array(jax.devices()[:3]), ("context",))
"""

USUAL = """
    compare("2x2x2 causal gather", cube, sinks, mask=Causal(), softcap=5.0)
    compare("2x2x2 ragged heads ring", cube, sinks, exchange="ring", layout=by_head)
    compare("1x1x8 traced gather", line, layout=by_head.traced())
    compare("3 shards, no mask, ring", bare, exchange="ring", assignment="zigzag", blocks=(8, 16))

    attend = ContextParallel(mesh=line, block_q=8, block_kv=8, implementation="reference")
    x = jnp.asarray(rng.normal(size=(1, 128, 1, 4)), jnp.float32)
    attend(x, x, x, mask=Causal()).block_until_ready()
    poisoned = x.at[:, 100].set(jnp.nan)
    seen = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: seen.append(event) if "backend_compile" in event else None)
    clean = attend(x, x, x, mask=Causal())
    out = attend(x, poisoned, poisoned, mask=Causal())
    out.block_until_ready()
    assert seen == [], seen
    assert {shard.data.shape for shard in out.addressable_shards} == {(1, 16, 1, 4)}
    clean, out = np.asarray(clean), np.asarray(out)
    assert np.isfinite(clean).all() and np.isnan(out[:, 100:]).all()
    np.testing.assert_array_equal(out[:, :100], clean[:, :100])
    print("every case agrees, nothing is compiled twice, poison stays where it may be seen")
"""

MORE = """
    compare("1x1x8 causal ring", line, exchange="ring", mask=Causal())
    compare("fsdp 2 x 3 traced ring segments", wide, sinks, exchange="ring",
            layout=by_head.traced(), q_segment_ids=ids)
    xla = {"implementation": "xla"}
    for exchange in ("gather", "ring"):
        same = {"exchange": exchange}
        compare(f"xla causal {exchange}", cube, sinks, mask=Causal(), **xla, **same)
        compare(f"xla ragged {exchange}", line, layout=by_head, **xla, **same)
        compare(f"xla traced batch {exchange}", cube, layout=by_batch.traced(), **xla, **same)
        compare(f"static batch {exchange}", cube, layout=by_batch, **same)
        compare(f"positions {exchange}", wide, mask=Causal() & Window(60, 0), **same,
                q_positions=later, kv_positions=later, q_segment_ids=ids)
        compare(f"positions by batch {exchange}", cube, mask=Causal(), **same, assignment="zigzag",
                q_positions=jnp.stack([later, later[::-1]]), kv_positions=later)
        compare(f"zigzag {exchange}", line, layout=by_head.traced(), assignment="zigzag", **same)
        compare(f"blocks differ {exchange}", bare, mask=Causal(), blocks=(16, 8), **same)
    print("every case agrees")
"""


def test_results_and_gradients_are_those_of_one_device():
    print(run_on_eight_devices(CASES + USUAL, "nothing is compiled twice"))


@pytest.mark.slow
def test_results_and_gradients_are_those_of_one_device_in_every_combination():
    print(run_on_eight_devices(CASES + MORE, "every case agrees"))


PROGRAMS = """
    from flax import nnx
    from xsake.distributed import ContextParallel, MeshShape, batch_sharding, make_mesh
    from xsake.distributed import tree_shardings
    from xsake.layout import BlockLayout
    from xsake.masks import Causal
    from xsake.model import Decoder, DecoderConfig
    from xsake.model import DenseAttention

    quick = {"xla_backend_optimization_level": 0}
    line = make_mesh(MeshShape(context=8))
    x = jax.random.normal(jax.random.key(0), (1, 128, 1, 4))
    for exchange, wanted, unwanted in (
        ("gather", ("all-gather", "reduce-scatter"), ("collective-permute",)),
        ("ring", ("collective-permute", "all-to-all"), ("all-gather", "reduce-scatter")),
    ):
        attend = ContextParallel(
            mesh=line, exchange=exchange, block_q=8, block_kv=8, implementation="reference")
        loss = lambda q, k, v: (attend(q, k, v, mask=Causal()) ** 2).sum()
        spread = jax.device_put(x, batch_sharding(line, ("batch", "tokens")))
        run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        text = run.lower(spread, spread, spread).compile(quick).as_text()
        for name in wanted:
            assert name in text, (exchange, name)
        for name in unwanted:
            assert name not in text, (exchange, name)

    cube = make_mesh(MeshShape(data=2, tensor=2, context=2))
    config = DecoderConfig.tiny(layers=2, q_heads=4, kv_heads=2)
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0), remat=True))
    tokens = jax.random.randint(jax.random.key(1), (4, 65), 0, config.vocab_size)

    def loss(state, tokens, attend):
        logits = nnx.merge(graph, state)(tokens[:, :-1], attend=attend)
        return -jnp.take_along_axis(
            jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()

    def step(attend, state, tokens):
        run = lambda state, tokens: jax.value_and_grad(loss)(state, tokens, attend)
        return jax.jit(run, compiler_options=quick)(state, tokens)

    expected = step(DenseAttention(), state, tokens)
    split = ContextParallel(mesh=cube, exchange="ring", block_q=8, block_kv=8)
    spread = jax.device_put(state, tree_shardings(state, cube))
    found = step(DenseAttention(split), spread, jax.device_put(tokens, batch_sharding(cube)))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.isfinite(one).all()
        assert np.abs(one - other).max() <= 1e-5 * max(1.0, np.abs(other).max())
    print("the programs are as they should be")
"""


@pytest.mark.slow
def test_programs_move_what_they_should_and_a_decoder_trains_alike():
    run_on_eight_devices(PROGRAMS, "the programs are as they should be")


TWO_PROCESSES = """
    import sys
    jax.distributed.initialize(
        sys.argv[1], num_processes=2, process_id=int(sys.argv[2]), local_device_ids=range(4))
    import xsake
    from xsake.distributed import ContextParallel, MeshShape, batch_share, make_mesh
    from xsake.masks import Causal

    assert jax.device_count() == 8 and jax.process_count() == 2
    q = k = v = np.random.default_rng(0).normal(size=(2, 64, 2, 8)).astype(np.float32)
    loss = lambda attend, q, k, v: (attend(q, k, v, mask=Causal()) ** 2).sum()
    plain = xsake.BlockSparseAttention(implementation="reference")
    expected = jax.jit(jax.value_and_grad(lambda *x: loss(plain, *x), argnums=(0, 1, 2)))(q, k, v)
    for shape, share in ((MeshShape(data=2, context=4), jax.process_index()),
                         (MeshShape(context=8), 0)):
        mesh = make_mesh(shape)
        assert batch_share(mesh) == (share, shape.data), batch_share(mesh)
        attend = ContextParallel(
            mesh=mesh, exchange="ring", block_q=8, block_kv=8, implementation="reference")
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        arrays = [jax.make_array_from_process_local_data(whole, x, x.shape) for x in (q, k, v)]
        run = jax.jit(
            jax.value_and_grad(lambda *x: loss(attend, *x), argnums=(0, 1, 2)), out_shardings=whole)
        found = run(*arrays)
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            one, other = (np.asarray(x.addressable_data(0)) for x in (one, other))
            assert np.isfinite(one).all()
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())
    print("two processes agree")
"""


@pytest.mark.slow
def test_two_processes_compute_what_one_does():
    run_in_two_processes(TWO_PROCESSES, "two processes agree")


def test_one_shard_is_the_plain_operator():
    q = k = v = jax.random.normal(jax.random.key(0), (1, 20, 2, 8))
    attend = ContextParallel(mesh=ONE, exchange="ring", implementation="reference")
    plain = xsake.BlockSparseAttention(implementation="reference")
    for one, other in zip(
        attend(q, k, v, mask=Causal()), plain(q, k, v, mask=Causal()), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    half = ContextParallel(mesh=ONE, dtype="bfloat16", implementation="reference")
    assert half(q, k, v).dtype == jnp.bfloat16


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ArgumentError, match="no mesh"):
        ContextParallel()
    with pytest.raises(ArgumentError, match="axes \\('data',\\)"):
        ContextParallel(mesh=Mesh(np.array(jax.devices()[:1]), ("data",)))
    attend = ContextParallel(mesh=ONE)
    q = jnp.zeros((1, 20, 2, 8))
    with pytest.raises(UnsupportedError, match="1 queries, 20 keys"):
        attend(q[:, :1], q, q)
    with pytest.raises(UnsupportedError, match="XSK-401.context-bias"):
        attend(q, q, q, bias=jnp.zeros((1, 1, 20, 20)))
