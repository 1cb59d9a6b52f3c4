"""Settings shared by all tests: how many examples hypothesis tries, and how strict JAX is."""

import hypothesis
import jax

# `ci` draws the same examples every time, so a red run repeats; `nightly` looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=20, deadline=None)
hypothesis.settings.register_profile(
    "nightly", max_examples=200, deadline=None, print_blob=True, database=None
)
hypothesis.settings.load_profile("ci")

jax.config.update("jax_numpy_rank_promotion", "raise")
