"""From a checkpoint of training to a directory that Hugging Face transformers loads."""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from xsake.errors import CheckpointError
from xsake.model import Decoder, DecoderConfig, huggingface
from xsake.model.huggingface.configs import TokenIds
from xsake.training.balanced import with_heads_in
from xsake.training.checkpoints.store import CheckpointStore
from xsake.training.state import Definition


def export_checkpoint(
    store: CheckpointStore,
    directory: Path,
    *,
    config: DecoderConfig,
    family: str,
    step: int | None = None,
    part: str = "parameters",
    param_dtype=jnp.float32,
    token_ids: TokenIds = TokenIds(),  # noqa: B008 (frozen)
    tokenizer_from: Path | None = None,
    is_replacing: bool = False,
) -> int:
    """Write the parameters of a step as `config.json` and safetensors; returns the step.

    Nothing but the parameters is read, on the first device of this process.

    Args:
        store: of the checkpoints; made with is_read_only=True it may be that of a run that goes on.
        directory: to be made.
        config: of the decoder that was trained.
        family: `model_type` to write it as.
        step: None: the newest that is sound.
        part: name of the parameters in the saved tree.
        param_dtype: that they were trained and saved in.
        token_ids: bos, eos and pad for config.json.
        tokenizer_from: a directory whose tokenizer files are copied along.
        is_replacing: whether a checkpoint that is there already may be replaced.
    """
    abstract = nnx.eval_shape(
        lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(param_dtype))
    )
    graph, state, rest = nnx.split(abstract, nnx.Param, ...)
    if jax.tree.leaves(rest):
        raise CheckpointError(
            "the decoder has state that no checkpoint of parameters holds",
            got=", ".join(map(str, nnx.to_pure_dict(rest))),
            expected="parameters alone",
        )
    restored = store.restore(state, step, part=part)
    model = nnx.merge(graph, restored.tree, rest)
    huggingface.export(
        _in_own_order(model, restored.extra.get("kv_order")),
        directory,
        family=family,
        token_ids=token_ids,
        tokenizer_from=tokenizer_from,
        is_replacing=is_replacing,
    )
    return restored.step


def _in_own_order(model: Decoder, kv_order: list[list[int]] | None) -> Decoder:
    """The model with its heads where the plan of the run's calibration has them."""
    if kv_order is None:
        return model
    definition = Definition.of(model)
    parameters = definition.parameters(model)
    return definition.merge(with_heads_in(kv_order, parameters, definition.names, is_undone=True))
