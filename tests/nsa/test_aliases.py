"""Names of `xsake` that are loaded on first use: packages, and aliases of `xsake.nsa`."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake import nsa
from xsake.errors import ArgumentError

LAZY = ("distributed", "hads", "indexed", "nsa")

FRESH = f"""
import sys
import xsake

packages = {LAZY}
loaded = [name for name in packages if f"xsake.{{name}}" in sys.modules]
assert not loaded, loaded
assert {{*packages, "Blocks", "masks", "__version__"}} <= set(dir(xsake))
assert xsake.Blocks.__module__ == "xsake.nsa.config"
assert "xsake.hads" not in sys.modules and "xsake.distributed" not in sys.modules
for name in packages:
    assert getattr(xsake, name) is sys.modules[f"xsake.{{name}}"]
"""


def test_packages_are_imported_on_first_use():
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("Blocks", "Config"),
        ("Branches", "KV"),
        ("Gates", "Gates"),
        ("apply_native_sparse_attention", "selected_attention"),
    ],
)
def test_an_alias_is_the_same_object(alias, name):
    assert getattr(xsake, alias) is getattr(nsa, name)
    assert alias in xsake.__all__


def test_the_alias_of_attention_takes_both_names_of_the_config():
    q = jnp.ones((1, 16, 2, 8))
    gates, config = xsake.Gates(None, None, jnp.ones(q.shape[:3])), xsake.Blocks(window=3)
    values = jnp.arange(16.0)[None, :, None, None] * q
    run = lambda **more: xsake.native_sparse_attention(q, q, values, gates, **more)
    expected = nsa.attention(q, q, values, gates, config=config)
    np.testing.assert_array_equal(run(blocks=config), expected)
    np.testing.assert_array_equal(run(config=config), expected)
    np.testing.assert_array_equal(run(), nsa.attention(q, q, values, gates))
    with pytest.raises(ArgumentError, match="XSK-102.blocks-and-config"):
        run(blocks=config, config=config)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = xsake.nothing
