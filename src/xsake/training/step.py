"""Training step as a pure function, with a filter for updates."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from xsake.model import AttentionFn, Decoder
from xsake.training.config import TrainingConfig
from xsake.training.optimizer import Optimizer
from xsake.training.reliability import select_tree, should_update, update_guard
from xsake.training.state import ModelDefinition, Parameters, Shardings, TrainState


class StepMetrics(NamedTuple):
    """Metrics of a step."""

    loss: Float[Array, ""]  # mean of -log p over the predicted tokens, in nats
    gradient_norm: Float[Array, ""]  # of all gradients, before clipping
    learning_rate: Float[Array, ""]  # of this update, applied or skipped
    is_skipped: Bool[Array, ""]  # whether the update was skipped
    consecutive_skips: Int[Array, ""]  # number of consecutive skipped updates, including this one
    tokens: Int[Array, ""]  # number of predicted tokens


Loss = Callable[[Parameters, Int[Array, "B T1"]], tuple[Float[Array, ""], Int[Array, ""]]]
"""Maps parameters and tokens [B, context + 1] to (summed loss, number of predicted tokens)."""

Step = Callable[[TrainState, Int[Array, "B T1"]], tuple[TrainState, StepMetrics]]
"""Maps a state, which is donated, and tokens [B, context + 1] to the next state and metrics."""


def make_step(
    config: TrainingConfig,
    definition: ModelDefinition,
    optimizer: Optimizer,
    attend: AttentionFn,
    shardings: Shardings | None = None,
) -> jax.stages.Wrapped:
    """Build a jitted `Step` for one attention function.

    A step is one update, accumulated over the microbatches. Random numbers must come from
    `step_key(state)`, so that resuming changes nothing; the model itself draws none.
    """
    loss_of = make_loss(config, definition, attend)
    num_microbatches = config.optimizer.grad_accum_steps
    grad_shardings = None if shardings is None else shardings.state.parameters

    def train_step(state: TrainState, tokens) -> tuple[TrainState, StepMetrics]:
        summed, loss, count = accumulate_gradients(
            loss_of, state.parameters, tokens, num_microbatches, grad_shardings
        )
        share = 1 / jnp.maximum(count, 1).astype(jnp.float32)
        loss, gradients = loss * share, jax.tree.map(lambda x: x * share, summed)
        norm = optax.tree.norm(gradients)
        rate = optimizer.learning_rate(optimizer.updates(state.optimizer))
        is_applied = should_update(config.guard, state.guard, loss, norm)
        changes, moments = optimizer.transform.update(gradients, state.optimizer, state.parameters)
        guard = update_guard(config.guard, state.guard, norm, is_applied)
        new = TrainState(
            step=state.step + 1,
            parameters=select_tree(
                is_applied, optax.apply_updates(state.parameters, changes), state.parameters
            ),
            optimizer=select_tree(is_applied, moments, state.optimizer),
            key=state.key,
            guard=guard,
        )
        return new, StepMetrics(loss, norm, rate, ~is_applied, guard.skips, count)

    if shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings.state, shardings.tokens),
        out_shardings=(shardings.state, None),
    )


def make_loss(config: TrainingConfig, definition: ModelDefinition, attend: AttentionFn) -> Loss:
    """Build the loss function of training and evaluation, not jitted.

    Negative tokens are padding at the end of a row and are not predicted. A token outside the
    vocabulary makes the loss NaN.
    """

    def loss_of(parameters, tokens):
        model = definition.merge(parameters)
        hidden = model.hidden(jnp.maximum(tokens[:, :-1], 0), attend=attend)
        return next_token_loss(model, hidden, tokens[:, 1:], config.model.loss_chunk_size)

    return loss_of


def next_token_loss(
    model: Decoder,
    hidden: Float[Array, "B T width"],
    targets: Int[Array, "B T"],
    chunk_size: int,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the summed -log p of the targets and their number, computed in chunks of positions.

    Negative targets are not predicted.
    """
    batch, tokens, width = hidden.shape
    chunks = -(-tokens // chunk_size)
    size = -(-tokens // chunks)
    padding = ((0, 0), (0, size * chunks - tokens))
    # A chunk is strided over the positions, so sequence sharding is preserved.
    hidden = jnp.pad(hidden, (*padding, (0, 0))).reshape(batch, size, chunks, width)
    targets = jnp.pad(targets, padding, constant_values=-1).reshape(batch, size, chunks)

    @jax.checkpoint
    def add(total, part):
        hidden, targets = part
        logits = model.logits(hidden)
        target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - target
        return total + jnp.where(targets >= 0, losses, 0).sum(), None

    items = jnp.moveaxis(hidden, 2, 0), jnp.moveaxis(targets, 2, 0)
    total, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), items)
    return total, (targets >= 0).sum(dtype=jnp.int32)


def accumulate_gradients(
    loss_of: Loss,
    parameters: Parameters,
    tokens: Int[Array, "B T1"],
    num_microbatches: int,
    grad_shardings: Any = None,
) -> tuple[Parameters, Float[Array, ""], Int[Array, ""]]:
    """Return gradients, loss and number of tokens, summed over the microbatches in float32.

    Sums give every token the same weight, whatever its microbatch.
    """
    loss_and_grad = jax.value_and_grad(loss_of, has_aux=True)

    def compute_part(tokens):
        (loss, count), gradients = loss_and_grad(parameters, tokens)
        if grad_shardings is not None:
            gradients = jax.lax.with_sharding_constraint(gradients, grad_shardings)
        return jax.tree.map(lambda x: x.astype(jnp.float32), gradients), loss, count

    if num_microbatches == 1:
        return compute_part(tokens)

    def add(sums, tokens):
        return jax.tree.map(jnp.add, sums, compute_part(tokens)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), parameters)
    start = zeros, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    # A microbatch is strided over the batch, so batch sharding is preserved.
    microbatches = jnp.moveaxis(tokens.reshape(-1, num_microbatches, tokens.shape[1]), 1, 0)
    return jax.lax.scan(add, start, microbatches)[0]
