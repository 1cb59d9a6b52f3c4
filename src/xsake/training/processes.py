"""Processes of a run: detection, start-up, barrier and exchange of arrays."""

import contextlib
import ipaddress
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from xsake.errors import ArgumentError, UnsupportedError, XsakeError

COORDINATOR, PROCESSES, PROCESS = "XSAKE_COORDINATOR", "XSAKE_PROCESSES", "XSAKE_PROCESS"
BIND = "XSAKE_BIND"
EXIT_FATAL = 2  # a restart of the same command would fail again
LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 61440, 4096  # coordinator ports of SLURM jobs: above the ephemeral range


class RendezvousError(UnsupportedError):
    """Processes that cannot connect; the next attempt uses another port."""

    is_transient = True


@dataclass(frozen=True)
class ProcessSpec:
    """Index of this process and address of the coordinator.

    Args:
        process: index of this process, from 0.
        processes: number of processes.
        coordinator: `host:port` of process 0; None for a single process.
        bind: address that process 0 listens on.
    """

    process: int = 0
    processes: int = 1
    coordinator: str | None = None
    bind: str = LOOPBACK

    @property
    def is_single(self) -> bool:
        """Whether there is only one process."""
        return self.processes == 1


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    heartbeat_seconds: int = 10,
    bind: str | None = None,
    start_seconds: int = 300,
) -> ProcessSpec:
    """Connect to the other processes of the run; a single process does nothing.

    Call it before anything touches a device. Defaults come from XSAKE_COORDINATOR, XSAKE_PROCESSES,
    XSAKE_PROCESS and XSAKE_BIND, or inside `srun` from SLURM's variables. The connection has no
    password: bind it to a trusted network.

    Args:
        coordinator: `host:port` of process 0.
        processes: number of processes.
        process: index of this process, from 0.
        heartbeat_seconds: without a heartbeat for this long a process counts as dead, and all end.
        bind: address that process 0 listens on; default: the loopback, 127.0.0.1.
        start_seconds: how long to wait for the others; then jaxlib aborts the process.
    """
    if heartbeat_seconds < 1 or start_seconds < 1:
        raise ArgumentError(
            "timeouts must be positive",
            got=f"{heartbeat_seconds=}, {start_seconds=}",
            expected="at least 1",
        )
    spec = detect_process(os.environ, coordinator, processes, process, bind)
    if spec.is_single:
        return spec
    if jax.distributed.is_initialized():
        raise ArgumentError(
            "the processes are already connected", expected="one call of start per process"
        )
    assert spec.coordinator is not None
    jax.config.update("jax_enable_preemption_service", True)
    if jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    port = spec.coordinator.rpartition(":")[2]
    host = f"[{spec.bind}]" if ":" in spec.bind else spec.bind
    try:
        jax.distributed.initialize(
            spec.coordinator,
            spec.processes,
            spec.process,
            # Everything is given here; ignore other cluster variables.
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{host}:{port}",
            heartbeat_timeout_seconds=heartbeat_seconds,
            initialization_timeout=start_seconds,
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"process {spec.process} of {spec.processes} cannot connect to the others at "
            f"{spec.coordinator}",
            got=str(error).partition("\n")[0][:300],
            expected="all processes started, a free port, and no device used before",
            fix=f"start all processes with the same {COORDINATOR} and {PROCESSES}",
        ) from error
    return spec


