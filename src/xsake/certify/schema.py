"""The JSON Schema of a certificate, written by `python -m xsake.certify.schema schemas/`."""

import json
import sys
from pathlib import Path

from xsake.certify.record import Certificate

FILE_NAME = "certificate.schema.json"


def schema_text() -> str:
    """The schema file's exact content."""
    schema = Certificate.model_json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    """Write the schema into the folder named by the only argument."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m xsake.certify.schema FOLDER\n")
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE_NAME).write_text(schema_text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
