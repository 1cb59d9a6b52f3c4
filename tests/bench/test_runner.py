import pytest

from xsake.benchmarking import (
    Spread,
    TimedSide,
    Verdict,
    check_limit,
    interleave,
    pair_ratio,
)
from xsake.errors import ArgumentError


def test_rounds_alternate_their_order_and_warm_up_first():
    visits: list[str] = []

    def side(name: str) -> TimedSide:
        return TimedSide(name, lambda: visits.append(name) or 1.0)

    times = interleave([side("a"), side("b")], rounds=3, warmup=1, settle_seconds=0.0)
    assert "".join(visits) == "ba" + "ab" + "ba" + "ab"
    assert times == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_a_machine_that_slows_down_does_not_change_the_ratio():
    clock = {"factor": 1.0}

    def slowing(seconds: float) -> float:
        clock["factor"] *= 1.05
        return seconds * clock["factor"]

    sides = [TimedSide("a", lambda: slowing(1.0)), TimedSide("b", lambda: slowing(2.0))]
    times = interleave(sides, rounds=20, warmup=0, settle_seconds=0.0)
    assert pair_ratio(times["a"], times["b"]).median == pytest.approx(0.5, rel=0.01)


def test_a_ratio_hidden_by_its_spread_is_not_quoted():
    hidden = pair_ratio([1.0, 2.0, 3.0, 4.0], [1.0] * 4)
    assert not hidden.is_clear
    assert "unclear" in hidden.describe()
    assert "2.500" not in hidden.describe()
    assert check_limit(hidden, 100.0) is Verdict.UNCLEAR


def test_a_limit_inside_the_quartiles_is_not_decided():
    measured = Spread(median=1.0, q25=0.95, q75=1.05)
    assert check_limit(measured, 1.06) is Verdict.PASS
    assert check_limit(measured, 1.01) is Verdict.UNCLEAR
    assert check_limit(measured, 0.94) is Verdict.FAIL


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: interleave([], rounds=1),
        lambda: interleave([TimedSide("a", lambda: 1.0)] * 2, rounds=1),
        lambda: interleave([TimedSide("a", lambda: 1.0)], rounds=0),
        lambda: pair_ratio([1.0], [1.0, 2.0]),
        lambda: Spread.of([]),
    ],
)
def test_meaningless_requests_are_refused(wrong):
    with pytest.raises(ArgumentError):
        wrong()
