"""The committed schema files are those of the types."""

import pathlib

import pytest

from xsake.schemas import TYPES, main, schema_text

SCHEMAS = pathlib.Path(__file__).parents[1] / "schemas"


@pytest.mark.parametrize("name", TYPES)
def test_the_committed_schema_is_that_of_the_type(name):
    """Regenerate with `python -m xsake.schemas schemas`."""
    assert (SCHEMAS / name).read_text() == schema_text(name)


def test_the_command_writes_every_schema_and_needs_a_folder(tmp_path):
    assert main([str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(TYPES)
    assert main([]) == 2
