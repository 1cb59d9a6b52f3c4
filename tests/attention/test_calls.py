"""Attention as a user calls it: any length, any dtype, under every transformation."""

import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.attention.dense import attend, draw
from xsake.layout import BlockLayout
from xsake.masks import Causal, Window

TRIL = np.tril(np.ones((40, 40), bool))


@pytest.mark.parametrize(
    ("q_tokens", "kv_tokens", "value"), [(1, 1, 8), (1, 37, 8), (129, 3, 4), (5, 140, 12)]
)
def test_any_length_without_a_mask(q_tokens, kv_tokens, value):
    q, k, v = draw(q_tokens=q_tokens, kv_tokens=kv_tokens, value=value)
    ours = xsake.attention(q, k, v)
    np.testing.assert_allclose(ours, attend(q, k, v, True), atol=2e-6)


def test_the_first_program_of_a_process_compiles_once():
    """Backends are imported while it is traced, which must not make its second call another one."""
    program = """
import jax, xsake
attend = jax.jit(lambda q: xsake.attention(q, q, q, mask=xsake.masks.Causal()))
q = jax.numpy.ones((1, 32, 2, 16))
attend(q), attend(q)
print(attend._cache_size())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_decoding_one_token_at_a_time_equals_the_whole():
    """One compiled step serves every position: positions are data."""
    q, k, v = draw(q_tokens=12)
    whole = xsake.attention(q, k, v, mask=Causal() & Window(4, 0))

    @jax.jit
    def step(q, position):
        rule = Causal() & Window(4, 0)
        return xsake.attention(q, k, v, mask=rule, q_positions=position[None])

    for i in (0, 5, 11):
        np.testing.assert_allclose(
            step(q[:, i : i + 1], jnp.int32(i))[:, 0], whole[:, i], atol=2e-6
        )
    assert step._cache_size() == 1


def test_packed_sequences_equal_each_sequence_alone():
    """What others write as cu_seqlens: one row of tokens, lengths as segment ids, padding -1."""
    lengths = (7, 1, 20, 5)
    starts = np.cumsum((0, *lengths))
    q, k, v = draw(q_tokens=40)
    segments = np.full((1, 40), -1, np.int32)
    for i, length in enumerate(lengths):
        segments[0, starts[i] : starts[i] + length] = i
    packed = xsake.attention(q, k, v, mask=Causal(), q_segment_ids=segments)
    for start, length in zip(starts, lengths, strict=False):
        alone = slice(start, start + length)
        expected = attend(q[:, alone], k[:, alone], v[:, alone], TRIL[:length, :length])
        np.testing.assert_allclose(packed[:, alone], expected, atol=2e-6)
    assert not np.asarray(packed[:, starts[-1] :]).any()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_half_precision_keeps_dtype_and_sums_in_float32(dtype, tolerance):
    arrays = [jnp.asarray(x, dtype) for x in draw()]
    out, lse = xsake.attention(*arrays, mask=Causal(), return_lse=True)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(out, np.float32), attend(*arrays, TRIL), atol=tolerance, rtol=tolerance
    )


def test_a_layout_passes_through_jit_as_data():
    q, k, v = draw()
    step = jax.jit(lambda layout: xsake.attention(q, k, v, layout=layout))
    for grid in (np.ones((5, 5), bool), np.eye(5, dtype=bool)):
        layout = BlockLayout.from_block_mask(grid, block_q=8, block_kv=8, mask=Causal()).traced(32)
        allowed = TRIL & grid.repeat(8, 0).repeat(8, 1)
        np.testing.assert_allclose(step(layout), attend(q, k, v, allowed), atol=2e-6)
    assert step._cache_size() == 1
