"""Probes: all the attention of a few rows, beside what training computes of it, head by head.

A plan sees only what its selector tells it, and a model under a plan is trained to need no more:
both would say that nothing is missing. A probe looks at every key.
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
from xsake.distributed.balance import excess
from xsake.errors import ArgumentError
from xsake.hads.drift import Drift, promised_loss
from xsake.kernels.statistics import block_statistics
from xsake.layout.grid import blocks_of
from xsake.model import Attend, Dense, LayerCall, Masked
from xsake.training.attention import Selected, TrainingAttention
from xsake.training.config import TrainingConfig
from xsake.training.placing import Devices
from xsake.training.state import Definition, Parameters, TrainState, define, step_key

Judged = Selected | Masked | Dense


class Kept(NamedTuple):
    """What attention keeps of what dense attention would look at, by layer and head.

    Attributes:
        entropy: of a query's dense attention, mean over the queries looked at, in nats.
        mass: share of a query's attention that is kept, mean.
        least: the same, of the query that keeps least.
        kl: KL(sparse || dense) = -log(kept mass), mean, in nats.
        spent: computed / visible blocks of the whole sequence; 1 for dense attention and masks.
    """

    entropy: Float[Array, "L Hq"]
    mass: Float[Array, "L Hq"]
    least: Float[Array, "L Hq"]
    kl: Float[Array, "L Hq"]
    spent: Float[Array, "L Hq"]


class Probes:
    """The probes of a run, compiled once for every plan.

    Args:
        config: the run.
        devices: where it lies.
    """

    def __init__(self, config: TrainingConfig, devices: Devices):
        self._config, self._devices = config, devices
        self._attention: TrainingAttention | None = None
        self._compiled: dict[int, Callable[..., Kept]] = {}
        self._promised: dict[int, np.ndarray | None] = {}

    def look(
        self, number: int, attention: TrainingAttention, state: TrainState, tokens: np.ndarray
    ) -> dict[str, Any]:
        """What the metrics of a probe are after a step, by their names.

        Args:
            number: of the step.
            attention: that it ran with.
            state: after it.
            tokens: this process's part of its batch.
        """
        level = attention.level(number)
        jax.block_until_ready(state.parameters)  # the step's own seconds are not the probe's
        begin = time.monotonic()
        if attention is not self._attention:
            self._attention = attention
            self._compiled.clear()
            self._promised.clear()
        if level not in self._compiled:
            self._compiled[level] = self._make(attention, number)
        probe = self._compiled[level]
        kept = probe(state.parameters, self._devices.put(tokens), step_key(state))
        found = _told(jax.device_get(kept), attention.judged(number), self._config.mesh.tensor)
        plan = _plan_of(attention.judged(number))
        if plan is not None:
            if level not in self._promised:
                context = self._config.data.context
                self._promised[level] = promised(plan, attention, context)
            found |= _drift(self._promised[level], np.asarray(kept.kl))
        return found | {"probe_seconds": round(time.monotonic() - begin, 6)}

    def _make(self, attention: TrainingAttention, number: int) -> Callable[..., Kept]:
        section, mesh = self._config.attention, self._devices.mesh
        shape = self._config.mesh
        return make_probe(
            define(self._config), attention.attend(number), attention.judged(number),
            rows=section.probe_rows, block=section.block, sequences=shape.data * shape.fsdp,
            placed=None if mesh is None else NamedSharding(mesh, PartitionSpec()),
        )  # fmt: skip


def make_probe(
    definition: Definition,
    attend: Attend,
    judged: Attend,
    *,
    rows: int,
    block: int,
    sequences: int = 1,
    placed: NamedSharding | None = None,
) -> Callable[[Parameters, Int[Array, "B T1"], Array], Kept]:
    """A compiled probe: dense attention of a few rows beside what is computed of it.

    Args:
        definition: of the model.
        attend: what the model reads with.
        judged: dense attention, or attention by a plan or a mask, whose loss is measured.
        rows: query blocks, drawn at random from those that are not computed whole anyway.
        block: tokens of a query block; a plan's own counts.
        sequences: of the batch that are read, one for each part that it is cut into.
        placed: where the result lies, so that every process has it; None: on one device.
    """
    if not isinstance(judged, Judged):
        raise ArgumentError(
            "a probe does not know this attention",
            got=type(judged).__name__,
            expected="dense attention, or attention by a plan or by a mask",
            fix="set attention.probe_every to 0",
        )
    plan = _plan_of(judged)
    block, first = (block, 0) if plan is None else (plan.block, plan.always.level)

    def probe(parameters, tokens, key) -> Kept:
        # Every so many-th sequence: a batch that is cut over devices stays cut.
        tokens = jnp.maximum(tokens[:: max(1, tokens.shape[0] // sequences), :-1], 0)
        end = blocks_of(tokens.shape[1], block)
        start = min(first, end - 1)
        count = min(rows, end - start)
        picked = start + jax.random.permutation(key, end - start)[:count]

        def watch(q, k, v, call: LayerCall) -> Kept:
            del v
            return kept_mass(judged, q, k, call, jnp.sort(picked), block)

        return definition.merge(parameters).observe(tokens, watch, attend=attend)

    return jax.jit(probe) if placed is None else jax.jit(probe, out_shardings=placed)


def kept_mass(
    judged: Judged,
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hk D"],
    call: LayerCall,
    rows: Int[Array, " R"],
    block: int,
) -> Kept:
    """What one layer keeps of the attention of the queries in some rows; [Hq] each.

    Args:
        judged: dense attention, or attention by a plan or by a mask.
        q: queries of the layer.
        k: its keys.
        call: what the layer says beside.
        rows: numbers of query blocks.
        block: tokens of a query block.
    """
    position = (rows[:, None] * block + np.arange(block, dtype=np.int32)[None]).reshape(-1)
    is_there = (position < q.shape[1])[None, :, None]
    position = jnp.minimum(position, q.shape[1] - 1)
    look = lambda mask: block_statistics(
        q[:, position], k, block_kv=block, mask=mask, scale=call.scale, softcap=call.softcap,
        q_positions=position,
    )  # fmt: skip
    dense = look(call.mask)
    spent = jnp.ones(q.shape[2], jnp.float32)
    if isinstance(judged, Dense):
        kept = jnp.ones_like(dense.lse)
    elif isinstance(judged, Masked):
        kept = jnp.exp(look(call.mask & judged.mask).lse - dense.lse)
    else:
        grid = judged.planned.chosen(q, k, call)
        chosen = jnp.repeat(grid[:, :, rows], block, axis=2)
        kept = jnp.where(jnp.moveaxis(chosen, 1, 2), dense.mass(), 0).sum(-1)
        batch, _, n, _ = grid.shape
        spent = grid.sum((0, 2, 3), dtype=jnp.float32) / (batch * n * (n + 1) // 2)
    kept = jnp.clip(kept, 1e-30, 1)
    count = is_there.sum() * q.shape[0]
    mean = lambda x: jnp.where(is_there, x, 0).sum((0, 1)) / count
    least = jnp.where(is_there, kept, 1).min((0, 1))
    return Kept(mean(dense.entropy), mean(kept), least, mean(-jnp.log(kept)), spent)


def promised(
    plan: hads.SparsityPlan, attention: TrainingAttention, context: int
) -> Float[np.ndarray, "L Hq"] | None:
    """What heads lose by the plan's own calibration, in rows that a probe looks at.

    None where nothing was calibrated for what chooses the blocks. Rows that are computed whole lose
    nothing and are never looked at, so the others lose more than the mean of all.

    Args:
        plan: of the run, its heads in the order of the run.
        attention: that it belongs to, with the profile.
        context: tokens of a sequence.
    """
    if attention.profile is None or attention.profile.context != context:
        return None
    order = attention.kv_order
    back = None if order is None else np.argsort(np.array(order), axis=1)
    as_measured = plan if back is None else plan.reordered([list(map(int, x)) for x in back])
    try:
        found = promised_loss(as_measured, attention.profile)
    except ArgumentError:
        return None
    if order is not None:
        group = found.shape[1] // len(order[0])
        places = (np.array(order)[:, :, None] * group + np.arange(group)).reshape(found.shape)
        found = np.take_along_axis(found, places, axis=1)
    n, whole = plan.n, min(plan.always.level, plan.n - 1)
    return found * n / (n - whole)


def _plan_of(judged: Attend) -> hads.SparsityPlan | None:
    return judged.planned.plan if isinstance(judged, Selected) else None


def _told(kept: Kept, judged: Attend, shards: int) -> dict[str, Any]:
    told: dict[str, Any] = {"entropy": _lists(kept.entropy)}
    if isinstance(judged, Dense):
        return told
    told |= {
        "kept_mass": _lists(kept.mass),
        "kept_least": _lists(kept.least),
        "kl": _lists(kept.kl),
    }
    if isinstance(judged, Selected):
        told["budget_spent"] = _lists(kept.spent)
        spent = np.asarray(kept.spent, np.float64)
        work = spent.reshape(len(spent), shards, -1).sum(-1)
        told["work_excess"] = round(excess(work), 6)
    return told


def _drift(promised: np.ndarray | None, now: np.ndarray) -> dict[str, Any]:
    if promised is None:
        return {}
    drift = Drift(promised, np.asarray(now, np.float64), documents=1)
    ratio = float(now.mean()) / max(float(promised.mean()), 1e-6)
    return {"drift": round(ratio, 6), "heads_lost": len(drift.lost)}


def _lists(x: Any) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in layer] for layer in np.asarray(x).tolist()]
