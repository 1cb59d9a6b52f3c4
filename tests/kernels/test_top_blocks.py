"""Scores of blocks: every backend against a definition token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.errors import UnsupportedError
from xsake.kernels.block_selection import BlockSelection
from xsake.kernels.top_blocks import OP, top_blocks, xla
from xsake.kernels.top_blocks.types import TopBlocksConfig, TopBlocksInputs

BLOCK = 8
BACKENDS = [name for name, reason in OP.implementations().items() if reason is None]


def arrays(tokens=61, heads=4, key_heads=1, *, batch=2, dim=8, kv_tokens=None, seed=0):
    """Whole numbers, whose products no backend rounds."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(-9, 10, (batch, *shape)).astype(np.float32)
    kv_tokens = tokens if kv_tokens is None else kv_tokens
    return draw(tokens, heads, dim), draw(kv_tokens, key_heads, dim), draw(tokens, heads)


def config_of(kv_tokens=61, slots=4, groups=4, first=0, local=1, **more):
    number = -(-kv_tokens // BLOCK)
    return TopBlocksConfig(BlockSelection(BLOCK, number, slots, first, local), groups, **more)


def definition(inputs, config):
    """Lists [B, Tq, Hg, Ns], one query after the other."""
    q, k = (np.asarray(x, np.float64) for x in inputs[:2])
    selection, groups = config.selection, config.groups
    position, start = map(np.asarray, inputs.bounds)
    per_group = q.shape[2] // groups
    found = np.full((*q.shape[:2], groups, selection.slots), -1)
    for b, t, g in np.ndindex(*q.shape[:2], groups):
        own, begin = position[b, t] // BLOCK, start[b, t] // BLOCK
        scores = {}
        for block in range(begin, own + 1):
            at = np.arange(block * BLOCK, min((block + 1) * BLOCK, k.shape[1]))
            if config.pooling == "max":
                at = at[at <= position[b, t]]
                keys = k[b, at, g if k.shape[2] > 1 else 0]
            else:
                keys = k[b, at, g if k.shape[2] > 1 else 0].mean(0, keepdims=True)
            heads = range(g * per_group, (g + 1) * per_group)
            s = np.stack([keys @ q[b, t, h] for h in heads])
            s = np.maximum(s, 0) if config.has_relu else s
            if inputs.weights is not None:
                s = s * np.asarray(inputs.weights, np.float64)[b, t, list(heads)][:, None]
            scores[block] = s.sum(0).max()
        local = [x for x in range(own, own - selection.local, -1) if x >= begin]
        first = [begin + x for x in range(selection.first) if begin + x <= own]
        forced = list(dict.fromkeys([*local, *first]))
        rest = sorted(scores.keys() - set(forced), key=lambda x: (-scores[x], x))
        best = [*forced, *rest][: selection.slots]
        found[b, t, g, : len(best)] = best
    return found


def require_support(implementation, config):
    if implementation == "native_cpu" and config.pooling == "mean":
        pytest.skip("the native kernel scores single keys")


CASES = {
    "msa": ((61, 4), {}, {}, False),
    "groups of one head": ((40, 1), {}, {"groups": 1}, False),
    "first and local": ((75, 3), {"key_heads": 3}, {"groups": 3, "first": 1, "local": 2}, False),
    "index heads with weights": ((61, 6), {}, {"groups": 1, "has_relu": True}, True),
    "two index heads per group": ((61, 4), {"key_heads": 2}, {"groups": 2}, True),
    "means of keys": ((67, 4), {"key_heads": 4}, {"pooling": "mean"}, False),
    "fewer blocks than slots": ((20, 4), {}, {"slots": 6}, False),
    "one token": ((1, 4), {}, {}, False),
}


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_lists_are_those_of_the_definition(name, implementation):
    sizes, more, numbers, has_weights = CASES[name]
    q, k, weights = arrays(*sizes, **more)
    inputs = TopBlocksInputs(q, k, weights if has_weights else None)
    config = config_of(sizes[0], **numbers)
    require_support(implementation, config)
    found = top_blocks(inputs, config, implementation=implementation)
    np.testing.assert_array_equal(found, definition(inputs, config))


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_positions_and_starts_say_who_sees_what(implementation, pooling):
    q, k, _ = arrays(3, kv_tokens=61)
    positions = np.asarray([[60, 3, 20], [17, 30, 40]], np.int32)
    starts = np.asarray([[0, 0, 16], [16, 24, 8]], np.int32)
    inputs = TopBlocksInputs(q, k, None, positions, starts)
    config = config_of(pooling=pooling, first=1)
    require_support(implementation, config)
    found = top_blocks(inputs, config, implementation=implementation)
    np.testing.assert_array_equal(found, definition(inputs, config))


@pytest.mark.parametrize(("queries", "scores"), [(7, 1), (16, 2**11), (61, 2**20)])
def test_chunks_and_tiles_change_nothing(monkeypatch, queries, scores):
    monkeypatch.setattr(xla, "CPU", xla.TopBlocksTuning(queries, scores))
    inputs, config = TopBlocksInputs(*map(jnp.asarray, arrays()[:2])), config_of()
    run = jax.jit(lambda *x: xla.forward(TopBlocksInputs(*x), config, "cpu"))
    np.testing.assert_array_equal(run(*inputs), definition(inputs, config))


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_key_that_is_not_finite_changes_the_lists_of_later_queries_only(value, implementation):
    q, k, _ = arrays()
    clean = top_blocks(TopBlocksInputs(q, k), config_of(), implementation=implementation)
    k[:, 30] = value
    found = top_blocks(TopBlocksInputs(q, k), config_of(), implementation=implementation)
    np.testing.assert_array_equal(found[:, :30], clean[:, :30])
    own = (np.arange(61) // BLOCK)[None, :, None]
    assert (np.asarray(found)[..., 0] == own).all()  # the forced one is still the first
    assert all(len({*x[x >= 0]}) == (x >= 0).sum() for x in np.asarray(found).reshape(-1, 4))


def test_memory_is_linear_in_the_number_of_tokens():
    def bytes_of(tokens):
        shape = lambda heads: jax.ShapeDtypeStruct((1, tokens, heads, 16), jnp.float32)
        config = TopBlocksConfig(BlockSelection(128, tokens // 128, 16, 0, 1), 4)
        run = jax.jit(lambda q, k: top_blocks(TopBlocksInputs(q, k), config))
        return run.lower(shape(4), shape(1)).compile().memory_analysis().temp_size_in_bytes

    small, large = bytes_of(4096), bytes_of(32768)
    assert large < 9 * small


def test_names_of_backends():
    assert set(OP.implementations()) == {"native_cpu", "xla", "reference"}


@pytest.mark.skipif("native_cpu" not in BACKENDS, reason="needs xsake-cpu")
class TestNative:
    """What differs from the loops of XLA: tiles, padding of panels, limits."""

    def test_means_of_keys_are_refused(self):
        inputs = TopBlocksInputs(*arrays()[:2])
        with pytest.raises(UnsupportedError, match="scores single keys"):
            top_blocks(inputs, config_of(pooling="mean"), implementation="native_cpu")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize(("tokens", "block", "heads", "groups"), [
        (700, 128, 4, 4), (300, 20, 6, 2), (531, 33, 12, 1), (130, 300, 1, 1), (9, 64, 70, 1),
    ])  # fmt: skip
    def test_lists_are_those_of_xla_at_any_size(self, tokens, block, heads, groups, dtype):
        q, k, weights = arrays(tokens, heads, groups, dim=19)
        inputs = TopBlocksInputs(*(jnp.asarray(x, dtype) for x in (q, k)), weights)
        number = -(-tokens // block)
        config = TopBlocksConfig(BlockSelection(block, number, 3, 1, 1), groups, has_relu=True)
        ours, theirs = (top_blocks(inputs, config, implementation=x) for x in ("native_cpu", "xla"))
        np.testing.assert_array_equal(ours, theirs)

    def test_scores_that_are_not_finite_are_those_of_xla(self):
        q, k, _ = arrays()
        k[0, 10], k[0, 20], k[1, 30, 0, 1], q[1, 40] = np.nan, np.inf, -np.inf, np.nan
        inputs, config = TopBlocksInputs(q, k), config_of()
        ours, theirs = (top_blocks(inputs, config, implementation=x) for x in ("native_cpu", "xla"))
        np.testing.assert_array_equal(ours, theirs)

    def test_lists_do_not_depend_on_the_batch_and_repeat_bit_by_bit(self):
        rng = np.random.default_rng(0)
        q, k = (rng.standard_normal((3, 200, n, 16)).astype(np.float32) for n in (4, 1))
        config = config_of(200)
        select = lambda q, k: np.asarray(
            top_blocks(TopBlocksInputs(q, k), config, implementation="native_cpu")
        )
        lists = select(q, k)
        np.testing.assert_array_equal(lists, select(q, k))
        for b in range(3):
            np.testing.assert_array_equal(lists[b : b + 1], select(q[b : b + 1], k[b : b + 1]))

    def test_under_vmap_and_jit(self):
        q, k, _ = arrays()
        config = config_of()
        select = lambda q, k: top_blocks(
            TopBlocksInputs(q[None], k[None]), config, implementation="native_cpu"
        )[0]
        expected = definition(TopBlocksInputs(q, k), config)
        np.testing.assert_array_equal(jax.jit(jax.vmap(select))(q, k), expected)
