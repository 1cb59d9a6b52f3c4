"""JSON Schemas of the files of XSAKE: `python -m xsake.schemas schemas/`."""

import importlib
import json
import sys
from pathlib import Path

TYPES = {
    "benchmark_row.schema.json": "xsake.benchmarking.rows:BenchmarkRow",
    "certificate.schema.json": "xsake.certify.record:Certificate",
    "evaluation.schema.json": "xsake.evaluation.record:EvaluationReport",
    "generation_output.schema.json": "xsake.model.prompt_file:OutputLine",
    "generation_prompt.schema.json": "xsake.model.prompt_file:PromptLine",
    "page_audit.schema.json": "xsake.evaluation.page_audit:PageAudit",
    "plan.schema.json": "xsake.hads.plan:SparsityPlan",
    "profile.schema.json": "xsake.hads.profile:Profile",
    "task_report.schema.json": "xsake.evaluation.tasks.record:TaskReport",
    "training.schema.json": "xsake.training.config:TrainingConfig",
}


def schema_text(name: str) -> str:
    """Return the content of a schema file.

    Args:
        name: of the file, a key of `TYPES`.

    Returns:
        JSON with sorted keys, so that the file changes only when the type does.

    Example:
        >>> '"budget"' in schema_text("benchmark_row.schema.json")
        True
    """
    module, _, model = TYPES[name].partition(":")
    schema = getattr(importlib.import_module(module), model).model_json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    """Write all schema files into a folder; return the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m xsake.schemas FOLDER\n")
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name in TYPES:
        (folder / name).write_text(schema_text(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
