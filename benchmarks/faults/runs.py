"""Tiny real runs: their data, their commands, what they leave behind, and how to wait for them."""

import contextlib
import functools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import inside
from benchmarks.faults.results import FaultError
from benchmarks.faults.watching import Ended, Started, end
from benchmarks.peers.client import ROOT
from xsake.observability import read_metrics
from xsake.observability.log import parse_line
from xsake.training.build_data import BuildSettings, NewTokenizer, build
from xsake.training.checkpointing import CheckpointEvent, CheckpointStore
from xsake.training.config import TrainingConfig
from xsake.training.data import TokenLoader
from xsake.training.processes import BIND, COORDINATOR, LOOPBACK, PROCESS, PROCESSES
from xsake.training.state import DeviceSetup, TrainState, digest

HEARTBEAT = 10
INTERVAL = 10  # steps between checkpoints
# On CPU only the first of several processes keeps what it compiles, and no other can read it: all
# runs on a mesh compile in a hurry, so that they have the same bits.
HURRY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
STEPS = 60  # of the straight run; most others have 40
SETTINGS = """\
[model]
preset = "tiny"
compute_dtype = "float32"
decoder = {{ vocab_size = 320, layers = 2, context = 64 }}

[data]
folder = {data}
context = 64
batch = 12

[optimizer]
peak_learning_rate = 1e-3
warmup_steps = 5
total_steps = 200

[checkpoint]
folder = "unused"
save_interval = {interval}
max_to_keep = 1000

[run]
steps = 40
log_interval = 0
"""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds.

    Args:
        step: its number.
        digest: of the whole state.
        state: the whole state.
    """

    step: int
    digest: str
    state: TrainState


@dataclass(frozen=True)
class Ground:
    """The folder that all runs share: data, settings, and compiled programs.

    Args:
        folder: of it all.
        is_inside: whether runs that are not killed are made inside of this process.
        bug: planted in every process of a run (`benchmarks.faults.planted`); None: no bug.
    """

    folder: Path
    is_inside: bool = False
    bug: str | None = None

    @property
    def settings(self) -> Path:
        """The settings that every run starts from."""
        return self.folder / "run.toml"

    @property
    def cache(self) -> Path:
        """Compiled programs."""
        return self.folder / "compiled"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every run."""
        own = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])]),
            "NO_COLOR": "1",
        }
        kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        return kept | own

    def run(self, name: str, *settings: str) -> "Run":
        """A run of its own folder.

        Args:
            name: of the run.
            settings: other values, such as `run.steps=60`.
        """
        return Run(self, name, settings)

    @functools.cached_property
    def straight(self) -> "Run":
        """What nothing happens to: 60 steps, all of them kept."""
        run = self.run("straight", f"run.steps={STEPS}", "checkpoint.save_interval=1")
        return self._whole(run, 1, STEPS)

    @functools.cached_property
    def straight_pair(self) -> "Run":
        """The same with two processes, 40 steps."""
        return self._whole(self.run("straight-pair", "mesh.data=2"), 2, 40)

    def _whole(self, run: "Run", processes: int, steps: int) -> "Run":
        if steps in run.steps:
            return run  # of an earlier command in the same folder
        shutil.rmtree(run.folder, ignore_errors=True)
        if processes == 1:
            run.train()
            return run
        with run.launched(processes) as started:
            started.ended(0)
        return run


