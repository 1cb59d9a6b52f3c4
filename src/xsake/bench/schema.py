"""The JSON Schema of a row, written by `python -m xsake.bench.schema schemas/`."""

import sys

from xsake.bench.json_schema import text_of, write_by_command
from xsake.bench.rows import BenchmarkRow

FILE_NAME = "benchmark_row.schema.json"


def schema_text() -> str:
    """The schema file's exact content."""
    return text_of(BenchmarkRow)


if __name__ == "__main__":
    sys.exit(write_by_command(FILE_NAME, schema_text(), sys.argv[1:]))
