"""Process descriptions of the environment, and two real processes that stop, compare and fail."""

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import start
from xsake.errors import ArgumentError, UnsupportedError
from xsake.training import processes
from xsake.training.launch import RestartPolicy, launch
from xsake.training.preemption import EXIT_RESTART
from xsake.training.processes import COORDINATOR, PROCESS, PROCESSES, ProcessSpec, detect_process

OURS = {"XSAKE_COORDINATOR": "127.0.0.1:5000", "XSAKE_PROCESSES": "4", "XSAKE_PROCESS": "2"}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[012-013]",
    "SLURM_PROCID": "3",
}


def spec(process, processes, coordinator, bind="127.0.0.1"):
    return ProcessSpec(process=process, processes=processes, coordinator=coordinator, bind=bind)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ProcessSpec()),
        ({"XSAKE_PROCESSES": "1", "XSAKE_PROCESS": "0"}, ProcessSpec()),
        ({"XSAKE_PROCESSES": "1"}, ProcessSpec()),
        (OURS, spec(2, 4, "127.0.0.1:5000")),
        (SLURM, spec(3, 8, "node012:61442")),
        ({**SLURM, **OURS}, spec(2, 4, "127.0.0.1:5000")),
        ({**SLURM, "SLURM_PROCID": "0", "XSAKE_BIND": "10.1.2.3"},
         spec(0, 8, "node012:61442", "10.1.2.3")),
        # Tasks on one host use its loopback; a batch script outside of srun is a single process.
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, spec(3, 8, "127.0.0.1:61442")),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, ProcessSpec()),
    ],
)  # fmt: skip
def test_a_process_is_described_by_our_variables_or_by_slurm(variables, expected):
    assert detect_process(variables) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("a1,b2", "a1"),
        ("node[07]", "node07"),
        ("node[003-015,020],other", "node003"),
        ("rack[2-3]n[04,06]-gpu,x[1-2]", "rack2n04-gpu"),
    ],
)
def test_the_first_host_of_a_list_is_the_coordinator(nodes, first):
    found = detect_process({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert found.coordinator == f"{first}:61442"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"XSAKE_PROCESS": "4"}, "process 4 of 4 is out of range"),
        ({"XSAKE_PROCESS": ""}, "process: "),
        ({"XSAKE_PROCESS": "-1"}, "process: "),
        ({"XSAKE_PROCESSES": "two"}, "processes: "),
        ({"XSAKE_PROCESSES": ""}, "processes: "),
        ({"XSAKE_PROCESSES": "0"}, "processes: "),
        ({"XSAKE_COORDINATOR": ""}, "None is not the address of a coordinator"),
        ({"XSAKE_COORDINATOR": "127.0.0.1"}, "coordinator: "),
        ({"XSAKE_COORDINATOR": "127.0.0.1:0"}, "coordinator: "),
        ({"XSAKE_COORDINATOR": "127.0.0.1:99999"}, "not the address of a coordinator"),
        ({"XSAKE_COORDINATOR": "http://host:80"}, "coordinator: "),
        ({"XSAKE_BIND": "all"}, "bind: "),
    ],
)
def test_incomplete_or_invalid_variables_are_errors(change, message):
    with pytest.raises(ArgumentError, match="(?s)not described by their variables.*" + message):
        detect_process({**OURS, **change})


@pytest.mark.parametrize("host", ["10.0.0.7", "node012", "[fd00::1]"])
def test_process_0_listens_to_other_hosts_on_request_only(host):
    variables = {**OURS, "XSAKE_COORDINATOR": f"{host}:5000", "XSAKE_PROCESS": "0"}
    with pytest.raises(ArgumentError, match="process 0 listens on the loopback.*XSAKE_BIND"):
        detect_process(variables)
    assert str(detect_process({**variables, "XSAKE_BIND": "0.0.0.0"}).bind) == "0.0.0.0"
    assert detect_process({**variables, "XSAKE_PROCESS": "1"}).process == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_the_loopback_has_several_names(host):
    found = detect_process({**OURS, "XSAKE_COORDINATOR": f"{host}:5000", "XSAKE_PROCESS": "0"})
    assert str(found.bind) == "127.0.0.1"


@given(
    st.dictionaries(
        st.sampled_from([*OURS, *SLURM, "XSAKE_BIND"]), st.text("01279.:-[], ab", max_size=8)
    )
)
def test_any_environment_gives_a_complete_description_or_an_error(variables):
    try:
        found = detect_process(variables)
    except ArgumentError:
        return
    assert 0 <= found.process < found.processes
    assert (found.processes == 1) == (found.coordinator is None)


def test_a_single_process_starts_nothing(monkeypatch):
    for name in os.environ:
        if name.startswith(("XSAKE_", "SLURM_")):
            monkeypatch.delenv(name)
    assert processes.start() == ProcessSpec()
    assert processes.is_primary()
    processes.barrier("here")
    assert processes.gather(np.arange(3, dtype=np.int32)).tolist() == [[0, 1, 2]]
    with pytest.raises(ArgumentError, match="without loss"):
        processes.gather(np.zeros(2))
    with pytest.raises(ZeroDivisionError), processes.exit_on_error():
        _ = 1 / 0


