"""Runs inside of this process: what `xsake train` does, without the seconds a new process takes."""

import io
import logging
from collections.abc import Mapping
from typing import Any

from typer.testing import CliRunner

from benchmarks.faults import injected
from benchmarks.faults.watching import Ended
from xsake.cli import app


def train(arguments: list[str], inject: Mapping[str, Any] | None) -> Ended:
    """The command to its end.

    Args:
        arguments: of `xsake`.
        inject: what goes wrong inside; nothing that changes the whole process.
    """
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("xsake").addHandler(handler)
    try:
        with injected.for_a_while(dict(inject or {})):
            done = CliRunner().invoke(app, arguments)
    finally:
        logging.getLogger("xsake").removeHandler(handler)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ended(done.exit_code, done.output + log.getvalue())
