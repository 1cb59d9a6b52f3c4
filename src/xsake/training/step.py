"""One training step as a pure function, its update refused or made; and the probe beside it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from xsake.errors import ArgumentError
from xsake.kernels.statistics import block_statistics
from xsake.layout.grid import blocks_of
from xsake.model import Attend, Decoder, LayerCall, Masked
from xsake.training.attention import Selected
from xsake.training.config import TrainingConfig
from xsake.training.guard import either, judge, remembered
from xsake.training.optimizer import Optimizer
from xsake.training.state import Definition, Parameters, Shardings, TrainState


class Metrics(NamedTuple):
    """What a step tells.

    Attributes:
        loss: mean of -log p over the predicted tokens, in nats.
        gradient_norm: of all gradients, before clipping.
        learning_rate: of this update, whether it was made or not.
        is_skipped: whether the guard refused the update.
        skips: updates in a row that were refused, this one included.
        tokens: that were predicted.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    is_skipped: Bool[Array, ""]
    skips: Int[Array, ""]
    tokens: Int[Array, ""]


Loss = Callable[[Parameters, Int[Array, "B T1"]], tuple[Float[Array, ""], Int[Array, ""]]]
"""From parameters and tokens [B, context + 1] to (summed loss, predicted tokens)."""

Step = Callable[[TrainState, Int[Array, "B T1"]], tuple[TrainState, Metrics]]
"""From a state, which it uses up, and tokens [B, context + 1] to the next state."""


def make_step(
    config: TrainingConfig,
    definition: Definition,
    optimizer: Optimizer,
    attend: Attend,
    shardings: Shardings | None = None,
) -> jax.stages.Wrapped:
    """A jitted `Step`; every attention needs one of its own, and new inputs compile nothing.

    One step is one update, however many microbatches its gradients are summed over. The model
    draws nothing at random; what does, takes `step_key(state)`, so that resuming changes nothing.

    Args:
        config: of the run.
        definition: of the model.
        optimizer: from `optimizer_of`.
        attend: how layers look at each other.
        shardings: where state and tokens lie; None: on one device.
    """
    loss_of = make_loss(config, definition, attend)
    parts = config.optimizer.accumulation
    placed = None if shardings is None else shardings.state.parameters

    def train_step(state: TrainState, tokens) -> tuple[TrainState, Metrics]:
        summed, loss, count = summed_gradients(loss_of, state.parameters, tokens, parts, placed)
        share = 1 / jnp.maximum(count, 1).astype(jnp.float32)
        loss, gradients = loss * share, jax.tree.map(lambda x: x * share, summed)
        norm = optax.tree.norm(gradients)
        rate = optimizer.learning_rate(optimizer.updates(state.optimizer))
        is_made = judge(config.guard, state.guard, loss, norm)
        changes, moments = optimizer.transform.update(gradients, state.optimizer, state.parameters)
        guard = remembered(state.guard, norm, is_made)
        new = TrainState(
            step=state.step + 1,
            parameters=either(
                is_made, optax.apply_updates(state.parameters, changes), state.parameters
            ),
            optimizer=either(is_made, moments, state.optimizer),
            key=state.key,
            guard=guard,
        )
        return new, Metrics(loss, norm, rate, ~is_made, guard.skips, count)

    if shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings.state, shardings.tokens),
        out_shardings=(shardings.state, None),
    )


def make_loss(config: TrainingConfig, definition: Definition, attend: Attend) -> Loss:
    """The loss that a step descends, for evaluation too; it is not compiled yet.

    A negative token is padding at the end of its row: nobody predicts it. A token beyond the
    vocabulary makes the loss NaN.

    Args:
        config: of the run.
        definition: of the model.
        attend: how layers look at each other.
    """

    def loss_of(parameters, tokens):
        model = definition.merge(parameters)
        hidden = model.hidden(jnp.maximum(tokens[:, :-1], 0), attend=attend)
        return next_token_loss(model, hidden, tokens[:, 1:], config.model.logit_positions)

    return loss_of


