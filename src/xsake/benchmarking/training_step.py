"""Benchmark of compiled training steps, without data loading, metrics and checkpoints."""

import time
import uuid
from collections.abc import Mapping

import jax
import numpy as np

from xsake._progress import Progress, ProgressFn
from xsake._provenance import checkout_root, environment
from xsake.benchmarking.rows import BenchmarkRow, Ratio, Shape, TimingStats, provenance_fields
from xsake.benchmarking.runner import Spread, TimedSide, interleave, pair_ratio
from xsake.errors import ArgumentError
from xsake.training.attention import make_attention
from xsake.training.config import TrainingConfig
from xsake.training.state import build_optimizer, define_model, init_state
from xsake.training.step import make_step


class TimedStep:
    """Compiled training step of a run on one batch of random tokens."""

    def __init__(self, config: TrainingConfig):
        _require_one_device(config)
        _require_plan(config)
        self.config, begin = config, time.perf_counter()
        definition = define_model(config)
        self.attention = make_attention(config.attention, config.model.decoder)
        optimizer = build_optimizer(config, definition)
        step = make_step(config, definition, optimizer, self.attention.attends[-1])
        self._state, data = init_state(config), config.data
        size, known = (data.batch, data.context + 1), config.model.decoder.vocab_size
        drawn = np.random.default_rng(data.seed).integers(known, size=size)
        self._tokens = jax.device_put(drawn.astype(np.int32))
        self._step = step.lower(self._state, self._tokens).compile()
        analysis = self._step.memory_analysis()
        self.temp_bytes = None if analysis is None else int(analysis.temp_size_in_bytes)
        self.seconds(1)
        self.compile_seconds = time.perf_counter() - begin

    def seconds(self, steps: int) -> float:
        """Run `steps` steps and return the seconds per step."""
        jax.block_until_ready(self._state)
        begin = time.perf_counter()
        for _ in range(steps):
            self._state, _ = self._step(self._state, self._tokens)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - begin) / steps


def time_steps(
    configs: Mapping[str, TrainingConfig],
    *,
    rounds: int,
    threads: int,
    on_progress: ProgressFn = lambda _: None,
) -> list[BenchmarkRow]:
    """Time the steps of several runs, interleaved, and compare each with the first.

    With annealed budgets the last one is timed.
    """
    steps = {}
    for done, (name, config) in enumerate(configs.items(), start=1):
        steps[name] = TimedStep(config)
        on_progress(Progress(done, len(configs), "compiling, timing"))
    sides = [TimedSide(name, lambda step=step: step.seconds(1)) for name, step in steps.items()]
    times, first = interleave(sides, rounds=rounds), next(iter(configs))
    common = {
        "experiment": "training", "run": uuid.uuid4().hex[:12], "direction": "forward+backward",
        "threads": threads, "device": jax.devices()[0].device_kind, "repeats": rounds,
        **provenance_fields(environment(checkout_root())),
    }  # fmt: skip
    rows = []
    for name, step in steps.items():
        section, decoder, data = step.config.attention, step.config.model.decoder, step.config.data
        ratio = Ratio(baseline=first, **vars(pair_ratio(times[name], times[first])))
        plan = step.attention.plans[-1]
        budget, block = (None, None) if plan is None else (plan.budget, plan.block)
        shape = Shape(
            batch=data.batch, q_tokens=data.context, kv_tokens=data.context,
            q_heads=decoder.q_heads, kv_heads=decoder.kv_heads, head_dim=decoder.head_dim,
        )  # fmt: skip
        rows.append(BenchmarkRow.model_validate(common | {
            "side": name, "implementation": f"xsake train, attention {section.kind}",
            "shape": shape, "dtype": step.config.model.compute_dtype,
            "mask": section.mask or "causal", "layout": section.kind,
            "budget": 1.0 if section.kind == "dense" else budget,
            "block_q": block, "block_kv": block, "compile_seconds": step.compile_seconds,
            "seconds": TimingStats(**vars(Spread.of(times[name]))),
            "ratios": () if name == first else (ratio,), "temp_bytes": step.temp_bytes,
            "seed": step.config.run.seed,
        }))  # fmt: skip
    return rows


def _require_one_device(config: TrainingConfig) -> None:
    axes = config.mesh.model_dump()
    if any(size > 1 for size in axes.values()):
        raise ArgumentError(
            "step-devices",
            "steps are timed on one device only",
            got=f"a mesh of {', '.join(f'{name} {size}' for name, size in axes.items())}",
            expected="axes of size 1",
            fix="add --set mesh.data=1 and the like, and a batch for one device",
        )


def _require_plan(config: TrainingConfig) -> None:
    section = config.attention
    if section.kind == "plan" and section.plan is None and section.profile is None:
        raise ArgumentError(
            "step-plan",
            "the run has no plan before it calibrates",
            got="attention.kind = 'plan' with neither attention.plan nor attention.profile",
            fix="set a plan of `xsake calibrate`, or the profile that such a run wrote",
        )
