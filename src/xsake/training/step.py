"""Training step as a pure function, with a filter for updates."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from xsake.model import AttentionFn, Decoder
from xsake.training.attention import DenseWarmup
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
    indexer_loss: Float[Array, ""] | None = None  # mean KL(attention || index) of a token


class LossSums(NamedTuple):
    """Sums over the predicted tokens."""

    loss: Float[Array, ""]  # of -log p
    count: Int[Array, ""]  # number of tokens
    indexer_loss: Float[Array, ""] | None = None  # of the mean over layers and lists of blocks


Objective = Callable[[Parameters, Int[Array, "B T1"]], tuple[Float[Array, ""], LossSums]]
"""Maps parameters and tokens [B, context + 1] to (what is minimized, its parts)."""

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
    objective = make_objective(config, definition, attend)
    num_microbatches = config.optimizer.grad_accum_steps
    grad_shardings = None if shardings is None else shardings.state.parameters

    def train_step(state: TrainState, tokens) -> tuple[TrainState, StepMetrics]:
        summed, sums = accumulate_gradients(
            objective, state.parameters, tokens, num_microbatches, grad_shardings
        )
        share = 1 / jnp.maximum(sums.count, 1).astype(jnp.float32)
        loss, gradients = sums.loss * share, jax.tree.map(lambda x: x * share, summed)
        indexer_loss = None if sums.indexer_loss is None else sums.indexer_loss * share
        norm = optax.tree.norm(gradients)
        rate = optimizer.learning_rate(optimizer.updates(state.optimizer))
        is_applied = should_update(config.guard, state.guard, loss, norm)
        changes, moments = optimizer.transform.update(gradients, state.optimizer, state.parameters)
        if config.indexer_loss is not None:
            rest = 0.0 if _is_frozen(config, attend) else 1.0
            changes = _scale_changes(changes, config.indexer_loss.learning_rate_ratio, rest)
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
        return new, StepMetrics(
            loss, norm, rate, ~is_applied, guard.skips, sums.count, indexer_loss
        )

    if shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings.state, shardings.tokens),
        out_shardings=(shardings.state, None),
    )


def make_objective(
    config: TrainingConfig, definition: ModelDefinition, attend: AttentionFn
) -> Objective:
    """Build what training minimizes: the loss, and the loss of an indexer if the model has one."""
    settings = config.indexer_loss
    if settings is None:
        loss_of = make_loss(config, definition, attend)

        def plain(parameters, tokens):
            loss, count = loss_of(parameters, tokens)
            return loss, LossSums(loss, count)

        return plain

    def objective(parameters, tokens):
        model, targets = definition.merge(parameters), tokens[:, 1:]

        def watch(q, k, v, call):
            is_sparse = not isinstance(attend, DenseWarmup)
            nats = call.native.distillation_loss(q, k, call, is_sparse=is_sparse).mean(-1)
            return jnp.where(targets >= 0, nats, 0).sum()

        inputs = jnp.maximum(tokens[:, :-1], 0)
        hidden, nats = model.hidden_and_observed(inputs, watch, attend=attend)
        loss, count = next_token_loss(model, hidden, targets, config.model.loss_chunk_size)
        sums = LossSums(loss, count, nats.mean())
        # A frozen model needs no backward pass.
        return (0 if _is_frozen(config, attend) else loss) + settings.weight * nats.mean(), sums

    return objective


def _is_frozen(config: TrainingConfig, attend: AttentionFn) -> bool:
    settings = config.indexer_loss
    return settings is not None and settings.freeze_model and isinstance(attend, DenseWarmup)


def _scale_changes(changes: Any, indexers: float, rest: float) -> Any:
    """Return changes, weight decay included, times a factor each for indexers and other weights."""
    is_index = lambda path: any(getattr(key, "key", None) == "indexer" for key in path)

    def scale(path, x: Array) -> Array:
        factor = indexers if is_index(path) else rest
        return x * factor if factor else jnp.zeros_like(x)

    return jax.tree_util.tree_map_with_path(scale, changes)


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
    objective: Objective,
    parameters: Parameters,
    tokens: Int[Array, "B T1"],
    num_microbatches: int,
    grad_shardings: Any = None,
) -> tuple[Parameters, LossSums]:
    """Return gradients and sums of losses over the microbatches, in float32.

    Sums give every token the same weight, whatever its microbatch.
    """
    gradients_of = jax.grad(objective, has_aux=True)

    def compute_part(tokens):
        gradients, sums = gradients_of(parameters, tokens)
        if grad_shardings is not None:
            gradients = jax.lax.with_sharding_constraint(gradients, grad_shardings)
        return jax.tree.map(lambda x: x.astype(jnp.float32), gradients), sums

    if num_microbatches == 1:
        return compute_part(tokens)

    def add(sums, tokens):
        return jax.tree.map(jnp.add, sums, compute_part(tokens)), None

    # A microbatch is strided over the batch, so batch sharding is preserved.
    microbatches = jnp.moveaxis(tokens.reshape(-1, num_microbatches, tokens.shape[1]), 1, 0)
    shapes = jax.eval_shape(compute_part, microbatches[0])
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, start, microbatches)[0]
