"""What the showcase explores: packed masses say the same as the library, and the files agree."""

import numpy as np
import pytest

from benchmarks.hads.explore import carry
from benchmarks.hads.explored import WHOLE, Choices, Packed
from xsake.hads.budget import AlwaysOn, level_totals, row_counts
from xsake.hads.fit import curve

ALWAYS = AlwaysOn()


def _masses(heads: int, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    masses = np.tril(rng.gamma(0.2, size=(heads, n, n)) + 1e-9)
    return (masses / masses.sum(-1, keepdims=True)).astype(np.float32)


def _packed(heads: int = 3, n: int = 12) -> Packed:
    true = _masses(heads, n)
    return Packed.of(true, (true * _masses(heads, n, seed=1)).astype(np.float32), ALWAYS)


def test_a_file_gives_back_what_was_packed_and_is_the_same_every_time():
    packed = _packed()
    again = Packed.from_bytes(packed.to_bytes(), 3)
    np.testing.assert_array_equal(again.codes, packed.codes)
    np.testing.assert_array_equal(again.places, packed.places)
    assert packed.to_bytes() == again.to_bytes()


def test_codes_are_masses_to_half_a_step():
    true = _masses(2, 9)
    codes, _ = Packed.of(true, true, ALWAYS).unpacked()
    assert np.abs(codes / WHOLE - true).max() <= 0.5 / WHOLE + 1e-7


def test_kl_at_constant_rows_is_the_curve_of_the_library():
    packed = _packed(n=16)
    codes, places = packed.unpacked()
    shares = codes / codes.sum(-1, keepdims=True)
    curves = curve(shares, -places.astype(np.float64), ALWAYS)
    choices = Choices(packed, ALWAYS)
    for k in range(ALWAYS.level, 17):
        totals = np.full(3, level_totals(np.array([k]), 16, ALWAYS)[0])
        np.testing.assert_allclose(choices.kept(totals).kl, curves[:, k], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("total", [33, 40, 57, 78])
def test_what_is_kept_is_what_a_slow_walk_over_blocks_finds(total):
    packed = _packed()
    codes, places = packed.unpacked()
    found = Choices(packed, ALWAYS).kept(np.full(3, total))
    counts = row_counts(total, 12, ALWAYS)
    for head in range(3):
        losses, masses, agreed = [], [], 0
        for row in range(12):
            own = codes[head, row, : row + 1]
            taken = {j for j in range(row + 1) if places[head, row, j] < counts[row]}
            heaviest = sorted(range(row + 1), key=lambda j: (-own[j], j))[: counts[row]]
            assert len(taken) == counts[row]
            masses.append(sum(own[j] for j in taken) / own.sum())
            losses.append(-np.log(masses[-1]))
            agreed += len(taken & set(heaviest))
        np.testing.assert_allclose(found.kl[head], np.mean(losses), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(found.mass[head], np.mean(masses), rtol=1e-12)
        np.testing.assert_allclose(found.recall[head], agreed / total, rtol=1e-12)


def test_a_head_that_copies_carries_and_one_that_does_not_does_not():
    plain, copied = np.zeros((2, 2, 16, 16))
    plain[:, :, 0] = copied[:, :, 0] = 1
    copied[0, 15, :2] = 0.25, 0.75  # the second row of the copy looks at its passage
    np.testing.assert_allclose(carry(plain, copied), [[0, 0], [0.75, 0]])
