"""The processes of one run: how they find each other, wait for each other and share numbers."""

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
CANNOT_RUN = 2  # exit code: the same command would be refused again
LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 61440, 4096  # where SLURM's jobs meet: above what systems hand out themselves


class MeetingError(UnsupportedError):
    """Processes that cannot meet: the next attempt has another port."""

    is_transient = True


@dataclass(frozen=True)
class Place:
    """One process among the processes of a run.

    Args:
        process: its number, from 0.
        processes: how many there are.
        coordinator: `host:port` where they meet; None for a process that is alone.
        bind: address that process 0 listens on.
    """

    process: int = 0
    processes: int = 1
    coordinator: str | None = None
    bind: str = LOOPBACK

    @property
    def is_alone(self) -> bool:
        """Nobody to meet."""
        return self.processes == 1


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    heartbeat_seconds: int = 10,
    bind: str | None = None,
    start_seconds: int = 300,
) -> Place:
    """Meet the other processes of the run; one that is alone does nothing.

    Must come before anything that touches a device. What is not given comes from the variables
    XSAKE_COORDINATOR, XSAKE_PROCESSES, XSAKE_PROCESS and XSAKE_BIND, or else from SLURM's own,
    inside `srun`. The connection has no password: bind it to a network that you trust.

    Args:
        coordinator: `host:port` of process 0.
        processes: how many there are.
        process: number of this one, from 0.
        heartbeat_seconds: a process that is silent for so long is dead, and the others end too.
        bind: address that process 0 listens on; the loopback, 127.0.0.1, unless told.
        start_seconds: how long to wait for the others; then jaxlib aborts the process.
    """
    if heartbeat_seconds < 1 or start_seconds < 1:
        raise ArgumentError(
            "the seconds of processes must be positive",
            got=f"{heartbeat_seconds=}, {start_seconds=}",
            expected="at least 1",
        )
    place = find_place(os.environ, coordinator, processes, process, bind)
    if place.is_alone:
        return place
    if jax.distributed.is_initialized():
        raise ArgumentError(
            "the processes have met already", expected="one call of start in the life of a process"
        )
    assert place.coordinator is not None
    jax.config.update("jax_enable_preemption_service", True)
    if jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    port = place.coordinator.rpartition(":")[2]
    host = f"[{place.bind}]" if ":" in place.bind else place.bind
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process,
            # All is said here; what else the environment says must not add to it.
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{host}:{port}",
            heartbeat_timeout_seconds=heartbeat_seconds,
            initialization_timeout=start_seconds,
        )
    except RuntimeError as error:
        raise MeetingError(
            f"process {place.process} of {place.processes} cannot meet the others at "
            f"{place.coordinator}",
            got=str(error).partition("\n")[0][:300],
            expected="all processes started, the port free, and no device touched before",
            fix=f"start all of them with the same {COORDINATOR} and {PROCESSES}",
        ) from error
    return place


def find_place(
    variables: Mapping[str, str],
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    bind: str | None = None,
) -> Place:
    """Which process this is, from what was given and from the environment.

    Args:
        variables: the environment.
        coordinator: `host:port` of process 0; None asks the environment, as below.
        processes: how many there are.
        process: number of this one.
        bind: address that process 0 listens on.

    Example:
        >>> find_place({"XSAKE_PROCESSES": "2", "XSAKE_PROCESS": "1"}, "127.0.0.1:5000")
        Place(process=1, processes=2, coordinator='127.0.0.1:5000', bind='127.0.0.1')
    """
    slurm = _of_slurm(variables)
    address = coordinator or variables.get(COORDINATOR) or slurm.get(COORDINATOR)
    total = _number(PROCESSES, processes, variables, slurm)
    own = _number(PROCESS, process, variables, slurm)
    if total is None and own is None and address is None:
        return Place()
    if total is None:
        raise ArgumentError(
            "the number of processes is not known",
            got=f"coordinator {address}, process {own}",
            expected=f"processes= or {PROCESSES}",
        )
    if total == 1 and own in (None, 0):
        return Place()
    if total < 1 or own is None or not 0 <= own < total:
        raise ArgumentError(
            "a process needs a number below the number of processes",
            got=f"process {own} of {total}",
            expected=f"process= or {PROCESS}, from 0 to processes - 1",
        )
    if address is None or not _is_address(address):
        raise ArgumentError(
            "processes need a place to meet",
            got=address,
            expected=f"coordinator= or {COORDINATOR}, such as 127.0.0.1:5000",
        )
    listens = bind or variables.get(BIND) or LOOPBACK
    _check_bind(listens, address, own)
    return Place(own, total, address, listens)


def is_first() -> bool:
    """This is process 0: the one that prints and writes for all."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """A barrier: returns when every process has come here.

    Args:
        name: of the place; processes that wait at different places raise an error.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def gather(values: np.ndarray) -> np.ndarray:
    """The values of all processes, in their order, along a new first axis.

    Args:
        values: of this process, in at most 32 bits each; the same shape and type everywhere.
    """
    if values.dtype.itemsize > 4:
        raise ArgumentError(
            "numbers lose bits on their way between processes",
            got=values.dtype,
            expected="at most 32 bits each",
        )
    return np.asarray(multihost_utils.process_allgather(values))


@contextlib.contextmanager
def failing_at_once() -> Iterator[None]:
    """An error in the body ends this process at once, if there are others; see `exit_code`.

    Without it, Python's own end waits minutes for processes that in turn wait for this one. A
    regular exit, `SystemExit`, goes the regular way.
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
    """2: the run cannot be made so, and starting it again will not help; 1: anything else."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    is_final = isinstance(error, XsakeError) and not error.is_transient
    return CANNOT_RUN if is_final else 1


def _number(
    name: str, given: int | None, variables: Mapping[str, str], slurm: Mapping[str, str]
) -> int | None:
    if given is not None:
        return given
    words = variables.get(name) or slurm.get(name)
    if words is None:
        return None
    if not (words.isascii() and words.isdigit()):
        raise ArgumentError(f"{name} is not a number", got=repr(words), expected="such as 2")
    return int(words)


def _is_address(words: str) -> bool:
    host, colon, port = words.rpartition(":")
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
            "the others cannot reach process 0, which listens on this machine only",
            got=f"coordinator {coordinator}, bind {bind}",
            expected="the address of a network that you trust",
            fix=f"set {BIND} to this machine's address there, or to 0.0.0.0 for every network",
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # the name of a machine


def _of_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Our variables, as far as SLURM's tell them; only a job step, `srun`, has several tasks."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    if any(not variables.get(name) for name in names):
        return {}
    tasks, process, nodes, job = (variables[name] for name in names)
    found = {PROCESSES: tasks, PROCESS: process}
    if job.isdigit():
        step = variables.get("SLURM_STEP_ID", "")
        port = _FIRST_PORT + (int(job) + (int(step) if step.isdigit() else 0)) % _PORTS
        is_one_machine = variables.get("SLURM_STEP_NUM_NODES") == "1"
        found[COORDINATOR] = f"{LOOPBACK if is_one_machine else _first_node(nodes)}:{port}"
    return found


def _first_node(nodes: str) -> str:
    """The first machine of a SLURM list.

    Example:
        >>> _first_node("gpu[007,010-012]-a,login1")
        'gpu007-a'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it may be empty
    return re.sub(r"\[([^,\]-]+)[^\]]*\]", r"\1", first.group())
