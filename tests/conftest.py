"""Settings shared by all tests: how many examples hypothesis tries, and how strict JAX is."""

import os

import hypothesis
import jax

# XLA's pool has a thread per core, and the interpreters of Pallas hold one for every thread of a
# kernel that waits for another: with two cores, three warp groups wait forever. More threads, then.
os.environ["NPROC"] = str(max(8, os.cpu_count() or 1))

# `ci` draws the same examples every time, so a red run repeats; `nightly` looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=20, deadline=None)
hypothesis.settings.register_profile(
    "nightly", max_examples=200, deadline=None, print_blob=True, database=None
)
hypothesis.settings.load_profile("ci")

jax.config.update("jax_numpy_rank_promotion", "raise")
