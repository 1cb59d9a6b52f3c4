"""The JSON Schema of a run's record, written by `python -m xsake.training.schema schemas/`."""

import sys

from xsake.bench.json_schema import text_of, write_by_command
from xsake.training.config import TrainingConfig

FILE_NAME = "training.schema.json"


def schema_text() -> str:
    """The schema file's exact content."""
    return text_of(TrainingConfig)


if __name__ == "__main__":
    sys.exit(write_by_command(FILE_NAME, schema_text(), sys.argv[1:]))
