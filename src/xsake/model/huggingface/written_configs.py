"""From a decoder's config to config.json: read by transformers 5, and by 4 where 4 can say it."""

from typing import Any

from xsake.errors import CheckpointError
from xsake.model.config import DecoderConfig, LayerKind
from xsake.model.huggingface.configs import FULL, SLIDING, TokenIds, read_config
from xsake.model.huggingface.families import Family
from xsake.model.huggingface.ropes import older_scaling, write_rope

_GATED_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_GPT2_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}


def write_config(
    family: Family, config: DecoderConfig, *, dtype: str, token_ids: TokenIds
) -> dict[str, Any]:
    """What config.json must say for this model, or a `CheckpointError` if the family cannot.

    Args:
        family: whose keys to write.
        config: the decoder's.
        dtype: of the weights, as "float32".
        token_ids: what to write as bos, eos and pad.
    """
    if any((kind.rope is None) != (family.name == "gpt2") for kind in config.kinds):
        raise _cannot(family, "rotary positions in all layers, or in none for gpt2")
    eos = token_ids.eos
    values = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.is_tied,
        # Version 4 reads the second one.
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": token_ids.bos,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": token_ids.pad,
        **(_gpt2(config) if family.name == "gpt2" else _llama(family, config)),
    }
    again = _essence(read_config(values).config)
    wrong = [
        f"{field}: {wanted!r}, would be read as {again[field]!r}"[:200]
        for field, wanted in _essence(config).items()
        if wanted != again[field]
    ]
    if wrong:
        raise _cannot(family, "; ".join(wrong[:5]))
    return values


def _essence(config: DecoderConfig) -> dict[str, Any]:
    """What a config means, whichever way it is put."""
    kinds = [config.kinds[number] for number in config.layer_kinds]
    said = {name: getattr(config, name) for name in type(config).model_fields}
    del said["kind_of_layer"]
    # 1 / sqrt(n) and n ** -0.5 are not always the same float.
    return said | {"kinds": kinds, "query_scale": float(f"{config.scale:.14g}")}


def _cannot(family: Family, got: str) -> CheckpointError:
    return CheckpointError(
        f"a checkpoint of the family {family.name!r} cannot say what this model is",
        got=got,
        expected=f"a model that {family.architecture} computes too",
        fix="export it as the family it was loaded from, or change the model's config",
    )


def _llama(family: Family, config: DecoderConfig) -> dict[str, Any]:
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
        **(_ropes_of_gemma(config) if is_gemma else _one_rope(config)),
        **_windows(family, config),
    }
    if family.name in ("llama", "qwen3", "gemma3_text"):
        values["attention_bias"] = config.has_qkv_bias
    if family.name == "llama":
        values["mlp_bias"] = config.has_mlp_bias
    if is_gemma:
        values |= {
            "query_pre_attn_scalar": _scalar(family, config),
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


def _scalar(family: Family, config: DecoderConfig) -> int:
    """The whole number whose inverse root is the scale."""
    scalar = round(config.scale**-2)
    if scalar < 1 or abs(scalar**-0.5 - config.scale) > 1e-15 * config.scale:
        raise _cannot(family, f"query_scale: {config.scale}, not 1 / sqrt(a whole number)")
    return scalar


def _one_rope(config: DecoderConfig) -> dict[str, Any]:
    rope = config.kinds[config.layer_kinds[0]].rope
    assert rope is not None
    found = write_rope(rope)
    return {
        "rope_parameters": found,
        "rope_theta": rope.base,
        "rope_scaling": older_scaling(found),
    }


def _ropes_of_gemma(config: DecoderConfig) -> dict[str, Any]:
    full, sliding = (_of_word(config, word).rope for word in (FULL, SLIDING))
    assert full is not None and sliding is not None
    newer = {FULL: write_rope(full), SLIDING: write_rope(sliding)}
    found = {"rope_parameters": newer}
    if sliding.scaling is None:
        found |= {
            "rope_theta": full.base,
            "rope_local_base_freq": sliding.base,
            "rope_scaling": older_scaling(newer[FULL]),
        }
    return found


def _windows(family: Family, config: DecoderConfig) -> dict[str, Any]:
    window = _of_word(config, SLIDING).window
    words = [
        FULL if config.kinds[number].window is None else SLIDING for number in config.layer_kinds
    ]
    if family.window == "none":
        return {}
    if family.window == "all":
        return {"sliding_window": window}
    if family.window == "pattern":
        period = words.index(FULL) + 1 if FULL in words else config.layers + 1
        regular = [SLIDING if (i + 1) % period else FULL for i in range(config.layers)]
        pattern = {"sliding_window_pattern": period} if words == regular else {}
        # Even a model without such layers states a window: without one transformers refuses it.
        return {"layer_types": words, "sliding_window": window or config.context, **pattern}
    first = words.index(SLIDING) if SLIDING in words else config.layers
    return {
        "layer_types": words,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first,
    }


def _of_word(config: DecoderConfig, word: str) -> LayerKind:
    """The first kind of layer that is called so, or any if there is none."""
    used = [config.kinds[number] for number in config.layer_kinds]
    fitting = [kind for kind in used if (kind.window is None) == (word == FULL)]
    return fitting[0] if fitting else used[0]
