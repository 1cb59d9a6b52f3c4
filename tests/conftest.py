"""Settings shared by all tests: examples of hypothesis, strictness of JAX, seconds per package."""

import collections
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

# Seconds of tests per package, added up over three workers on two slow cores: about twice what they
# take, so that a package that grows is noticed and a busy machine is not.
LIMITS = {"kernels": 2400, "model": 1500, "training": 1500}
OTHER_LIMIT = 900
SECONDS: collections.Counter[str] = collections.Counter()


def pytest_addoption(parser):
    parser.addoption("--limit-seconds", action="store_true", help="fail if a package is too slow")


def pytest_runtest_logreport(report):
    folders = report.nodeid.split("::")[0].split("/")[1:-1]
    SECONDS["".join(folders[:1]) or "tests"] += report.duration


def pytest_sessionfinish(session):
    if session.config.getoption("--limit-seconds") and not session.exitstatus and _too_slow():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--limit-seconds"):
        each = (f"{name} {seconds:.0f}" for name, seconds in SECONDS.most_common())
        terminalreporter.write_line(f"seconds of tests: {', '.join(each)}")
        for name, seconds in _too_slow().items():
            text = (
                f"tests/{name} took {seconds:.0f} s, the limit is {LIMITS.get(name, OTHER_LIMIT)} s"
            )
            terminalreporter.write_line(text, red=True)


def _too_slow() -> dict[str, float]:
    return {name: s for name, s in SECONDS.items() if s > LIMITS.get(name, OTHER_LIMIT)}
