"""Traces of a few steps, and what the command says about them."""

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from xsake.cli import app
from xsake.errors import ArgumentError
from xsake.observability.profiler import Profiler, StepRange, find_traces


@pytest.mark.parametrize("text", ["", "5", "5:5", "9:3", "0:5000", "steps=1:2:3", "-1:3", "٣:٤"])
def test_steps_that_cannot_be_traced_are_refused(text):
    with pytest.raises(ArgumentError):
        StepRange.parse(text)


def test_the_steps_that_were_named_are_traced_and_the_command_finds_them(tmp_path):
    profiler = Profiler(tmp_path, StepRange(2, 4))
    for step in range(6):
        profiler.before(step)
        profiler.after(step, jax.jit(lambda x: x @ x)(jnp.ones((8, 8))))
    profiler.close()
    [found] = find_traces(tmp_path)
    assert any(found.iterdir())
    told = CliRunner().invoke(app, ["profile", "show", str(tmp_path)])
    assert told.exit_code == 0 and str(found) in told.output and "perfetto" in told.output


def test_a_run_without_a_trace_says_how_to_make_one(tmp_path):
    Profiler(tmp_path, None).before(0)
    told = CliRunner().invoke(app, ["profile", "show", str(tmp_path)])
    assert told.exit_code == 2 and "--profile steps=10:15" in told.output
