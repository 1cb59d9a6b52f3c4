"""Layouts in files: read back as written, and nothing else is believed."""

import contextlib
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.expansion import block_grids, listed_items
from xsake.errors import XsakeError
from xsake.layout import BlockLayout
from xsake.masks import Causal, FromFunction, PerHead, Sinks, Window

GOOD = BlockLayout.from_mask(
    PerHead([Causal(), Causal() & (Window(15, 0) | Sinks(2))]),
    q_tokens=60,
    kv_tokens=50,
    block_q=16,
    block_kv=8,
).to_json()

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from([2**31, 2**62, 10**30, -(10**30)])
    | st.floats()
    | st.text(max_size=5),
    lambda part: (
        st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=4), part, max_size=3)
    ),
    max_leaves=5,
)


@given(block_grids())
def test_layouts_are_read_back_as_written(choice):
    chosen, sizes = choice
    layout = BlockLayout.from_block_mask(chosen, mask=Causal() | Sinks(1), **sizes)
    again = BlockLayout.from_json(layout.to_json())
    assert again.is_static
    assert again.mask == layout.mask
    assert again.grid == layout.grid
    assert listed_items(again) == listed_items(layout)


def test_the_text_is_small_and_carries_its_mask():
    layout = BlockLayout.from_mask(Causal(), q_tokens=131_072)
    text = layout.traced().to_json()
    assert len(text) < 25_000
    again = BlockLayout.from_json(text)
    assert again.mask == Causal()
    np.testing.assert_array_equal(again.kv_block, layout.kv_block)


def test_masks_that_cannot_be_described_are_refused():
    layout = BlockLayout.from_mask(
        FromFunction(lambda q, kv: kv <= q), q_tokens=16, block_q=8, block_kv=8
    )
    with pytest.raises(XsakeError, match="XSK-301.mask-not-serializable"):
        layout.to_json()
    holes = BlockLayout.from_block_mask(np.eye(4, dtype=bool), block_q=8, block_kv=8)
    with pytest.raises(XsakeError, match="XSK-301.mask-not-serializable"):
        holes.resize(16, 16).to_json()


def refused(text, **keywords):
    """The text raises one of our errors without allocating on its word."""
    tracemalloc.start()
    try:
        with pytest.raises(XsakeError):
            BlockLayout.from_json(text, **keywords)
        return tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("end", range(0, len(GOOD) - 2, 11))
def test_truncated_text_is_refused(end):
    assert refused(GOOD[:end])


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"version": True},
        {"format": "other"},
        {"q_tokens": 2**30},
        {"q_tokens": 10**30},
        {"q_tokens": 60.0},
        {"kv_tokens": 2**30, "block_kv": 1, "rows": [[0, 2**30, 0]] * 8},
        {"kv_tokens": 2**30, "block_kv": 1, "rows": [[0, 2**24, 0]] * 8},
        {"heads": 2**30},
        {"batch": 2**30, "heads": 2**30},
        {"block_q": 1},
        {"block_q": 0},
        {"block_kv": -1},
        {"heads": True},
        {"rows": None},
        {"rows": {}},
        {"rows": [[0, 1]] * 8},
        {"rows": [[0, 0, 0]] * 8},
        {"rows": [[6, 2, 1]] * 8},
        {"rows": [[0, 1, 2]] * 8},
        {"rows": [[0, 1, True]] * 8},
        {"rows": [[-1, 1, 1]] * 8},
        {"rows": [[2**70, 1, 1]] * 8},
        {"rows": [[1, 1, 1, 0, 1, 1]] * 8},
        {"rows": [[0, 2, 1, 1, 1, 1]] * 8},
        {"rows": [[0, 7, 0]] * 8},
        {"rows": [[0, 3, 0]] * 8},
        {"rows": [["0", "1", "0"]] * 8},
        {"mask": 3},
        {"mask": {}},
        {"mask": {"type": "Unknown"}},
    ],
    ids=str,
)
def test_wrong_content_is_refused_before_it_costs_memory(changes):
    assert refused(json.dumps(json.loads(GOOD) | changes))


def test_more_items_than_allowed_are_refused():
    items = BlockLayout.from_json(GOOD).items
    assert BlockLayout.from_json(GOOD, max_items=items).items == items
    assert refused(GOOD, max_items=items - 1)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[" * 100_000, '{"a": ' * 50_000, "1" * 5000, "NaN", "\x00", "{}"]
)
def test_text_that_is_no_layout_is_refused(text):
    assert refused(text)


@settings(max_examples=60)
@given(st.sampled_from(sorted(json.loads(GOOD))), anything)
def test_any_value_in_any_field_is_refused_or_harmless(field, value):
    document = json.loads(GOOD) | {field: value}
    with contextlib.suppress(XsakeError):
        BlockLayout.from_json(json.dumps(document)).validate()


@settings(max_examples=60)
@given(st.integers(0, len(GOOD) - 1), st.characters(codec="ascii"))
def test_any_changed_character_is_refused_or_harmless(place, character):
    text = GOOD[:place] + character + GOOD[place + 1 :]
    with contextlib.suppress(XsakeError):
        BlockLayout.from_json(text).validate()
