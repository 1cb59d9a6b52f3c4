"""A complete row to vary in tests."""

from xsake.benchmarking import BenchmarkRow, Ratio, Shape
from xsake.benchmarking.rows import TimingStats


def sample_row(**changes: object) -> BenchmarkRow:
    """A plausible row; `changes` replace fields and are checked."""
    fields = {
        "experiment": "sample", "run": "0123456789ab", "side": "xsake",
        "implementation": "xsake.attention", "shape": Shape.square(1024), "mask": "causal",
        "layout": "causal", "budget": 1.0, "threads": 2,
        "seconds": TimingStats(median=0.02, q25=0.019, q75=0.021), "repeats": 5,
        "ratios": (Ratio(baseline="old", median=0.5, q25=0.49, q75=0.52),),
        "max_error": 3e-7, "is_correct": True, "versions": {"jax": "0.12"}, "commit": "0" * 40,
        "dirty": False, "seed": 0, "utc": "2026-01-01T00:00:00+00:00", "cpu": "some processor",
        "load_average": 0.1,
    }  # fmt: skip
    return BenchmarkRow.model_validate(fields | changes)
