"""A real Prometheus scrapes the dashboard, and the alerts that we deploy fire when they should."""

import contextlib
import json
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import urllib.parse
import urllib.request

import pytest
import yaml

from tests.server.sample import keep_writing, served, write_run
from xsake.observability import METRICS

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"
# What takes minutes in the night takes seconds here; the rules are otherwise those that we deploy.
FASTER = {"> 300": "> 6", "for: 1m": "for: 1s", "[10m]": "[30s]"}


def needs(program):
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"there is no {program}: install Debian's package prometheus")
    return found


def test_rules_and_configuration_are_sound(tmp_path):
    promtool = needs("promtool")
    shutil.copytree(DEPLOY / "prometheus", tmp_path / "prometheus")
    (tmp_path / "prometheus" / "token").write_text("x")
    checks = ["check rules alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml"]
    for words in checks:
        done = subprocess.run(
            [promtool, *words.split()],
            cwd=tmp_path / "prometheus",
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_deployed_names_what_exists():
    own = {"run_info", "run_state", "steps_done", "last_update_time_seconds", "server_clients"}
    own |= {"server_dropped_events_total", "server_peak_memory_bytes", "run_lines_dropped_total"}
    own |= {"server_watcher_last_round_seconds", "server_runs_left_out", "server_search_is_cut"}
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    texts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    panels = json.loads((DEPLOY / "grafana" / "xsake.json").read_text())["panels"]
    texts += [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for text in texts for name in re.findall(r"\bxsake_(\w+)", text)}
    assert names and names <= METRICS.keys() | own
    for path in ("docker-compose.yml", "kubernetes/xsake-serve.yaml"):
        assert all(yaml.safe_load_all((DEPLOY / path).read_text())), path


class Prometheus:
    """A server of its own, on the loopback.

    Args:
        place: its address.
    """

    def __init__(self, place):
        self.place = place

    def ask(self, query):
        """The samples of a query, by their labels."""
        text = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(f"{self.place}/api/v1/query?{text}", timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return [(sample["metric"], float(sample["value"][1])) for sample in found["data"]["result"]]

    def firing(self):
        """The names of alerts that fire."""
        return {labels["alertname"] for labels, _ in self.ask('ALERTS{alertstate="firing"}')}


@contextlib.contextmanager
def prometheus(folder, target):
    """A real one, with the deployed configuration, only faster."""
    program = needs("prometheus")
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    config = config.replace("15s", "1s").replace("127.0.0.1:8765", target.partition("//")[2])
    rules = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    for before, after in FASTER.items():
        assert before in rules
        rules = rules.replace(before, after)
    (folder / "prometheus.yml").write_text(config)
    (folder / "alerts.yml").write_text(rules)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        program, "--config.file=prometheus.yml", f"--web.listen-address={place}",
        "--storage.tsdb.path=data", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        yield Prometheus(f"http://{place}")
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.timeout(600)
def test_a_real_prometheus_reads_a_live_run_and_tells_when_it_goes_wrong(tmp_path):
    needs("prometheus")
    metrics, poisoned = write_run(tmp_path / "work" / "run", 150), threading.Event()
    with (
        keep_writing(metrics, 150, is_poisoned=poisoned.is_set) as stop,
        served(tmp_path / "work") as server,
        prometheus(tmp_path, server.place) as found,
    ):
        server.until(lambda: found.ask('up{job="xsake"} == 1'), "a scrape")
        first = server.until(lambda: found.ask("xsake_steps_done"), "steps")[0][1]
        server.until(lambda: found.ask(f"xsake_steps_done > {first + 5}"), "more steps")
        assert len(found.ask("xsake_entropy")) == 8
        assert found.ask('avg(xsake_attn_mass_recall{layer="1"})')[0][1] == pytest.approx(0.945)
        assert found.ask("xsake_run_info")[0][0]["name"] == "made-up"
        assert found.firing() == set()  # a clean run is quiet
        poisoned.set()
        server.until(lambda: "XsakeUpdatesSkipped" in found.firing(), "skips are reported")
        assert "XsakeRunStalled" not in found.firing()
        stop()
        server.until(lambda: "XsakeRunStalled" in found.firing(), "a stall is reported")
        metrics.end_attempt("done")
        server.until(lambda: "XsakeRunStalled" not in found.firing(), "an end is not a stall")