def next_token_loss(
    model: Decoder,
    hidden: Float[Array, "B T width"],
    targets: Int[Array, "B T"],
    at_once: int,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Summed -log p of the targets, and how many there are; logits never exist whole.

    Args:
        model: has the logits.
        hidden: its last states.
        targets: what comes after each token; negative: nothing is predicted there.
        at_once: positions of each sequence whose logits exist at once, here and for gradients.
    """
    batch, tokens, width = hidden.shape
    chunks = -(-tokens // at_once)
    size = -(-tokens // chunks)
    spare = ((0, 0), (0, size * chunks - tokens))
    # A chunk takes every chunks-th position: sequences that are cut over devices stay cut.
    hidden = jnp.pad(hidden, (*spare, (0, 0))).reshape(batch, size, chunks, width)
    targets = jnp.pad(targets, spare, constant_values=-1).reshape(batch, size, chunks)

    @jax.checkpoint
    def add(total, part):
        hidden, targets = part
        logits = model.logits(hidden)
        own = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        found = jax.nn.logsumexp(logits, axis=-1) - own
        return total + jnp.where(targets >= 0, found, 0).sum(), None

    items = jnp.moveaxis(hidden, 2, 0), jnp.moveaxis(targets, 2, 0)
    total, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), items)
    return total, (targets >= 0).sum(dtype=jnp.int32)


def summed_gradients(
    loss_of: Loss,
    parameters: Parameters,
    tokens: Int[Array, "B T1"],
    parts: int,
    placed: Any = None,
) -> tuple[Parameters, Float[Array, ""], Int[Array, ""]]:
    """(gradients, loss, tokens), all of them sums over the microbatches, in float32.

    Sums, so that every token weighs the same in whichever microbatch it is.

    Args:
        loss_of: from `make_loss`.
        parameters: of the model.
        tokens: of the whole batch.
        parts: microbatches, one after the other.
        placed: shardings of the gradients, or None.
    """
    differentiated = jax.value_and_grad(loss_of, has_aux=True)

    def found_in(tokens):
        (loss, count), gradients = differentiated(parameters, tokens)
        if placed is not None:
            gradients = jax.lax.with_sharding_constraint(gradients, placed)
        return jax.tree.map(lambda x: x.astype(jnp.float32), gradients), loss, count

    if parts == 1:
        return found_in(tokens)

    def add(sums, tokens):
        return jax.tree.map(jnp.add, sums, found_in(tokens)), None

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), parameters)
    start = nothing, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    # A microbatch takes every parts-th sequence: a batch that is cut over devices stays cut.
    microbatches = jnp.moveaxis(tokens.reshape(-1, parts, tokens.shape[1]), 1, 0)
    return jax.lax.scan(add, start, microbatches)[0]


class Kept(NamedTuple):
    """What attention keeps of what dense attention would look at, by layer and head.

    Attributes:
        mass: share of a query's attention that is kept, mean over the queries looked at.
        least: the same, of the query that keeps least.
        kl: KL(sparse || dense) = -log(kept mass), mean, in nats.
    """

    mass: Float[Array, "L Hq"]
    least: Float[Array, "L Hq"]
    kl: Float[Array, "L Hq"]


def make_probe(
    definition: Definition, attend: Attend, judged: Attend, *, rows: int, block: int
) -> Callable[[Parameters, Int[Array, "B T1"], Array], Kept]:
    """A compiled probe: dense attention of a few rows beside what is computed of it.

    A plan sees only what its selector tells it, and a model under a plan is trained to need no
    more: both would say that nothing is missing. The probe looks at every key.

    Args:
        definition: of the model.
        attend: what the model reads with.
        judged: attention by a plan or a mask: whose loss is measured; mostly the same.
        rows: query blocks, drawn at random from those that are not computed whole anyway.
        block: tokens of a query block; a plan's own counts.
    """
    if not isinstance(judged, Selected | Masked):
        raise ArgumentError(
            "a probe judges attention that leaves something out",
            got=type(judged).__name__,
            expected="attention by a plan or by a mask",
            fix="set attention.probe_every to 0",
        )
    plan = judged.planned.plan if isinstance(judged, Selected) else None
    block, first = (block, 0) if plan is None else (plan.block, plan.always.level)

    def probe(parameters, tokens, key) -> Kept:
        tokens = jnp.maximum(tokens[:, :-1], 0)
        end = blocks_of(tokens.shape[1], block)
        start = min(first, end - 1)
        count = min(rows, end - start)
        picked = start + jax.random.permutation(key, end - start)[:count]

        def watch(q, k, v, call: LayerCall) -> Kept:
            del v
            return kept_mass(judged, q, k, call, jnp.sort(picked), block)

        return definition.merge(parameters).observe(tokens, watch, attend=attend)

    return jax.jit(probe)


def kept_mass(
    judged: Selected | Masked,
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hk D"],
    call: LayerCall,
    rows: Int[Array, " R"],
    block: int,
) -> Kept:
    """What one layer keeps of the attention of the queries in some rows; [Hq] each.

    Args:
        judged: attention by a plan or by a mask.
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
    if isinstance(judged, Masked):
        kept = jnp.exp(look(call.mask & judged.mask).lse - dense.lse)
    else:
        chosen = jnp.repeat(judged.planned.chosen(q, k, call)[:, :, rows], block, axis=2)
        kept = jnp.where(jnp.moveaxis(chosen, 1, 2), dense.mass(), 0).sum(-1)
    kept = jnp.clip(kept, 1e-30, 1)
    count = is_there.sum() * q.shape[0]
    mean = lambda x: jnp.where(is_there, x, 0).sum((0, 1)) / count
    return Kept(mean(kept), jnp.where(is_there, kept, 1).min((0, 1)), mean(-jnp.log(kept)))
