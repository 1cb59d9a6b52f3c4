"""Settings shared by all tests: how many examples hypothesis tries, and how strict JAX is."""

import os

import hypothesis
import jax
import pytest

# XLA's pool has a thread per core, and the interpreters of Pallas hold one for every thread of a
# kernel that waits for another: with two cores, three warp groups wait forever. A larger pool,
# then; the processes that tests start have a user's.
with pytest.MonkeyPatch.context() as while_it_starts:
    while_it_starts.setenv("NPROC", str(max(8, os.cpu_count() or 1)))
    jax.devices()

# `ci` draws the same examples every time, so a red run repeats; `nightly` looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=20, deadline=None)
hypothesis.settings.register_profile(
    "nightly", max_examples=200, deadline=None, print_blob=True, database=None
)
hypothesis.settings.load_profile("ci")

jax.config.update("jax_numpy_rank_promotion", "raise")
