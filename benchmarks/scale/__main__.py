"""Compiles the 8B train step for many chips: python -m benchmarks.scale --target v5p-256.

python -m benchmarks.scale --target h100-64 --fsdp 8 --batch 8

Needs libtpu or the CUDA plugin in addition to jax, and no chip. One case is one process.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

# Before jax starts: no device is touched, and libtpu does not lock the machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

from benchmarks.scale.cases import MACHINES, case_of
from benchmarks.scale.compiling import compiled_case, record, write


def main() -> None:
    """Compile one case and keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="v5p-256", choices=tuple(MACHINES))
    parser.add_argument("--attention", default="mask", choices=("dense", "mask"))
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--fsdp", type=int, default=32)
    parser.add_argument("--tensor", type=int, default=8)
    parser.add_argument("--context-shards", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="sequences of one update")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--text", type=Path, help="leave the compiled program here")
    given = parser.parse_args()
    mesh = {
        "data": given.data,
        "fsdp": given.fsdp,
        "tensor": given.tensor,
        "context": given.context_shards,
    }
    case = case_of(
        given.target, given.attention, mesh, given.batch, accumulation=given.accumulation
    )
    outcome = compiled_case(case, given.text)
    command = shlex.join(["python", "-m", "benchmarks.scale", *sys.argv[1:]])
    path = write(record(case, outcome, command))
    print(path.name, outcome["verdict"], outcome["seconds"], outcome.get("memory"))


if __name__ == "__main__":
    main()
