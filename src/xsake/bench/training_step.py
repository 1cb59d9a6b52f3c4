"""The compiled training step of a run alone: no data, no metrics, no saves; and several in turn."""

import time
import uuid
from collections.abc import Callable, Mapping

import jax
import numpy as np

from xsake._provenance import environment, own_checkout
from xsake.bench.rows import BenchmarkRow, Ratio, Shape, Timing
from xsake.bench.runner import Side, Spread, interleave, pair_ratio
from xsake.errors import ArgumentError
from xsake.training.attention import make_attention
from xsake.training.config import TrainingConfig
from xsake.training.state import define, first_state, optimizer_of
from xsake.training.step import make_step


class BareStep:
    """One run's step on one batch of drawn tokens, over and over.

    Args:
        config: of the run; one device.
    """

    def __init__(self, config: TrainingConfig):
        _require_one_device(config)
        _require_plan(config)
        self.config, begin = config, time.perf_counter()
        definition = define(config)
        self.attention = make_attention(config.attention, config.model.decoder)
        optimizer = optimizer_of(config, definition)
        step = make_step(config, definition, optimizer, self.attention.attends[-1])
        self._state, data = first_state(config), config.data
        size, known = (data.batch, data.context + 1), config.model.decoder.vocab_size
        drawn = np.random.default_rng(data.seed).integers(known, size=size)
        self._tokens = jax.device_put(drawn.astype(np.int32))
        self._step = step.lower(self._state, self._tokens).compile()
        planned = self._step.memory_analysis()
        self.temp_bytes = None if planned is None else int(planned.temp_size_in_bytes)
        self.seconds(1)
        self.compile_seconds = time.perf_counter() - begin

    def seconds(self, steps: int) -> float:
        """Of each of so many steps."""
        jax.block_until_ready(self._state)
        begin = time.perf_counter()
        for _ in range(steps):
            self._state, _ = self._step(self._state, self._tokens)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - begin) / steps


def race(
    configs: Mapping[str, TrainingConfig],
    *,
    rounds: int,
    threads: int,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> list[BenchmarkRow]:
    """Steps of several runs in turn, each compared with that of the first.

    Args:
        configs: runs by name. One that goes from many blocks to few is timed at its last budget.
        rounds: timed rounds; every run makes one step in each.
        threads: cores that the process was given; only written down.
        watch: told how many steps are compiled, of how many.
    """
    steps = {}
    for done, (name, config) in enumerate(configs.items(), start=1):
        steps[name] = BareStep(config)
        watch(done, len(configs))
    sides = [Side(name, lambda step=step: step.seconds(1)) for name, step in steps.items()]
    times, first = interleave(sides, rounds=rounds), next(iter(configs))
    run, began = uuid.uuid4().hex[:12], environment(own_checkout())
    rows = []
    for name, step in steps.items():
        section, decoder, data = step.config.attention, step.config.model.decoder, step.config.data
        ratio = pair_ratio(times[name], times[first])
        plan = step.attention.plans[-1]
        budget, block = (None, None) if plan is None else (plan.budget, plan.block)
        rows.append(BenchmarkRow(
            experiment="training", run=run, side=name, direction="forward+backward",
            implementation=f"xsake train, attention {section.kind}",
            shape=Shape(
                batch=data.batch, q_tokens=data.context, kv_tokens=data.context,
                q_heads=decoder.q_heads, kv_heads=decoder.kv_heads, head_dim=decoder.head_dim,
            ),
            dtype=step.config.model.compute, mask=section.mask or "causal", layout=section.kind,
            budget=1.0 if section.kind == "dense" else budget, block_q=block, block_kv=block,
            threads=threads,
            device=jax.devices()[0].device_kind, compile_seconds=step.compile_seconds,
            seconds=Timing(**vars(Spread.of(times[name]))), repeats=rounds,
            ratios=() if name == first else (Ratio(baseline=first, **vars(ratio)),),
            temp_bytes=step.temp_bytes, seed=step.config.run.seed, versions=began.versions,
            commit=began.commit, dirty=began.dirty, utc=began.utc, cpu=began.cpu,
            load_average=began.load_average,
        ))  # fmt: skip
    return rows


def _require_one_device(config: TrainingConfig) -> None:
    axes = config.mesh.model_dump()
    if any(size > 1 for size in axes.values()):
        raise ArgumentError(
            "a step is timed on one device",
            got=f"a mesh of {', '.join(f'{name} {size}' for name, size in axes.items())}",
            expected="axes of size 1",
            fix="add --set mesh.data=1 and the like, and a batch for one device",
        )


def _require_plan(config: TrainingConfig) -> None:
    section = config.attention
    if section.kind == "plan" and section.plan is None and section.profile is None:
        raise ArgumentError(
            "a run that calibrates itself has no plan yet",
            got="attention.kind = 'plan' with neither attention.plan nor attention.profile",
            fix="name a plan of `xsake calibrate`, or the profile that such a run left behind",
        )
