"""Simulated devices: fake ones for meshes, and eight that compute, in processes of their own."""

import dataclasses
import os
import socket
import subprocess
import sys
import textwrap

# The same settings that pytest and conftest.py give to tests in this process.
STRICT = """
import warnings
warnings.simplefilter("error")
from jaxtyping import install_import_hook
install_import_hook(
    "xsake",
    "beartype.beartype(conf=beartype.BeartypeConf(strategy=beartype.BeartypeStrategy.On))",
)
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_numpy_rank_promotion", "raise")
"""
COUNT = "--xla_force_host_platform_device_count="


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What a mesh wants to know of a device."""

    id: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"
    slice_index: int | None = None
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


def machines(processes: int, each: int, **more) -> list[FakeDevice]:
    return [FakeDevice(i, i // each, **more) for i in range(processes * each)]


def run_on_eight_devices(code: str, last_words: str) -> str:
    """What the code prints, `last_words` included; its error otherwise."""
    run = subprocess.run(
        [sys.executable, "-c", STRICT + textwrap.dedent(code)],
        env={**os.environ, "XLA_FLAGS": COUNT + "8"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0 and last_words in run.stdout, run.stdout + run.stderr[-4000:]
    return run.stdout


def run_in_two_processes(code: str, last_words: str) -> None:
    """Runs the code twice at once, with four devices each; its arguments: an address, a number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", STRICT + textwrap.dedent(code), address, str(number)],
            env={**os.environ, "XLA_FLAGS": COUNT + "4"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=3000)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    for process, text in zip(both, told, strict=True):
        assert process.returncode == 0 and last_words in text, text[-4000:]
