"""Processes of a run: detection, start-up, barrier and exchange of arrays."""

import contextlib
import ipaddress
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Annotated

import jax
import numpy as np
from jax.experimental import multihost_utils
from pydantic import Field, IPvAnyAddress, ValidationError, model_validator

from xsake._schema import Frozen, describe_first
from xsake.errors import ArgumentError, UnsupportedError, XsakeError

COORDINATOR, PROCESSES, PROCESS = "XSAKE_COORDINATOR", "XSAKE_PROCESSES", "XSAKE_PROCESS"
BIND = "XSAKE_BIND"
EXIT_FATAL = 2  # a restart of the same command would fail again
LOOPBACK = "127.0.0.1"
_ADDRESS = r"^([^\s/@:]+|\[[^\s/@\]]+\]):[1-9][0-9]{0,4}$"


class RendezvousError(UnsupportedError):
    """Processes that cannot connect; the next attempt uses another port."""

    is_transient = True


class ProcessSpec(Frozen):
    """Index of this process, number of processes, and addresses of process 0."""

    process: Annotated[int, Field(ge=0)] = 0
    processes: Annotated[int, Field(ge=1)] = 1
    coordinator: Annotated[str, Field(pattern=_ADDRESS)] | None = None
    bind: IPvAnyAddress = ipaddress.ip_address(LOOPBACK)

    @model_validator(mode="after")
    def _check(self) -> "ProcessSpec":
        if self.process >= self.processes:
            raise ValueError(f"process {self.process} of {self.processes} is out of range")
        if self.processes == 1:
            return self
        if self.coordinator is None or int(self.coordinator.rpartition(":")[2]) >= 2**16:
            raise ValueError(f"{self.coordinator} is not the address of a coordinator")
        host = self.coordinator.rpartition(":")[0].strip("[]")
        if self.process == 0 and self.bind.is_loopback and not _is_loopback(host):
            raise ValueError(
                f"process 0 listens on the loopback, but the coordinator is {host}: set {BIND} to "
                "this host's address in a trusted network, or to 0.0.0.0 for every network"
            )
        return self


def start(*, heartbeat_seconds: int = 10) -> ProcessSpec:
    """Connect to the other processes of the run; a single process does nothing.

    Call it before anything touches a device. The processes are described by XSAKE_COORDINATOR,
    XSAKE_PROCESSES, XSAKE_PROCESS and XSAKE_BIND, or inside `srun` by SLURM's variables. The
    connection has no password: bind it to a trusted network.

    Args:
        heartbeat_seconds: without a heartbeat for this long a process counts as dead, and all end.
    """
    if heartbeat_seconds < 1:
        raise ArgumentError(
            "heartbeat", "heartbeat_seconds must be positive", got=heartbeat_seconds
        )
    spec = detect_process(os.environ)
    if spec.processes == 1:
        return spec
    assert spec.coordinator is not None
    jax.config.update("jax_enable_preemption_service", True)
    if jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    host = f"[{spec.bind}]" if spec.bind.version == 6 else f"{spec.bind}"
    try:
        jax.distributed.initialize(
            spec.coordinator,
            spec.processes,
            spec.process,
            # jax's own detection would listen on every network, and use one device per process.
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{host}:{spec.coordinator.rpartition(':')[2]}",
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    except RuntimeError as error:
        raise RendezvousError(
            "rendezvous",
            f"process {spec.process} of {spec.processes} cannot connect at {spec.coordinator}",
            got=str(error).partition("\n")[0][:300],
            expected="all processes started once, a free port, and no device used before",
            fix=f"start all processes with the same {COORDINATOR} and {PROCESSES}",
        ) from error
    return spec


def detect_process(variables: Mapping[str, str]) -> ProcessSpec:
    """Return index and coordinator of this process from its environment.

    Example:
        >>> spec = detect_process({
        ...     "XSAKE_PROCESSES": "2", "XSAKE_PROCESS": "1", "XSAKE_COORDINATOR": "127.0.0.1:5000"
        ... })
        >>> spec.process, spec.processes
        (1, 2)
    """
    names = {"processes": PROCESSES, "process": PROCESS, "coordinator": COORDINATOR, "bind": BIND}
    given = {key: variables[name] for key, name in names.items() if variables.get(name)}
    values = _read_slurm(variables) | given
    if not values.keys() - {"bind"} or values == {"processes": "1"}:
        return ProcessSpec()
    try:
        spec = ProcessSpec.model_validate({"processes": None, "process": None} | values)
    except ValidationError as error:
        raise ArgumentError(
            "process-variables",
            "the processes of the run are not described by their variables",
            got=f"{describe_first(error)}; {values}",
            expected=f"{PROCESSES} from 1, {PROCESS} from 0, {COORDINATOR} such as 127.0.0.1:5000",
            fix="set them for every process, or start the processes with `xsake launch`",
        ) from error
    return spec if spec.processes > 1 else ProcessSpec()


def _read_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the description of a job step; only a step of `srun` has several tasks."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    tasks, process, nodes, job = (variables.get(name, "") for name in names)
    if not (tasks and process and nodes and job):
        return {}
    numbers = [int(text) for text in (job, variables.get("SLURM_STEP_ID", "")) if text.isdecimal()]
    port = 61440 + sum(numbers) % 4096  # above the ephemeral range
    # The first host of a list such as gpu[007,010-012]-a,login1 is gpu007-a.
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    host = re.sub(r"\[([^,\]-]+)[^\]]*\]", r"\1", first)
    is_one_host = variables.get("SLURM_STEP_NUM_NODES") == "1"
    coordinator = f"{LOOPBACK if is_one_host else host}:{port}"
    return {"processes": tasks, "process": process, "coordinator": coordinator}


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name


def is_primary() -> bool:
    """Return whether this is process 0, which prints and writes for all."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process has called this; other names elsewhere are an error."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def gather(values: np.ndarray) -> np.ndarray:
    """Return the values of all processes along a new leading axis, at most 32 bits each."""
    if values.dtype.itemsize > 4:
        what = "values of 64 bits cannot be gathered without loss"
        raise ArgumentError("gather-width", what, got=values.dtype, expected="at most 32 bits each")
    return np.asarray(multihost_utils.process_allgather(values))


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit immediately on an error if there are other processes; see `exit_code`.

    A regular interpreter shutdown would wait minutes for processes that wait for this one.
    `SystemExit` is not affected.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        if isinstance(error, XsakeError):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code(error))


def exit_code(error: BaseException) -> int:
    """Return 2 for errors that a restart cannot fix, 130 for Ctrl-C, and 1 otherwise."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    is_final = isinstance(error, XsakeError) and not error.is_transient
    return EXIT_FATAL if is_final else 1
