"""The schema files are what the types say."""

import pathlib

import pytest

from xsake.hads.schema import KINDS, schema_text

SCHEMAS = pathlib.Path(__file__).parents[2] / "schemas"


@pytest.mark.parametrize("name", KINDS)
def test_schema_files_are_what_the_types_say(name):
    """Regenerate with `python -m xsake.hads.schema schemas`."""
    assert (SCHEMAS / name).read_text() == schema_text(name)
