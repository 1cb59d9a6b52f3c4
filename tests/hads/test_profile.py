"""Profiles in files: read back as measured, named by what was measured, checked before use."""

import contextlib
import dataclasses
import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.hads.sample import MACHINE, profile
from xsake.errors import ArgumentError
from xsake.hads.budget import ForcedBlocks
from xsake.hads.profile import Profile
from xsake.schemas import schema_text

GOOD = profile(n=6)
DOCUMENT = json.loads(GOOD.to_json())


@given(st.integers(0, 10**6), st.integers(1, 9))
def test_profiles_are_read_back_as_written(seed, n):
    found = profile(n=n, seed=seed)
    again = Profile.from_json(found.to_json().encode())
    assert again == found and again.digest == found.digest
    assert again.to_json() == found.to_json()
    for name in ("entropy", "offset_mass", "column_mass"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))


def test_numbers_have_six_digits_and_cannot_be_changed():
    found = GOOD.model_copy(update={})
    assert all(float(f"{x:.6g}") == x for x in found.offset_mass.ravel())
    with pytest.raises(ValueError, match="read-only"):
        found.entropy[0, 0] = 1


def test_the_digest_is_of_the_measurement_not_of_the_machine():
    elsewhere = dataclasses.replace(MACHINE, cpu="another", load_average=3.0)
    moved = Profile.model_validate({**dict(GOOD), "environment": elsewhere})
    assert moved.digest == GOOD.digest and moved != GOOD
    other = Profile.model_validate({**dict(GOOD), "seed": 9})
    assert other.digest != GOOD.digest


def test_a_profile_of_version_0_1_0_is_read_and_written_unchanged():
    data = (Path(__file__).parent / "files" / "profile_0_1_0.json").read_bytes()
    found = Profile.from_json(data)
    assert json.loads(found.to_json()) == json.loads(data)
    assert found.digest.startswith("348c3eccdb486805") and found.forced == ForcedBlocks(1, 2)


def test_a_real_models_profile_is_small():
    found = profile(layers=30, heads=9, n=64, weights=16)
    assert len(found.to_json()) < 1_000_000


def test_a_file_survives_and_is_named_when_it_does_not(tmp_path):
    path = tmp_path / "new" / "profile.json"
    GOOD.save(path)
    assert Profile.load(path) == GOOD
    with pytest.raises(ArgumentError, match="XSK-102.file-unreadable"):
        Profile.load(tmp_path / "absent.json")
    with pytest.raises(ArgumentError, match="XSK-102.file-unwritable"):
        GOOD.save(path / "below" / "a_file.json")


def test_a_written_profile_fits_the_schema():
    jsonschema.validate(DOCUMENT, json.loads(schema_text("profile.schema.json")))


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": 2},
        {"surprise": 1},
        {"context": 64 * 7},
        {"context": 2**53, "block": 1},
        {"block": 0},
        {"entropy": [[1.0]]},
        {"entropy": [[1.0, 2.0, 3.0], [1.0]]},
        {"entropy": [["1", "2", "3"], ["1", "2", "3"]]},
        {"entropy": [[True, 1.0, 1.0], [1.0, 1.0, 1.0]]},
        {"entropy": None},
        {"need90": [[1.5, 0, 0], [0, 0, 0]]},
        {"outside": [[-0.1, 0, 0], [0, 0, 0]]},
        {"selector_weights": {"scalar": 1.0}},
        {"curves": {"rising": [[[0, 0, 0, 0, 0, 0, 1]] * 3] * 2}},
        {"curves": {"below": [[[0, 0, 0, 0, 0, 0, -1]] * 3] * 2}},
        {"curves": {"short": [[[0, 0]] * 3] * 2}},
        {"curves": {"\x1b[2J": [[[0] * 7] * 3] * 2}},
        {"selector_weights": {"flat": [[1, 2, 3], [1, 2, 3]]}},
        {"components": [[[0, 1, 2, 3, 4, 5, 6, 6]]] * 2},
        {"components": [[[0, 1, 2, 3, 4, 5, 6, 7.5]]] * 2},
        {"components": [[list(range(8))]]},
        {"always": {"sinks": 1}, "seed": "0"},
        {"always": {"sinks": "1", "locals": 2}},
        {"always": {"sinks": 1, "locals": 2, "more": 1}},
        {"environment": {**DOCUMENT["environment"], "home": "?"}},
        {"model": {**DOCUMENT["model"], "kv_heads": 2}},
        {"model": {**DOCUMENT["model"], "layers": 10**9}},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_impossible_profiles_are_refused(changes):
    with pytest.raises(ArgumentError, match="not a calibration profile") as caught:
        Profile.from_json(json.dumps(DOCUMENT | changes).encode())
    assert str(caught.value).replace("\n", "").isprintable()


def test_measurements_that_are_not_finite_are_refused_at_once():
    with pytest.raises(ValidationError, match="finite"):
        Profile.model_validate({**dict(GOOD), "entropy": np.full((2, 3), np.nan)})


@settings(max_examples=200)
@given(st.integers(0, len(GOOD.to_json()) - 1), st.binary(max_size=3))
def test_any_changed_bytes_are_refused_or_harmless(place, put):
    data = GOOD.to_json().encode()
    with contextlib.suppress(ArgumentError):
        Profile.from_json(data[:place] + put + data[place + 1 :])
