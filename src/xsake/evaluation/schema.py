"""The JSON Schema of a report, written by `python -m xsake.evaluation.schema schemas/`."""

import sys

from xsake.bench.json_schema import text_of, write_by_command
from xsake.evaluation.record import Report

FILE_NAME = "evaluation.schema.json"


def schema_text() -> str:
    """The schema file's exact content."""
    return text_of(Report)


if __name__ == "__main__":
    sys.exit(write_by_command(FILE_NAME, schema_text(), sys.argv[1:]))
