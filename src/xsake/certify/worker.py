"""Worker process of one target: reads cases and writes results, one JSON line each.

    python -m xsake.certify.worker FAMILY_MODULE TARGET DUMP_FOLDER

Started by `process.Worker` in the family's environment, with the family's environment variables.
"""

import json
import os
import platform
import shutil
import sys
from pathlib import Path

import jax

import xsake
from xsake._provenance import installed_versions
from xsake.certify import build
from xsake.certify.family import Target, TargetFamily, load_family
from xsake.certify.record import CompileCase, CompileResult


def compile_case(
    case: CompileCase, family: TargetFamily, target: Target, dump: Path
) -> CompileResult:
    """Compile one case; exceptions become rejections."""
    shutil.rmtree(dump)
    dump.mkdir()
    cost = None
    try:
        with build.override_constants(case.constants):
            run, arguments, cost = build.build_for_family(case, family)
            facts = family.compile(run, arguments, target, dump)
    except Exception as error:  # noqa: BLE001 - a rejection is a result
        message = f"{type(error).__name__}: {error}"
        return CompileResult(verdict="refused", message=message, cost=cost)
    finally:
        jax.clear_caches()
    return CompileResult(verdict="compiled", facts=facts, cost=cost)


def versions(family: TargetFamily) -> dict[str, str]:
    """Return the versions of a certificate."""
    base = {"xsake": xsake.__version__, "python": platform.python_version()}
    return base | installed_versions(("jax", "jaxlib", "numpy", *family.PACKAGES))


def main(arguments: list[str]) -> None:
    """Write the device and versions, then compile cases from stdin until it ends."""
    module, name, folder = arguments
    # Compilers print to stdout: redirect it to stderr, and keep the real one for results.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # unbuffered, so that output stays with its case
    family, dump = load_family(module), Path(folder)
    target = family.TARGETS[name]
    hello = {"device_kind": family.device_kind(target), "versions": versions(family)}
    replies.write(json.dumps(hello) + "\n")
    for line in sys.stdin:
        case = CompileCase.model_validate_json(line)
        replies.write(compile_case(case, family, target, dump).model_dump_json() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
