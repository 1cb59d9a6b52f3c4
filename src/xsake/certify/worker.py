"""The process of one target: cases in and answers out, one JSON line each, one at a time.

    python -m xsake.certify.worker FAMILY_MODULE TARGET DUMP_FOLDER

Started by `process.Worker` in the family's environment, with the family's environment variables.
"""

import importlib
import json
import os
import platform
import shutil
import sys
from pathlib import Path

import jax

import xsake
from xsake._provenance import installed_versions
from xsake.certify import build, build_selected
from xsake.certify.case import Case
from xsake.certify.family import Family, Target, load
from xsake.certify.record import Answer


def answer(case: Case, family: Family, target: Target, dump: Path) -> Answer:
    """Compile one case; whatever exception comes out is the compiler's answer."""
    _empty(dump)
    cost = None
    try:
        with build.replaced(case.constants):
            run, arguments, cost = _built(case, family)
            facts = family.compile(run, arguments, target, dump)
    except Exception as error:  # noqa: BLE001 - a refusal is a result, with its own words
        return Answer(verdict="refused", message=f"{type(error).__name__}: {error}", cost=cost)
    finally:
        jax.clear_caches()
    return Answer(verdict="compiled", facts=facts, cost=cost)


def _built(case: Case, family: Family) -> build.Built:
    if case.slots is None:
        return build.build(case, importlib.import_module(family.KERNELS), family.PLATFORM)
    return build_selected.build(case, importlib.import_module(family.SELECTED_KERNELS))


def versions(family: Family) -> dict[str, str]:
    """Versions that a certificate names, as this process sees them."""
    found = {"xsake": xsake.__version__, "python": platform.python_version()}
    return found | installed_versions(("jax", "jaxlib", "numpy", *family.PACKAGES))


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def main(arguments: list[str]) -> None:
    """Say hello, then answer cases from standard input until it ends."""
    module, name, folder = arguments
    # Compilers print: their words go to stderr, and only answers to the real stdout.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # unbuffered, so that words stay with the case they belong to
    family, dump = load(module), Path(folder)
    target = family.TARGETS[name]
    hello = {"device_kind": family.device_kind(target), "versions": versions(family)}
    replies.write(json.dumps(hello) + "\n")
    for line in sys.stdin:
        case = Case.model_validate_json(line)
        replies.write(answer(case, family, target, dump).model_dump_json() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
