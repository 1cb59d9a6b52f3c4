"""Small trees that know their step, and folders of checkpoints of them, for the tests."""

import jax
import jax.numpy as jnp
import numpy as np

from xsake.training.checkpointing import CheckpointEvent, CheckpointStore


def tree(step: int):
    """Every bit follows from the step: whoever restores it can tell whether it is the right one."""
    rng = np.random.default_rng(step)
    return {
        "step": jnp.int32(step),
        "parameters": {
            # Large enough to lie in a data file, where Orbax has no checksum.
            "weights": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32),
            "scale": jnp.asarray(rng.normal(size=16), jnp.bfloat16),
        },
        "optimizer": [jnp.asarray(rng.integers(0, 255, 40), jnp.uint8), None],
        "key": jax.random.key(step),
        "unused": jnp.zeros((0, 3), jnp.float32),
    }


def extra(step: int):
    return {"data": {"position": 7 * step, "seed": 3}, "plan": f"plan of {step}"}


def like(example=None):
    example = tree(0) if example is None else example
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), example
    )


def fill(folder, steps=(10, 20, 30), **options) -> None:
    store = CheckpointStore(folder, **options)
    for step in steps:
        store.save(step, tree(step), extra(step))
    store.close()


def bits(value):
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return str(value.dtype), value.shape, np.asarray(value).tobytes()


def assert_exact(restored, step: int) -> None:
    """The step it says it is, bit for bit, with what was saved beside it."""
    assert restored.step == step
    assert restored.extra == extra(step)
    assert jax.tree.structure(restored.tree) == jax.tree.structure(tree(step))
    assert jax.tree.map(bits, restored.tree) == jax.tree.map(bits, tree(step))


def reasons(notices: list[CheckpointEvent]):
    return [(notice.kind, notice.step, notice.reason) for notice in notices]
