"""Write config.json for transformers 5, and for 4 where it can represent the model."""

from typing import Any

from xsake.errors import CheckpointError
from xsake.model.config import DecoderConfig, LayerKind
from xsake.model.huggingface.configs import FULL, SLIDING, TokenIds, read_config
from xsake.model.huggingface.families import ModelFamily
from xsake.model.huggingface.ropes import legacy_rope_scaling, write_rope

_GATED_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_GPT2_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}


def write_config(
    family: ModelFamily, config: DecoderConfig, *, dtype: str, token_ids: TokenIds
) -> dict[str, Any]:
    """Return the content of config.json; raise CheckpointError if the family cannot represent it.

    Args:
        family: to write.
        config: of the decoder.
        dtype: of the weights, such as "float32".
        token_ids: bos, eos and pad.
    """
    if any((kind.rope is None) != (family.name == "gpt2") for kind in config.kinds):
        raise _unsupported_error(family, "rotary positions in all layers, or in none for gpt2")
    eos = token_ids.eos
    values = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.is_tied,
        # transformers 4 reads torch_dtype.
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": token_ids.bos,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": token_ids.pad,
        **(_gpt2(config) if family.name == "gpt2" else _llama(family, config)),
    }
    loaded = _canonical_fields(read_config(values).config)
    wrong = [
        f"{field}: {value!r}, would be read as {loaded[field]!r}"[:200]
        for field, value in _canonical_fields(config).items()
        if value != loaded[field]
    ]
    if wrong:
        raise _unsupported_error(family, "; ".join(wrong[:5]))
    return values


def _canonical_fields(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a config in a canonical form, for comparison."""
    kinds = [config.kinds[number] for number in config.layer_kinds]
    fields = {name: getattr(config, name) for name in type(config).model_fields}
    del fields["kind_of_layer"]
    # 1 / sqrt(n) and n ** -0.5 are not always the same float.
    return fields | {"kinds": kinds, "query_scale": float(f"{config.scale:.14g}")}


def _unsupported_error(family: ModelFamily, got: str) -> CheckpointError:
    return CheckpointError(
        f"the family {family.name!r} cannot represent this model",
        got=got,
        expected=f"a model supported by {family.architecture}",
        fix="export it with the family it was loaded from, or change the model's config",
    )


def _llama(family: ModelFamily, config: DecoderConfig) -> dict[str, Any]:
    is_gemma = family.window == "pattern"
    activation = "hidden_activation" if is_gemma else "hidden_act"
    values = {
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_epsilon,
        activation: _GATED_NAMES[config.activation],
        **(_gemma_ropes(config) if is_gemma else _one_rope(config)),
        **_windows(family, config),
    }
    if family.name in ("llama", "qwen3", "gemma3_text"):
        values["attention_bias"] = config.has_qkv_bias
    if family.name == "llama":
        values["mlp_bias"] = config.has_mlp_bias
    if is_gemma:
        values |= {
            "query_pre_attn_scalar": _query_scalar(family, config),
            "final_logit_softcapping": config.logit_softcap,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        }
    return values


def _gpt2(config: DecoderConfig) -> dict[str, Any]:
    return {
        "n_embd": config.width,
        "n_head": config.q_heads,
        "n_layer": config.layers,
        "n_positions": config.context,
        "n_inner": config.mlp_width,
        "activation_function": _GPT2_NAMES[config.activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "scale_attn_weights": config.scale != 1 or config.head_dim == 1,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    }


def _query_scalar(family: ModelFamily, config: DecoderConfig) -> int:
    """Return the integer whose inverse square root is the scale."""
    scalar = round(config.scale**-2)
    if scalar < 1 or abs(scalar**-0.5 - config.scale) > 1e-15 * config.scale:
        raise _unsupported_error(family, f"query_scale: {config.scale}, not 1 / sqrt(integer)")
    return scalar


def _one_rope(config: DecoderConfig) -> dict[str, Any]:
    rope = config.kinds[config.layer_kinds[0]].rope
    assert rope is not None
    parameters = write_rope(rope)
    return {
        "rope_parameters": parameters,
        "rope_theta": rope.base,
        "rope_scaling": legacy_rope_scaling(parameters),
    }


def _gemma_ropes(config: DecoderConfig) -> dict[str, Any]:
    full, sliding = (_first_kind(config, each).rope for each in (FULL, SLIDING))
    assert full is not None and sliding is not None
    newer = {FULL: write_rope(full), SLIDING: write_rope(sliding)}
    values = {"rope_parameters": newer}
    if sliding.scaling is None:
        values |= {
            "rope_theta": full.base,
            "rope_local_base_freq": sliding.base,
            "rope_scaling": legacy_rope_scaling(newer[FULL]),
        }
    return values


def _windows(family: ModelFamily, config: DecoderConfig) -> dict[str, Any]:
    window = _first_kind(config, SLIDING).window
    types = [
        FULL if config.kinds[number].window is None else SLIDING for number in config.layer_kinds
    ]
    if family.window == "none":
        return {}
    if family.window == "all":
        return {"sliding_window": window}
    if family.window == "pattern":
        period = types.index(FULL) + 1 if FULL in types else config.layers + 1
        regular = [SLIDING if (i + 1) % period else FULL for i in range(config.layers)]
        pattern = {"sliding_window_pattern": period} if types == regular else {}
        # transformers requires a window even if no layer uses it.
        return {"layer_types": types, "sliding_window": window or config.context, **pattern}
    first = types.index(SLIDING) if SLIDING in types else config.layers
    return {
        "layer_types": types,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first,
    }


def _first_kind(config: DecoderConfig, layer_type: str) -> LayerKind:
    """Return the first kind of this layer type, or any if there is none."""
    used = [config.kinds[number] for number in config.layer_kinds]
    matches = [kind for kind in used if (kind.window is None) == (layer_type == FULL)]
    return matches[0] if matches else used[0]
