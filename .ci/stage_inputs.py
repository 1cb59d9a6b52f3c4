"""Which inputs a stage of the gate last passed with, so that it runs only if they changed.

    python .ci/stage_inputs.py changed NAME    exit code 0 if the stage has to run, 1 if not
    python .ci/stage_inputs.py passed NAME     write today's digest to .ci/passed.json

The digest is that of all files of a stage which git tracks or would track.
"""

import hashlib
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORD = ROOT / ".ci/passed.json"
INPUTS = {
    "showcase": ("showcase", "schemas", "certificates", "benchmarks/results"),
    "certify-smoke": (
        "src/xsake/certify", "src/xsake/kernels", "src/xsake/layout", "src/xsake/masks",
        "requirements/dev.txt", ":!src/xsake/kernels/*native*",  # no certificate is of a CPU
    ),
}  # fmt: skip


def digest(stage: str) -> str:
    """SHA-256 of the names and contents of a stage's files."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    names = subprocess.check_output([*command, *INPUTS[stage]], cwd=ROOT, text=True)
    files = sorted({name for name in names.split("\0") if (ROOT / name).is_file()})
    content = [(name, hashlib.sha256((ROOT / name).read_bytes()).hexdigest()) for name in files]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def main(action: str, stage: str) -> int:
    """Run one of the two commands."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if action == "changed":
        return int(record.get(stage) == digest(stage))
    record[stage] = digest(stage)
    RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