def detect_process(
    variables: Mapping[str, str],
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    bind: str | None = None,
) -> ProcessSpec:
    """Return index and coordinator of this process from arguments and environment.

    Args:
        variables: the environment.
        coordinator: `host:port` of process 0; None: from the environment, like all below.
        processes: number of processes.
        process: index of this process.
        bind: address that process 0 listens on.

    Example:
        >>> detect_process({"XSAKE_PROCESSES": "2", "XSAKE_PROCESS": "1"}, "127.0.0.1:5000")
        ProcessSpec(process=1, processes=2, coordinator='127.0.0.1:5000', bind='127.0.0.1')
    """
    slurm = _read_slurm(variables)
    address = coordinator or variables.get(COORDINATOR) or slurm.get(COORDINATOR)
    num_processes = _number(PROCESSES, processes, variables, slurm)
    index = _number(PROCESS, process, variables, slurm)
    if num_processes is None and index is None and address is None:
        return ProcessSpec()
    if num_processes is None:
        raise ArgumentError(
            "the number of processes is missing",
            got=f"coordinator {address}, process {index}",
            expected=f"processes= or {PROCESSES}",
        )
    if num_processes == 1 and index in (None, 0):
        return ProcessSpec()
    if num_processes < 1 or index is None or not 0 <= index < num_processes:
        raise ArgumentError(
            "the index of the process is missing or out of range",
            got=f"process {index} of {num_processes}",
            expected=f"process= or {PROCESS}, from 0 to processes - 1",
        )
    if address is None or not _is_address(address):
        raise ArgumentError(
            "the address of the coordinator is missing or invalid",
            got=address,
            expected=f"coordinator= or {COORDINATOR}, such as 127.0.0.1:5000",
        )
    bind_address = bind or variables.get(BIND) or LOOPBACK
    _check_bind(bind_address, address, index)
    return ProcessSpec(index, num_processes, address, bind_address)


def is_primary() -> bool:
    """Return whether this is process 0, which prints and writes for all."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process has called this.

    Args:
        name: of the barrier; processes at different barriers raise an error.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def gather(values: np.ndarray) -> np.ndarray:
    """Return the values of all processes along a new leading axis.

    Args:
        values: of this process, at most 32 bits each; same shape and dtype on all processes.
    """
    if values.dtype.itemsize > 4:
        raise ArgumentError(
            "values of 64 bits cannot be gathered without loss",
            got=values.dtype,
            expected="at most 32 bits each",
        )
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


def _number(
    name: str, given: int | None, variables: Mapping[str, str], slurm: Mapping[str, str]
) -> int | None:
    if given is not None:
        return given
    text = variables.get(name) or slurm.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ArgumentError(f"{name} is not a number", got=repr(text), expected="such as 2")
    return int(text)


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
    return bool(host and colon) and is_port and not re.search(r"[\s/@]", host)


def _check_bind(bind: str, coordinator: str, process: int) -> None:
    try:
        is_local = ipaddress.ip_address(bind).is_loopback
    except ValueError as error:
        raise ArgumentError(
            "the bind address is not an IP address", got=bind, expected="such as 127.0.0.1"
        ) from error
    if process == 0 and is_local and not _is_loopback(coordinator.rpartition(":")[0]):
        raise ArgumentError(
            "process 0 listens on the loopback, but the coordinator is another host",
            got=f"coordinator {coordinator}, bind {bind}",
            expected="an address of a trusted network",
            fix=f"set {BIND} to this host's address there, or to 0.0.0.0 for every network",
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a host name


def _read_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Return XSAKE variables derived from SLURM's; only a job step of `srun` has several tasks."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    if any(not variables.get(name) for name in names):
        return {}
    tasks, process, nodes, job = (variables[name] for name in names)
    values = {PROCESSES: tasks, PROCESS: process}
    if job.isdigit():
        step = variables.get("SLURM_STEP_ID", "")
        port = _FIRST_PORT + (int(job) + (int(step) if step.isdigit() else 0)) % _PORTS
        is_one_machine = variables.get("SLURM_STEP_NUM_NODES") == "1"
        values[COORDINATOR] = f"{LOOPBACK if is_one_machine else _first_node(nodes)}:{port}"
    return values


def _first_node(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    Example:
        >>> _first_node("gpu[007,010-012]-a,login1")
        'gpu007-a'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it may be empty
    return re.sub(r"\[([^,\]-]+)[^\]]*\]", r"\1", first.group())
