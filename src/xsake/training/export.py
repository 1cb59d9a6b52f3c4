"""Export of a training checkpoint to a directory in Hugging Face format."""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from xsake.errors import CheckpointError
from xsake.model import Decoder, DecoderConfig, huggingface
from xsake.model.huggingface.configs import TokenIds
from xsake.training.checkpointing import CheckpointStore
from xsake.training.state import ModelDefinition, reorder_heads


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
    """Write the parameters of a step as `config.json` and safetensors; return the step.

    Only the parameters are read, to the first device of this process.

    Args:
        store: of the checkpoints; with is_read_only=True the run may still be training.
        directory: to create.
        config: of the trained decoder.
        family: `model_type` to write.
        step: None: the newest valid one.
        part: name of the parameters in the saved tree.
        param_dtype: dtype of the saved parameters.
        token_ids: bos, eos and pad for config.json.
        tokenizer_from: directory whose tokenizer files are copied.
        is_replacing: whether an existing checkpoint may be replaced.
    """
    abstract = nnx.eval_shape(
        lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(param_dtype))
    )
    graph, state, rest = nnx.split(abstract, nnx.Param, ...)
    if jax.tree.leaves(rest):
        got = ", ".join(map(str, nnx.to_pure_dict(rest)))
        what = "the decoder has state other than parameters"
        raise CheckpointError("decoder-state", what, got=got, expected="parameters only")
    restored = store.restore(state, step, part=part)
    model = nnx.merge(graph, restored.tree, rest)
    if (kv_order := restored.extra.get("kv_order")) is not None:
        definition = ModelDefinition.from_model(model)
        parameters = definition.parameters(model)
        original = reorder_heads(kv_order, parameters, definition.names, is_inverse=True)
        model = definition.merge(original)
    huggingface.export(
        model, directory, family=family, token_ids=token_ids, tokenizer_from=tokenizer_from,
        overwrite=is_replacing,
    )  # fmt: skip
    return restored.step