def prepare(folder: Path, *, is_inside: bool = False) -> Ground:
    """Settings, and data of 33 steps an epoch, made of words that are drawn.

    Args:
        folder: made if it is not there; what is in it is used again.
        is_inside: see `Ground`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ground, data = Ground(folder, is_inside), folder / "data"
    ground.settings.write_text(
        SETTINGS.format(data=json.dumps(str(data)), interval=INTERVAL), encoding="utf-8"
    )
    if (data / "index.json").exists():
        return ground
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(300)]
    texts = [" ".join(draw.choices(words, k=draw.randint(50, 300))) for _ in range(36)]
    (folder / "texts.txt").write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    build(NewTokenizer(300), [folder / "texts.txt"], data, BuildSettings(validation=0.0))
    return ground


@dataclass(frozen=True)
class Run:
    """A training run and its folder.

    Args:
        ground: what it shares with the others.
        name: of its folder.
        settings: what is different.
    """

    ground: Ground
    name: str
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Everything the run writes."""
        return self.ground.folder / self.name

    @property
    def saves(self) -> Path:
        """Its checkpoints."""
        return self.folder / "steps"

    @property
    def steps(self) -> list[int]:
        """Numbers of the checkpoints that have their final names, as anybody can see them."""
        if not self.saves.is_dir():
            return []
        return sorted(int(path.name) for path in self.saves.iterdir() if path.name.isdecimal())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of all logged steps."""
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    @property
    def last_step(self) -> int:
        """Last logged step; -1: none."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 2**14))
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return -1
        lines = (parse_line(line) for line in reversed(whole.splitlines()[1:]))
        return next((line["step"] for line in lines if line and "step" in line), -1)

    @property
    def windows(self) -> list[list[int]]:
        """The windows of every step in the metrics, by the function that orders them."""
        config = TrainingConfig.read(self.ground.settings, self.settings)
        data = config.data
        with contextlib.closing(
            TokenLoader(
                data.folder, context=data.context, batch=data.batch, seed=data.seed, prefetch=0
            )
        ) as loader:
            return [
                loader.window_ids(line["step"]).tolist() for line in self.metrics if "loss" in line
            ]

    def different(self, *settings: str) -> "Run":
        """The same folder with other settings."""
        return Run(self.ground, self.name, (*self.settings, *settings))

    def copy(self, name: str) -> "Run":
        """A copy of all files, to be damaged."""
        return self._copied(name, self.steps)

    def kept_to(self, name: str, step: int) -> "Run":
        """A copy as the run was after a step: with its checkpoint and the one before it.

        Args:
            name: of the copy.
            step: that is saved last.
        """
        return self._copied(name, (step - 1, step))

    def _copied(self, name: str, steps: Sequence[int]) -> "Run":
        made = Run(self.ground, name, self.settings)
        shutil.rmtree(made.folder, ignore_errors=True)
        others = {str(step) for step in self.steps} - {str(step) for step in steps}
        shutil.copytree(
            self.folder, made.folder,
            ignore=lambda folder, names: others if Path(folder) == self.saves else (),
        )  # fmt: skip
        return made

    def command(self, *options: str, inject: Mapping[str, Any] | None = None) -> list[str]:
        """Of `xsake train`, or of the same with something injected.

        Args:
            options: of the command.
            inject: see `benchmarks.faults.injected`.
        """
        begin = [_program("xsake")]
        if self.ground.bug is not None:
            inject = {**(inject or {}), "bug": self.ground.bug}
        if inject is not None:
            begin = [sys.executable, "-m", "benchmarks.faults.injected", json.dumps(inject)]
        settings = (*self.settings, f"checkpoint.folder={json.dumps(str(self.folder))}")
        sets = [word for setting in settings for word in ("--set", setting)]
        return [*begin, "train", str(self.ground.settings), *sets, *options]

    @contextlib.contextmanager
    def started(
        self,
        *options: str,
        inject: Mapping[str, Any] | None = None,
        variables: Mapping[str, str | None] | None = None,
        command: list[str] | None = None,
        is_piped: bool = False,
    ) -> Iterator[Started]:
        """The run as a process, which does not outlive the body.

        Args:
            options: of the command.
            inject: what goes wrong inside.
            variables: of the environment, added; None takes one away.
            command: instead of the run's own.
            is_piped: its words go through another process, so that they have room in any case.
        """
        log = self.ground.folder / f"{self.name}.log"
        hurry = HURRY if any(word.startswith("mesh.") for word in self.settings) else {}
        changed = self.ground.variables | hurry | dict(variables or {})
        given = {name: value for name, value in changed.items() if value is not None}
        words = command or self.command(*options, inject=inject)
        with log.open("ab") as out:
            begin = out.tell()
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if is_piped else out,
                stderr=subprocess.STDOUT, env=given, cwd=self.ground.folder, start_new_session=True,
            )  # fmt: skip
            if process.stdout is not None:
                subprocess.Popen(["cat"], stdin=process.stdout, stdout=out)
                process.stdout.close()
        try:
            yield Started(process, log, begin)
        finally:
            end(process)

    @contextlib.contextmanager
    def launched(
        self, processes: int = 2, *options: str, inject: Mapping[str, Any] | None = None
    ) -> Iterator[Started]:
        """The run in several processes under `xsake launch`, which starts them again.

        Args:
            processes: how many.
            options: of `xsake launch`.
            inject: what goes wrong inside of them.
        """
        launch = [_program("xsake"), "launch", "--processes", str(processes), *options, "--"]
        with self.started(command=[*launch, *self.command(inject=inject)]) as made:
            yield made

    @contextlib.contextmanager
    def pair(
        self,
        *options: str,
        inject: Mapping[str, Any] | None = None,
        second: Sequence[str] = (),
    ) -> Iterator[list[Started]]:
        """The run in two processes without a launcher.

        Args:
            options: of the command.
            inject: what goes wrong inside of both.
            second: further options of the second process alone.
        """
        with contextlib.ExitStack() as stack, socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            place = f"{LOOPBACK}:{probe.getsockname()[1]}"
            probe.close()
            both = [
                stack.enter_context(
                    self.started(
                        *options,
                        *(second if rank else ()),
                        inject=inject,
                        variables={
                            COORDINATOR: place, PROCESSES: "2", PROCESS: str(rank), BIND: LOOPBACK,
                        },
                    )
                )
                for rank in range(2)
            ]  # fmt: skip
            yield both

    def train(
        self,
        *options: str,
        code: int = 0,
        inject: Mapping[str, Any] | None = None,
        variables: Mapping[str, str | None] | None = None,
    ) -> Ended:
        """Run to the end.

        Args:
            options: of the command.
            code: that it must end with.
            inject: what goes wrong inside.
            variables: of the environment, added; None takes one away.
        """
        if self.ground.is_inside and variables is None:
            words = self.command(*options)
            ended = inside.train(words[words.index("train") :], inject)
        else:
            with self.started(*options, inject=inject, variables=variables) as started:
                started.ended()
            ended = Ended(started.process.returncode, started.text)
        if ended.code != code:
            raise FaultError(f"exit code {ended.code}, not {code}\n{ended.text[-1500:]}")
        return ended

    def saved(
        self, step: int | None = None, *, notices: list[CheckpointEvent] | None = None
    ) -> Saved:
        """What a checkpoint restores to, by default the newest sound one; changes nothing.

        Args:
            step: its number.
            notices: receives the events of the store.
        """
        events = [] if notices is None else notices
        store = CheckpointStore(self.saves, is_read_only=True, on_event=events.append)
        found = store.restore(_like(self.ground.settings, self.settings), step)
        store.close()
        return Saved(found.step, digest(found.tree), found.tree)


@functools.lru_cache
def _like(path: Path, settings: tuple[str, ...]) -> TrainState:
    """The state of a run on one device, whatever its mesh is."""
    config = TrainingConfig.read(path, [word for word in settings if not word.startswith("mesh.")])
    return DeviceSetup.from_config(config).abstract_state(config)


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))
