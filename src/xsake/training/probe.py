"""Probes: attention mass that sparse attention keeps, measured against dense attention.

A plan and its selector cannot measure what they miss, and a model trained under a plan adapts to
it. A probe computes dense attention for a few rows of query blocks.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from xsake import hads
from xsake.distributed.head_balancing import mean_imbalance
from xsake.errors import ArgumentError
from xsake.hads.drift import Drift, calibrated_loss
from xsake.kernels.statistics import block_statistics
from xsake.layout.grid import count_blocks
from xsake.model import AttentionFn, DenseAttention, LayerCall, MaskedAttention
from xsake.training.attention import StopGradientPlanAttention, TrainingAttention
from xsake.training.config import TrainingConfig
from xsake.training.state import (
    DeviceSetup,
    ModelDefinition,
    Parameters,
    TrainState,
    define_model,
    step_key,
)

ProbedAttention = StopGradientPlanAttention | MaskedAttention | DenseAttention


class ProbeStatistics(NamedTuple):
    """Attention statistics relative to dense attention, by layer and head."""

    entropy: Float[Array, "L Hq"]  # of dense attention, mean over the probed queries, in nats
    # computed share of dense attention, mean over the probed queries
    mass_recall: Float[Array, "L Hq"]
    mass_recall_min: Float[Array, "L Hq"]  # the same for the query with the smallest share
    kl: Float[Array, "L Hq"]  # KL(sparse || dense) = -log(mass recall), mean, in nats
    # computed / visible blocks of the whole sequence; 1 for dense attention and masks
    density: Float[Array, "L Hq"]


class Probes:
    """Probes of a run, compiled once per plan.

    Args:
        config: of the run.
        devices: of the run.
    """

    def __init__(self, config: TrainingConfig, devices: DeviceSetup):
        self._config, self._devices = config, devices
        self._attention: TrainingAttention | None = None
        self._compiled: dict[int, Callable[..., ProbeStatistics]] = {}
        self._expected: dict[int, np.ndarray | None] = {}

    def run(
        self, number: int, attention: TrainingAttention, state: TrainState, tokens: np.ndarray
    ) -> dict[str, Any]:
        """Return the probe metrics after a step, by name."""
        level = attention.level(number)
        jax.block_until_ready(state.parameters)  # do not count the step itself
        started = time.monotonic()
        if attention is not self._attention:
            self._attention = attention
            self._compiled.clear()
            self._expected.clear()
        if level not in self._compiled:
            self._compiled[level] = self._make(attention, number)
        probe = self._compiled[level]
        statistics = probe(state.parameters, self._devices.put(tokens), step_key(state))
        metrics = _format_metrics(
            jax.device_get(statistics), attention.probe_target(number), self._config.mesh.tensor
        )
        plan = _get_plan(attention.probe_target(number))
        if plan is not None:
            if level not in self._expected:
                context = self._config.data.context
                self._expected[level] = expected_kl(plan, attention, context)
            metrics |= _drift_metrics(self._expected[level], np.asarray(statistics.kl))
        return metrics | {"probe_seconds": round(time.monotonic() - started, 6)}

    def _make(self, attention: TrainingAttention, number: int) -> Callable[..., ProbeStatistics]:
        section, mesh = self._config.attention, self._devices.mesh
        shape = self._config.mesh
        return make_probe(
            define_model(self._config), attention.attend(number), attention.probe_target(number),
            rows=section.probe_rows, block=section.block, sequences=shape.data * shape.fsdp,
            out_sharding=None if mesh is None else NamedSharding(mesh, PartitionSpec()),
        )  # fmt: skip


def make_probe(
    definition: ModelDefinition,
    attend: AttentionFn,
    target: AttentionFn,
    *,
    rows: int,
    block: int,
    sequences: int = 1,
    out_sharding: NamedSharding | None = None,
) -> Callable[[Parameters, Int[Array, "B T1"], Array], ProbeStatistics]:
    """Build a jitted probe of `rows` query blocks, drawn from those that are not fully computed.

    A plan's block size takes precedence. `sequences`: to read, one per shard of the batch.
    """
    if not isinstance(target, ProbedAttention):
        raise ArgumentError(
            "probe-attention", "probes do not support this attention", got=type(target).__name__,
            expected="dense attention, or attention by a plan or by a mask",
            fix="set attention.probe_interval to 0",
        )  # fmt: skip
    plan = _get_plan(target)
    block, first = (block, 0) if plan is None else (plan.block, plan.forced.blocks_per_row)

    def probe(parameters, tokens, key) -> ProbeStatistics:
        # Strided over the batch, so batch sharding is preserved.
        tokens = jnp.maximum(tokens[:: max(1, tokens.shape[0] // sequences), :-1], 0)
        end = count_blocks(tokens.shape[1], block)
        start = min(first, end - 1)
        count = min(rows, end - start)
        picked = start + jax.random.permutation(key, end - start)[:count]

        def hook(q, k, v, call: LayerCall) -> ProbeStatistics:
            del v
            return probe_layer(target, q, k, call, jnp.sort(picked), block)

        return definition.merge(parameters).observe(tokens, hook, attend=attend)

    return jax.jit(probe) if out_sharding is None else jax.jit(probe, out_shardings=out_sharding)


def probe_layer(
    target: ProbedAttention,
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hk D"],
    call: LayerCall,
    rows: Int[Array, " R"],
    block: int,
) -> ProbeStatistics:
    """Measure one layer for the queries of some rows; arrays of [Hq]."""
    position = (rows[:, None] * block + np.arange(block, dtype=np.int32)[None]).reshape(-1)
    is_valid = (position < q.shape[1])[None, :, None]
    position = jnp.minimum(position, q.shape[1] - 1)
    statistics_of = lambda mask: block_statistics(
        q[:, position], k, block_kv=block, mask=mask, scale=call.scale, softcap=call.softcap,
        q_positions=position,
    )  # fmt: skip
    dense = statistics_of(call.mask)
    density = jnp.ones(q.shape[2], jnp.float32)
    if isinstance(target, DenseAttention):
        recall = jnp.ones_like(dense.lse)
    elif isinstance(target, MaskedAttention):
        recall = jnp.exp(statistics_of(call.mask & target.mask).lse - dense.lse)
    else:
        grid = target.planned.chosen(q, k, call)
        chosen = jnp.repeat(grid[:, :, rows], block, axis=2)
        recall = jnp.where(jnp.moveaxis(chosen, 1, 2), dense.mass(), 0).sum(-1)
        batch, _, n, _ = grid.shape
        density = grid.sum((0, 2, 3), dtype=jnp.float32) / (batch * n * (n + 1) // 2)
    recall = jnp.clip(recall, 1e-30, 1)
    count = is_valid.sum() * q.shape[0]
    mean = lambda x: jnp.where(is_valid, x, 0).sum((0, 1)) / count
    recall_min = jnp.where(is_valid, recall, 1).min((0, 1))
    return ProbeStatistics(
        mean(dense.entropy), mean(recall), recall_min, mean(-jnp.log(recall)), density
    )


def expected_kl(
    plan: hads.SparsityPlan, attention: TrainingAttention, context: int
) -> Float[np.ndarray, "L Hq"] | None:
    """Return the calibrated KL of a plan's heads, for the rows that a probe measures.

    None without a calibration of the plan's selector. Completely computed rows have no loss and are
    never probed, so the expected KL of the other rows is above the mean of all rows.
    """
    if attention.profile is None or attention.profile.context != context:
        return None
    order = attention.kv_order
    inverse = None if order is None else np.argsort(np.array(order), axis=1)
    calibrated = (
        plan if inverse is None else plan.reorder_heads([list(map(int, x)) for x in inverse])
    )
    try:
        kl = calibrated_loss(calibrated, attention.profile)
    except ArgumentError:
        return None
    if order is not None:
        group = kl.shape[1] // len(order[0])
        heads = (np.array(order)[:, :, None] * group + np.arange(group)).reshape(kl.shape)
        kl = np.take_along_axis(kl, heads, axis=1)
    n, whole = plan.n, min(plan.forced.blocks_per_row, plan.n - 1)
    return kl * n / (n - whole)


def _get_plan(target: AttentionFn) -> hads.SparsityPlan | None:
    return target.planned.plan if isinstance(target, StopGradientPlanAttention) else None


def _format_metrics(
    statistics: ProbeStatistics, target: AttentionFn, shards: int
) -> dict[str, Any]:
    metrics: dict[str, Any] = {"entropy": _to_lists(statistics.entropy)}
    if isinstance(target, DenseAttention):
        return metrics
    metrics |= {
        "attn_mass_recall": _to_lists(statistics.mass_recall),
        "attn_mass_recall_min": _to_lists(statistics.mass_recall_min),
        "kl": _to_lists(statistics.kl),
    }
    if isinstance(target, StopGradientPlanAttention):
        metrics["block_density"] = _to_lists(statistics.density)
        density = np.asarray(statistics.density, np.float64)
        work = density.reshape(len(density), shards, -1).sum(-1)
        metrics["work_excess"] = round(mean_imbalance(work), 6)
    return metrics


def _drift_metrics(expected: np.ndarray | None, now: np.ndarray) -> dict[str, Any]:
    if expected is None:
        return {}
    drift = Drift(expected, np.asarray(now, np.float64), documents=1)
    ratio = float(now.mean()) / max(float(expected.mean()), 1e-6)
    return {"drift": round(ratio, 6), "drifted_heads": len(drift.drifted_heads)}


def _to_lists(x: Any) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in layer] for layer in np.asarray(x).tolist()]
