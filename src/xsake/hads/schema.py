"""The JSON Schemas of profiles and plans, written by `python -m xsake.hads.schema schemas/`."""

import sys

from xsake.bench.json_schema import text_of, write_by_command
from xsake.hads.plan import SparsityPlan
from xsake.hads.profile import Profile

KINDS = {"profile.schema.json": Profile, "plan.schema.json": SparsityPlan}


def schema_text(name: str) -> str:
    """The exact content of a schema file, by its name in `KINDS`."""
    return text_of(KINDS[name])


if __name__ == "__main__":
    sys.exit(max(write_by_command(name, schema_text(name), sys.argv[1:]) for name in KINDS))