def test_processes_cannot_connect_after_a_device_was_used(monkeypatch):
    jax.devices()
    for name, value in {**OURS, "XSAKE_PROCESS": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedError, match="process 0 of 4 cannot connect") as caught:
        processes.start()
    assert "before any JAX calls" in str(caught.value)
    with pytest.raises(ArgumentError, match="XSK-102.heartbeat"):
        processes.start(heartbeat_seconds=0)


TOGETHER = """
import json, os, signal, sys, time
from pathlib import Path

folder, rank = Path(sys.argv[1]), int(os.environ["XSAKE_PROCESS"])
life = len(list(folder.glob(f"*.{rank}.json")))

def tell(**facts):
    path = folder / f"{life}.{rank}.json"
    path.write_text(json.dumps(facts | {"time": time.time()}))

if life == 2:
    tell()
    sys.exit(0)

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from xsake.training import fingerprints, preemption, processes, reliability

def stop():
    with preemption.PreemptionHandler() as request:
        for step in range(1, 2000):
            time.sleep(0.02)
            processes.gather(np.int32([step]))
            if step == 5 and rank == 1:
                os.kill(os.getpid(), signal.SIGINT)  # to one process only
            if request.should_stop(step):
                tell(step=step)
                sys.exit(preemption.EXIT_RESTART)

def compare():
    mesh = jax.make_mesh((4,), ("all",))
    same, parts = np.ones((2, 3), np.float32), []
    for number, device in enumerate(jax.local_devices()):
        part = same.copy()
        part.view(np.uint32)[1, 1] ^= 8 * (rank == 1 and number == 0)
        parts.append(jax.device_put(part, device))
    shared = NamedSharding(mesh, P())
    broken = jax.make_array_from_single_device_arrays(same.shape, shared, parts)
    good = jax.device_put(same, shared)
    tree = {"good": good, "bad": {"weight": broken}, "own": np.int32([rank])}
    found = fingerprints.find_mismatches(tree)
    watch = reliability.StragglerDetector(interval=2, rounds=2)
    rounds = [watch.add(0.1 + 2 * rank, 3.0 - 2 * rank) for _ in range(4)]
    processes.barrier("end")
    tell(
        count=jax.process_count(), is_primary=processes.is_primary(),
        gathered=processes.gather(np.float32([rank, 7])).tolist(),
        found=[[x.leaf, [s.process for s in x.suspects], x.is_decided, str(x)] for x in found],
        slow=rounds[-1].flagged,
    )
    if rank == 1:
        raise ValueError("one of us fails")
    processes.barrier("that the other one never comes to")

with processes.exit_on_error():
    processes.start(heartbeat_seconds=100)
    stop() if life == 0 else compare()
"""


def test_two_processes_stop_compare_fail_and_are_restarted(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    policy = RestartPolicy(max_restarts=1, backoff_seconds=0.0, failure_grace_seconds=0.5)
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = launch([sys.executable, "-c", TOGETHER, str(tmp_path)], processes=2, policy=policy)
    ended = time.time()
    assert code == 0, err.getvalue()
    told = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(told) == 6

    # A stop of one process is a stop of both, after the same step, and asks for a restart.
    assert told["0.0"]["step"] == told["0.1"]["step"] > 5
    assert err.getvalue().count(f"requests a restart, code {EXIT_RESTART}") == 2

    for rank in (0, 1):
        facts = told[f"1.{rank}"]
        assert facts["count"] == 2
        assert facts["is_primary"] == (rank == 0)
        assert facts["gathered"] == [[0, 7], [1, 7]]
        assert facts["slow"] == [1]
        (bad, owners, is_decided, words), own = facts["found"]
        assert (bad, owners, is_decided) == ("bad.weight", [1], True)
        assert words.endswith("against 3 copies that agree")
        assert own[:3] == ["own", [0, 1], False]

    # An error ends its process at once: the next life begins long before a heartbeat is missed.
    assert "[launch] process 1 failed with code 1" in err.getvalue()
    assert "ValueError: one of us fails" in err.getvalue()
    assert ended - told["1.1"]["time"] < 90


def gather_forever(address, rank, heartbeat):
    os.environ |= {PROCESSES: "2", PROCESS: str(rank), COORDINATOR: address}
    processes.start(heartbeat_seconds=heartbeat)
    for step in range(100_000):
        time.sleep(0.02)
        processes.gather(np.int32([step]))
        if step == 5:
            print("together", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", [signal.SIGKILL, signal.SIGSTOP])
def test_who_is_left_ends_soon_after_another_has_died(victim, name, tmp_path):
    heartbeat, outputs = 8, [tmp_path / "0", tmp_path / "1"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    pair = []
    for rank, output in enumerate(outputs):
        output.touch()
        pair.append(start(gather_forever, address, rank, heartbeat, output=output))
    survivor, words = pair[1 - victim], outputs[1 - victim]
    try:
        while any("together" not in output.read_text() for output in outputs):
            assert all(child.is_alive() for child in pair)
            time.sleep(0.05)
        os.kill(pair[victim].pid, name)
        began = time.monotonic()
        while survivor.is_alive() and "Terminating process" not in words.read_text():
            assert time.monotonic() - began < 60
            time.sleep(0.05)
        seconds = time.monotonic() - began
        # It prints its stacks before it goes, which takes seconds on a busy machine.
        survivor.join(30)
        assert survivor.exitcode not in (None, 0)
    finally:
        for child in pair:
            child.kill()
            child.join()
    assert seconds < heartbeat + 2
