"""Pages as arrays: what is appended is what attention reads, in every dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake.cache import PageAllocator, PagedKV, from_rpa, to_rpa
from xsake.errors import ArgumentError, UnsupportedError
from xsake.masks import Causal, Window

LAYERS, HEADS, DIM = 2, 2, 16
CAUSAL = Causal()


def create(dtype="float32", *, num_pages=20, page_size=4):
    return PagedKV.create(
        layers=LAYERS, num_pages=num_pages, page_size=page_size, kv_heads=HEADS, head_dim=DIM,
        dtype=dtype,
    )  # fmt: skip


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


class Batch:
    """Sequences of which the test keeps every key and value."""

    def __init__(self, dtype="float32", lengths=(0, 0, 0)):
        self.cache = create(dtype, num_pages=60)
        self.allocator = PageAllocator(60, 4)
        self.sequences = [self.allocator.add() for _ in lengths]
        self.k = [np.zeros((0, HEADS, DIM), np.float32) for _ in lengths]
        self.v = [np.zeros((0, HEADS, DIM), np.float32) for _ in lengths]

    def append(self, seed, counts):
        counts = np.array(counts)
        tokens = max(1, int(counts.max()))
        k, v = (draw(seed + i, len(counts), tokens, HEADS, DIM) for i in (0, 1))
        for i, (sequence, count) in enumerate(zip(self.sequences, counts, strict=True)):
            copies = self.allocator.append(sequence, int(count)).copies
            self.cache = self.cache.copy(copies)
            self.k[i] = np.concatenate([self.k[i], k[i, :count]])
            self.v[i] = np.concatenate([self.v[i], v[i, :count]])
        start = self.lengths - counts
        for layer in range(LAYERS):
            self.cache = self.cache.append(layer, self.table, start, k + layer, v - layer, counts)

    @property
    def lengths(self):
        return self.allocator.lengths(self.sequences)

    @property
    def table(self):
        return self.allocator.table(self.sequences, 12)

    def expected(self, q, layer, mask=CAUSAL):
        """Attention of the last tokens over contiguous keys."""
        rows = []
        for i, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            tokens = q.shape[1]
            positions = np.arange(len(k) - tokens, len(k))[None]
            rows.append(
                xsake.attention(
                    q[i : i + 1], (k + layer)[None], (v - layer)[None], mask=mask,
                    q_positions=positions,
                )[0]
            )  # fmt: skip
        return np.stack(rows)


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float32", 2e-6), ("bfloat16", 3e-2), ("int8", 6e-2)]
)
def test_attention_reads_what_was_appended(dtype, limit):
    batch = Batch(dtype)
    for seed, counts in enumerate([(9, 5, 1), (1, 1, 1), (3, 0, 8), (1, 1, 1), (0, 7, 4)]):
        batch.append(2 * seed, counts)
    q = draw(99, 3, 2, 3 * HEADS, DIM)
    for layer in range(LAYERS):
        own = q.astype(dtype) if dtype == "bfloat16" else q
        out = batch.cache.attend(own, layer, batch.table, batch.lengths)
        np.testing.assert_allclose(
            np.asarray(out, np.float32), batch.expected(q, layer), atol=limit
        )


def test_a_fork_reads_the_shared_prefix_and_its_own_tokens():
    batch = Batch(lengths=(0,))
    batch.append(0, (6,))
    fork = batch.allocator.fork(batch.sequences[0])
    batch.sequences.append(fork)
    batch.k.append(batch.k[0])
    batch.v.append(batch.v[0])
    batch.append(2, (3, 1))
    used = len(set(batch.table[batch.table >= 0].tolist()))
    assert used == 4  # 3 and 2 pages, of which the first is shared
    q = draw(9, 2, 1, HEADS, DIM)
    out = batch.cache.attend(q, 1, batch.table, batch.lengths)
    np.testing.assert_allclose(out, batch.expected(q, 1), atol=2e-6)


def test_pages_behind_a_window_are_freed_and_not_missed():
    batch = Batch(lengths=(0,))
    batch.append(0, (30,))
    free = batch.allocator.num_free
    batch.allocator.drop_window(batch.sequences[0], 30 - 9)
    assert batch.allocator.num_free == free + 5
    q, mask = draw(9, 1, 1, HEADS, DIM), Causal() & Window(8, 0)
    out = batch.cache.attend(q, 0, batch.table, batch.lengths, mask=mask)
    np.testing.assert_allclose(out, batch.expected(q, 0, mask), atol=2e-6)


def test_a_step_under_jit_writes_in_place():
    cache = create(num_pages=200, page_size=16)
    table, start = jnp.arange(4)[None], jnp.array([5])
    token = draw(0, 1, 1, HEADS, DIM)

    @jax.jit
    def step(cache, token):
        def layer(cache, number):
            cache = cache.append(number, table, start, token, token)
            return cache, cache.attend(token, number, table, start + 1)

        return jax.lax.scan(layer, cache, jnp.arange(LAYERS))

    compiled = jax.jit(step, donate_argnums=0).lower(cache, token).compile()
    memory = compiled.memory_analysis()
    size = 2 * cache.k.size * 4
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 2  # no copy of the cache


def test_int8_tokens_keep_their_numbers_while_the_factor_does_not_grow():
    cache = create("int8")
    table = jnp.array([[3, 1]])
    tokens = jnp.asarray([1.0, -0.5, 0.25, 2.0, 0.1]).reshape(1, 5, 1, 1)
    tokens = jnp.broadcast_to(tokens, (1, 5, HEADS, DIM))
    one = cache.append(0, table, jnp.array([0]), tokens[:, :1], tokens[:, :1])
    for i in (1, 2):
        one = one.append(0, table, jnp.array([i]), tokens[:, i : i + 1], tokens[:, i : i + 1])
    assert one.k[0, 3, 0, :, 0].tolist() == [127, -64, 32, 0]
    one = one.append(0, table, jnp.array([3]), tokens[:, 3:], tokens[:, 3:])
    assert one.k[0, 3, 0, :, 0].tolist() == [64, -32, 16, 127]
    assert one.k[0, 1, 0, :, 0].tolist() == [127, 0, 0, 0]
    np.testing.assert_allclose(one.k_scale[0, 1], 0.1 / 127)
    assert cache.bytes_per_token == 2 * HEADS * (DIM + 1)


@pytest.mark.parametrize(("dtype", "packing"), [("float32", 1), ("bfloat16", 2), ("int8", 4)])
def test_conversion_to_ragged_paged_attention_and_back(dtype, packing):
    heads, dim = 3, 80
    k, v = (draw(i, 5, heads, 8, dim).astype(dtype) for i in (0, 1))
    kv = to_rpa(k, v)
    words = -(-2 * heads // packing)
    assert kv.shape == (5, 8, words, packing, 128)
    flat = kv.reshape(5, 8, -1, 128)
    np.testing.assert_array_equal(flat[2, 3, 4, :dim], k[2, 2, 3])
    np.testing.assert_array_equal(flat[2, 3, 5, :dim], v[2, 2, 3])
    for x, y in zip(from_rpa(kv, kv_heads=heads, head_dim=dim), (k, v), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(UnsupportedError) as refusal:
        to_rpa(k, v[..., 1:])
    assert refusal.value.slug == "rpa-layout"


def test_a_cache_of_integers_other_than_int8_is_refused():
    with pytest.raises(ArgumentError) as refusal:
        create("int16")
    assert refusal.value.slug == "cache-dtype"
