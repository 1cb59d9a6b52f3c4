"""to_dict and from_dict: a round trip through JSON, and nothing else gets through."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.masks import examples
from xsake.errors import MaskError
from xsake.masks import (
    AbstractMask,
    Causal,
    FromFunction,
    PerHead,
    Random,
    Segments,
    from_dict,
    to_dict,
)
from xsake.masks.serialization import MAX_TOKENS

WITHOUT_FUNCTIONS = [mask for mask in examples.ALL if "FromFunction" not in repr(mask)]


@pytest.mark.parametrize("mask", WITHOUT_FUNCTIONS, ids=repr)
def test_round_trip_through_json(mask):
    assert from_dict(json.loads(json.dumps(to_dict(mask)))) == mask


@given(mask=examples.composites())
def test_round_trip_of_composites(mask):
    assert from_dict(json.loads(json.dumps(to_dict(mask)))) == mask


def test_functions_are_refused_wherever_they_hide():
    function = FromFunction(examples.is_odd_sum)
    for mask in (function, ~function, Causal() & function, PerHead([Causal(), function])):
        with pytest.raises(MaskError, match="XSK-201.not-serializable"):
            to_dict(mask)


def _deep(levels):
    description = {"mask": "Causal"}
    for _ in range(levels):
        description = {"mask": "Not", "part": description}
    return description


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"mask": "Nothing"},
        {"mask": "AbstractMask"},
        {"mask": "FromFunction", "function": "print"},
        {"mask": 3},
        {"mask": "Causal", "extra": 1},
        {"mask": "Window", "left": 1},
        {"mask": "Window", "left": "1", "right": 0},
        {"mask": "Window", "left": 1.0, "right": 0},
        {"mask": "Window", "left": -1, "right": 0},
        {"mask": "Chunked", "size": None},
        {"mask": "Random", "keep": "1", "seed": 0, "cell": 1},
        {"mask": "And", "parts": []},
        {"mask": "And", "parts": [{"mask": "Causal"}]},
        {"mask": "And", "parts": {"mask": "Causal"}},
        {"mask": "PerHead", "members": []},
        {"mask": "PerHead", "members": [{"mask": "PerHead", "members": [{"mask": "Full"}]}]},
        {"mask": "Segments", "q_ids": [[0, 2**60]], "kv_ids": []},
        {"mask": "Segments", "q_ids": [[0, MAX_TOKENS], [1, 1]], "kv_ids": []},
        {"mask": "Segments", "q_ids": [[0, -1]], "kv_ids": []},
        {"mask": "Segments", "q_ids": [[2**40, 1]], "kv_ids": []},
        {"mask": "Segments", "q_ids": [[True, 1]], "kv_ids": []},
        {"mask": "Segments", "q_ids": 5, "kv_ids": []},
        {"mask": "Explicit", "shape": [2**40, 2**40], "bits": "AA=="},
        {"mask": "Explicit", "shape": [2, 2], "bits": "not base64!"},
        {"mask": "Explicit", "shape": [2, 2], "bits": "é"},
        {"mask": "Explicit", "shape": [2, -2], "bits": ""},
        {"mask": "Explicit", "shape": [2], "bits": "AA=="},
        {"mask": "Explicit", "shape": [0, 2, 2], "bits": ""},
        _deep(500),
    ],
    ids=lambda description: str(description)[:60],
)
def test_malformed_descriptions_are_refused(description):
    with pytest.raises(MaskError):
        from_dict(description)


def test_a_description_must_be_an_object(unchecked_types):
    for description in (None, [], "Causal", 3):
        with pytest.raises(MaskError):
            from_dict(description)


def test_an_integer_share_is_a_share():
    assert from_dict({"mask": "Random", "keep": 1, "seed": 0, "cell": 8}) == Random(1.0, cell=8)


def _nested(inner):
    return st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    _nested,
    max_leaves=8,
)


@given(mask=st.sampled_from(WITHOUT_FUNCTIONS), data=st.data())
def test_a_changed_value_gives_a_mask_or_a_mask_error(mask, data):
    description = to_dict(mask)
    key = data.draw(st.sampled_from(sorted(description)))
    description[key] = data.draw(_json)
    with contextlib.suppress(MaskError):
        assert isinstance(from_dict(description), AbstractMask)


def test_runs_are_written_short():
    described = to_dict(Segments([4] * 5000 + [-1] * 3))
    assert described["q_ids"] == [[4, 5000], [-1, 3]]
