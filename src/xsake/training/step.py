"""One training step as a pure function, its update refused or made."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from xsake.model import Attend, Decoder
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
        guard = remembered(config.guard, state.guard, norm, is_made)
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
