"""What the showcase explores: packed masses say the same as the library, and the files agree."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.hads.explore import PERCENTS, POLICIES, carry
from benchmarks.hads.explored import WHOLE, Choices, Packed
from xsake.hads.budget import ForcedBlocks, row_counts

FORCED = ForcedBlocks()
FOLDER = Path(__file__).parents[2] / "benchmarks/results/hads/explore_4096_32"


def _masses(heads: int, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    masses = np.tril(rng.gamma(0.2, size=(heads, n, n)) + 1e-9)
    return (masses / masses.sum(-1, keepdims=True)).astype(np.float32)


def _packed(heads: int = 3, n: int = 12) -> Packed:
    true = _masses(heads, n)
    return Packed.of(true, (true * _masses(heads, n, seed=1)).astype(np.float32), FORCED)


def test_a_file_gives_back_masses_to_half_a_step_and_is_the_same_every_time():
    true, packed = _masses(3, 12), _packed()
    assert np.abs(packed.unpacked()[0] / WHOLE - true).max() <= 0.5 / WHOLE + 1e-7
    again = Packed.from_bytes(packed.to_bytes(), 3)
    np.testing.assert_array_equal(again.codes, packed.codes)
    np.testing.assert_array_equal(again.places, packed.places)
    assert packed.to_bytes() == again.to_bytes()


@pytest.mark.parametrize("total", [33, 40, 57, 78])
def test_what_is_kept_is_what_a_slow_walk_over_blocks_finds(total):
    packed = _packed()
    codes, places = packed.unpacked()
    found = Choices(packed, FORCED).kept(np.full(3, total))
    counts = row_counts(total, 12, FORCED)
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


def test_the_committed_figures_follow_from_the_committed_masses():
    committed = json.loads((FOLDER / "explore.json").read_text())
    heads, layers = committed["model"]["q_heads"], committed["model"]["layers"]
    parts = [
        Packed.from_bytes((FOLDER / f"layer_{layer:02}.bin.gz").read_bytes(), heads)
        for layer in range(layers)
    ]
    whole = Packed(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.places for part in parts]),
    )
    totals = np.frombuffer(gzip.decompress((FOLDER / "totals.bin.gz").read_bytes()), "<u2")
    totals = totals.reshape(len(POLICIES), len(PERCENTS), heads * layers).astype(np.int64)
    choices = Choices(whole, ForcedBlocks(*committed["always"].values()))
    for policy in POLICIES:
        own = totals[POLICIES.index(policy)]
        visible = heads * layers * whole.codes.shape[-1]
        spent = own.sum(-1) / visible
        np.testing.assert_allclose(spent, np.array(PERCENTS) / 100, atol=1 / visible)
        for percent in (5, 30):
            place = PERCENTS.index(percent)
            kept = choices.kept(own[place])
            for field in ("kl", "mass", "recall"):
                found = committed["whole"][policy][field][place]
                np.testing.assert_allclose(found, getattr(kept, field).mean(), atol=2e-9)
            for row in committed["reference"]:
                if (row["policy"], row["percent"]) == (policy, percent):
                    assert row["blocks"] == own[place, row["head"]]
                    np.testing.assert_allclose(row["kl"], kept.kl[row["head"]], rtol=1e-12)
    # The yardstick of the policy kl is KL: no other of these may be better at it by much.
    place = PERCENTS.index(30)
    kl = {name: committed["whole"][name]["kl"][place] for name in POLICIES}
    assert kl["kl"] < kl["entropy_budget"] < kl["uniform"]
    assert committed["largest_error"] <= 0.6 / WHOLE
