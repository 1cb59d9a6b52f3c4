"""Digests in the background: compared once, waited for within a limit, and never forgotten."""

import threading
import time

import pytest

from xsake.training.data.verifying import Verifier


def test_a_file_is_compared_once_and_before_it_is_used():
    seen = []
    found = Verifier(lambda number: (time.sleep(0.05), seen.append(number)))
    found.use([0, 1])
    assert sorted(seen) == [0, 1]
    found.use([1, 0, 2])
    assert sorted(seen) == [0, 1, 2]
    assert found.close() == 0


def test_damage_is_raised_where_the_file_is_used_and_from_then_on():
    def check(number):
        if number == 3:
            raise ValueError("file 3")

    found = Verifier(check)
    found.use([0, 1, 2])
    for numbers in ([3], [0]):
        with pytest.raises(ValueError, match="file 3"):
            found.use(numbers)
    found.close()


def test_the_wait_has_a_limit_and_damage_that_is_found_later_is_raised_later():
    release = threading.Event()

    def check(number):
        release.wait()
        raise ValueError(f"file {number}")

    found = Verifier(check, wait_seconds=0.2)
    began = time.monotonic()
    for _ in range(5):
        found.use([0])
    assert time.monotonic() - began < 5
    release.set()
    while found._failure is None:
        time.sleep(0.01)
    with pytest.raises(ValueError, match="file 0"):
        found.use([])
    found.close()


def test_a_file_that_was_used_and_not_compared_is_counted():
    release = threading.Event()
    found = Verifier(lambda _: release.wait(), wait_seconds=0.0)
    found.use(range(100))
    left = found.close()
    release.set()
    assert 90 <= left < 100
