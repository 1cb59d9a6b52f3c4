"""Calls outside jit compile once per rule and length, however many rules take turns."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.lanes import slow
from xsake.layout import BlockLayout
from xsake.masks import Causal, Full, Window

TURNS = 17  # one more than the layouts that are held without a reader


@pytest.fixture
def compilations():
    """Count the programs that XLA compiles."""
    seen = []
    listener = lambda event, _, **__: seen.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)


def attend(tokens=24, **rules):
    """Run one call outside jit; the reference compiles fastest."""
    x = jnp.ones((1, tokens, 1, 4))
    xsake.attention(x, x, x, **rules, implementation="reference").block_until_ready()


def attend_masks(turns=TURNS):
    for size in range(turns):
        attend(mask=Causal() & Window(size, 0))


def attend_lengths():
    for tokens in range(1, TURNS + 1):
        attend(tokens, mask=Causal())


def attend_layouts():
    """Layouts from NumPy, made again for every call."""
    for chosen in range(TURNS):
        grid = np.array([[chosen >> bit & 1 for bit in range(6)]], bool)
        layout = BlockLayout.from_block_mask(grid, block_q=24, block_kv=4)
        attend(layout=layout)


def attend_masked_layout():
    layout = BlockLayout.from_mask(Full(), q_tokens=24, block_q=8, block_kv=8)
    for size in range(TURNS):
        attend(layout=layout, mask=Window(size, 0))


@pytest.mark.parametrize(
    "attend_all",
    [attend_masks, slow(attend_lengths), slow(attend_layouts), slow(attend_masked_layout)],
)
def test_many_rules_in_turn_compile_once_each(attend_all, compilations):
    attend_all()
    assert compilations, "the first round compiles"
    compilations.clear()
    attend_all()
    assert compilations == []


@pytest.mark.slow  # 65 programs
def test_meshes_compile_once_per_rule(compilations):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    spread = xsake.BlockSparseAttention(mesh=mesh, implementation="reference")
    x = jnp.ones((1, 4, 1, 4))
    for rounds in range(2):
        for size in range(65):
            spread(x, x, x, mask=Window(size, 0)).block_until_ready()
        if rounds == 0:
            compilations.clear()
    assert compilations == []


@pytest.mark.slow  # 64 programs in a process whose memory is its own
def test_memory_stays_flat_once_every_rule_is_compiled():
    script = (
        "import gc\n"
        "from tests.attention.test_compile_cache import attend_masks\n"
        "def resident():\n"
        "    gc.collect()\n"
        "    with open('/proc/self/statm') as pages:\n"
        "        return int(pages.read().split()[1]) * 4096 / 2**20\n"
        "attend_masks(64)\n"
        "before = resident()\n"
        "for _ in range(20):\n"
        "    attend_masks(64)\n"
        "print(resident() - before)\n"
    )
    command = [sys.executable, "-c", script]
    grown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert float(grown.stdout) < 32, "1,280 calls of 64 compiled programs"
