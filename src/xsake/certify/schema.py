"""The JSON Schema of a certificate, written by `python -m xsake.certify.schema schemas/`."""

import sys

from xsake.bench.json_schema import text_of, write_by_command
from xsake.certify.record import Certificate

FILE_NAME = "certificate.schema.json"


def schema_text() -> str:
    """The schema file's exact content."""
    return text_of(Certificate)


if __name__ == "__main__":
    sys.exit(write_by_command(FILE_NAME, schema_text(), sys.argv[1:]))
