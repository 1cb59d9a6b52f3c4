"""Processes of tests, forked from one server that has imported JAX: a start costs 3 to 8 s of CPU.

Targets are functions of modules that create no array when they are imported: a process chooses its
devices and connects to the others before the first one.
"""

import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["jax", "xsake.training.checkpointing"])


def run(
    target: Callable[..., None],
    *arguments: object,
    processes: int = 1,
    devices: int = 1,
    seconds: float = 150,
) -> None:
    """Run `target(*arguments)` in new processes; raise if one of them fails or takes too long.

    With several `processes`, they are connected by `jax.distributed` first.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}" if processes > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(processes)]
        children = [
            start(
                target, *arguments, output=output, place=(address, processes, rank), devices=devices
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            for child in children:
                child.join(seconds)
        finally:
            for child in children:
                child.kill()
                child.join()
        for rank, child in enumerate(children):
            assert child.exitcode == 0, f"process {rank}: {outputs[rank].read_text()[-3000:]}"


def start(
    target: Callable[..., None],
    *arguments: object,
    output: str | Path = os.devnull,
    place: tuple[str | None, int, int] = (None, 1, 0),
    devices: int = 1,
) -> multiprocessing.process.BaseProcess:
    """Start one process; `place` is the address of process 0, the number of processes, the rank."""
    child = _CONTEXT.Process(target=_execute, args=(output, place, devices, target, arguments))
    child.start()
    return child


def _execute(output, place, devices, target, arguments) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax

    code = 1
    try:
        address, count, rank = place
        if address is not None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(address, count, rank)
        target(*arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - reported by the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # other processes may still be connected
