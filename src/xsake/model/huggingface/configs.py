"""Read config.json: every key that affects results is either supported or rejected."""

import dataclasses
from typing import Any

from pydantic import ValidationError

from xsake.errors import CheckpointError
from xsake.model.config import DecoderConfig, LayerKind
from xsake.model.huggingface.families import FAMILIES, ModelFamily
from xsake.model.huggingface.ropes import read_gemma_ropes, read_rope
from xsake.model.huggingface.settings import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
}  # fmt: skip
MAX_LAYERS, MAX_PARAMETERS = 1024, 2**40
_DEFAULT_WINDOW = 4096

_OFF, _ABSENT, _ONE = (None, False), (None,), (None, 1)
_NO_EXPERTS = (None, 0, 1)
# Unsupported keys with the values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": _ABSENT, "compression_config": _ABSENT,
    "is_encoder_decoder": _OFF, "add_cross_attention": _OFF, "use_bidirectional_attention": _OFF,
    "num_experts": _NO_EXPERTS, "num_local_experts": _NO_EXPERTS, "n_routed_experts": _NO_EXPERTS,
    "attn_logit_softcapping": _ABSENT, "final_logit_softcapping": _ABSENT,
    "partial_rotary_factor": _ONE, "rope_interleaved": _OFF, "use_mrope": _OFF, "alibi": _OFF,
    "no_rope_layers": _ABSENT, "no_rope_layer_interval": _ABSENT, "attention_chunk_size": _ABSENT,
    "attn_temperature_tuning": _OFF, "scale_attn_by_inverse_layer_idx": _OFF,
    "use_qk_norm": _OFF, "qk_layernorm": _OFF, "use_parallel_residual": _OFF,
    "parallel_attn": _OFF, "embedding_multiplier": _ONE, "residual_multiplier": _ONE,
    "attention_multiplier": _ABSENT, "logits_scaling": _ONE, "logit_scale": _ONE,
    "per_layer_config": _ABSENT, "num_kv_shared_layers": (None, 0),
    "hidden_size_per_layer_input": (None, 0), "sliding_window": _ABSENT,
    "use_sliding_window": _OFF, "sliding_window_pattern": _ABSENT, "rope_local_base_freq": _ABSENT,
}  # fmt: skip
_HANDLED = {
    "none": set(),
    "all": {"sliding_window"},
    "some": {"sliding_window", "use_sliding_window"},
    "pattern": {
        "sliding_window", "sliding_window_pattern", "rope_local_base_freq",
        "final_logit_softcapping",
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Special tokens for generation."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


@dataclasses.dataclass(frozen=True)
class ModelDescription:
    """Parsed config.json."""

    family: ModelFamily
    config: DecoderConfig
    token_ids: TokenIds


def read_config(values: dict[str, Any]) -> ModelDescription:
    """Parse config.json; raise a `CheckpointError` with the key of an unsupported value.

    Args:
        values: content of config.json, written by transformers 4 or 5.
    """
    settings = ConfigReader(values)
    custom_code = settings.section("auto_map")
    if custom_code is not None and custom_code.values.keys() & {
        "AutoConfig",
        "AutoModelForCausalLM",
    }:
        raise settings.error(
            "auto_map", custom_code.values, "a model of transformers itself, without custom code",
            fix="remove the key if the model is identical to its model_type",
        )  # fmt: skip
    model_type = settings.choice("model_type", (*FAMILIES, "gemma3"))
    text = settings
    if model_type == "gemma3":
        model_type, text = "gemma3_text", _text_config(settings)
    family = FAMILIES[model_type]
    text = text.with_defaults(family.defaults)
    _reject_unsupported_keys(settings, family)
    _reject_unsupported_keys(text, family)
    fields = _gpt2(text) if model_type == "gpt2" else _llama(text, family)
    _check_parameter_count(fields)
    try:
        config = DecoderConfig.model_validate(fields)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        raise CheckpointError(
            "config.json describes an invalid model",
            got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300],
            expected="consistent sizes and layer types",
            fix="use the original config.json of the checkpoint",
        ) from wrong
    return ModelDescription(family, config, _token_ids(settings, text))


def _text_config(settings: ConfigReader) -> ConfigReader:
    text = settings.section("text_config")
    if text is None:
        raise settings.error("text_config", None, "the text config of a gemma3 model")
    if text.has("model_type"):
        text.choice("model_type", ("gemma3_text",))
    if settings.has("tie_word_embeddings") and text.has("tie_word_embeddings"):
        outer, inner = (x.flag("tie_word_embeddings") for x in (settings, text))
        if outer != inner:
            raise text.error("tie_word_embeddings", inner, f"{outer}, as outside text_config")
    elif settings.has("tie_word_embeddings"):
        tied = {"tie_word_embeddings": settings.flag("tie_word_embeddings")}
        text = dataclasses.replace(text, values={**text.values, **tied})
    return text


def _reject_unsupported_keys(settings: ConfigReader, family: ModelFamily) -> None:
    for key, neutral in _NEUTRAL.items():
        value = settings.values.get(key)
        if key in _HANDLED[family.window] or any(_is_neutral(value, each) for each in neutral):
            continue
        accepted = " or ".join("absent" if each is None else str(each) for each in neutral)
        raise settings.error(
            key, value, f"{accepted}, for model_type {family.name!r}",
            fix="this changes the model and is not supported",
        )  # fmt: skip


def _is_neutral(value: Any, neutral: Any) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool) or neutral is None:
        return value is neutral
    return isinstance(value, int | float) and value == neutral


def _llama(settings: ConfigReader, family: ModelFamily) -> dict[str, Any]:
    """Return the fields of the decoder's config for all families except GPT-2."""
    is_gemma = family.window == "pattern"
    width, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    layers = settings.size("num_hidden_layers", maximum=MAX_LAYERS)
    ropes = (
        read_gemma_ropes(settings)
        if is_gemma
        else dict.fromkeys((FULL, SLIDING), read_rope(settings))
    )
    biased = family.name in ("llama", "qwen3", "gemma3_text") and settings.flag("attention_bias")
    fields = {
        "vocab_size": settings.size("vocab_size"),
        "width": width,
        "mlp_width": settings.size("intermediate_size"),
        "layers": layers,
        "q_heads": heads,
        "kv_heads": settings.size("num_key_value_heads", heads),
        "head_dim": _head_dim(settings, width, heads),
        "context": settings.size("max_position_embeddings"),
        "norm_epsilon": settings.number("rms_norm_eps"),
        "has_qk_norm": family.name in ("qwen3", "gemma3_text"),
        "activation": _activation(settings, "hidden_activation" if is_gemma else "hidden_act"),
        "is_tied": settings.flag("tie_word_embeddings"),
        "has_qkv_bias": biased or family.name == "qwen2",
        "has_out_bias": biased,
        "has_mlp_bias": family.name == "llama" and settings.flag("mlp_bias"),
        **_layer_kinds(settings, family, ropes, layers),
    }
    if is_gemma:
        fields |= {
            "norm_offset": 1.0,
            "has_post_norms": True,
            "embedding_scale": width**0.5,
            "query_scale": settings.number("query_pre_attn_scalar") ** -0.5,
            "logit_softcap": settings.optional_number("final_logit_softcapping"),
        }
    return fields


def _gpt2(settings: ConfigReader) -> dict[str, Any]:
    width, heads = settings.size("n_embd"), settings.size("n_head")
    layers = settings.size("n_layer", maximum=MAX_LAYERS)
    if width % heads:
        raise settings.error("n_head", heads, f"a divisor of n_embd, which is {width}")
    _layer_types(settings, "none", layers)
    return {
        "vocab_size": settings.size("vocab_size"),
        "width": width,
        "mlp_width": settings.size("n_inner", 4 * width),
        "layers": layers,
        "q_heads": heads,
        "kv_heads": heads,
        "head_dim": width // heads,
        "context": settings.size("n_positions"),
        "kinds": (LayerKind(),),
        "has_learned_positions": True,
        "norm": "layer",
        "norm_epsilon": settings.number("layer_norm_epsilon"),
        "activation": _activation(settings, "activation_function"),
        "is_gated": False,
        "is_tied": settings.flag("tie_word_embeddings"),
        "has_qkv_bias": True,
        "has_out_bias": True,
        "has_mlp_bias": True,
        "query_scale": None if settings.flag("scale_attn_weights") else 1.0,
    }


def _head_dim(settings: ConfigReader, width: int, heads: int) -> int:
    head_dim = settings.optional_size("head_dim")
    if head_dim is not None:
        if head_dim % 2:
            raise settings.error("head_dim", head_dim, "even, for rotary positions")
        return head_dim
    if width % (2 * heads):
        raise settings.error(
            "head_dim", None, f"required, as hidden_size {width} / {heads} heads is not even"
        )
    return width // heads


def _activation(settings: ConfigReader, key: str) -> str:
    activation = ACTIVATIONS[settings.choice(key, ACTIVATIONS)]
    # Older Gemma files have two keys, of which only one has an effect.
    if key != "hidden_act" and settings.has("hidden_act"):
        other = ACTIVATIONS[settings.choice("hidden_act", ACTIVATIONS)]
        if other != activation:
            raise settings.error("hidden_act", other, f"the same as {key}, {activation}, or absent")
    return activation


def _layer_kinds(
    settings: ConfigReader, family: ModelFamily, ropes: dict, layers: int
) -> dict[str, Any]:
    window = _window(settings, family.window)
    types = _layer_types(settings, family.window, layers, window is not None)
    if SLIDING in types and window is None:
        raise settings.error(
            "sliding_window", None, "a number of tokens, as some layers use a window"
        )
    kinds = {
        each: LayerKind(window=window if each == SLIDING else None, rope=ropes[each])
        for each in dict.fromkeys(types)
    }
    order = tuple(kinds)
    numbers = tuple(order.index(each) for each in types)
    return {
        "kinds": tuple(kinds.values()),
        "kind_of_layer": numbers if len(kinds) > 1 else None,
    }


def _window(settings: ConfigReader, style: str) -> int | None:
    if style == "none" or settings.is_null("sliding_window"):
        return None
    if style == "some" and not settings.flag("use_sliding_window"):
        return None
    return settings.size("sliding_window", _DEFAULT_WINDOW)


def _layer_types(
    settings: ConfigReader, style: str, layers: int, has_window: bool = False
) -> tuple[str, ...]:
    """Return `layer_types`, or the equivalent of older files."""
    if style in ("none", "all"):
        only = SLIDING if has_window else FULL
        if settings.has("layer_types"):
            settings.choices("layer_types", (only,), count=layers)
        return (only,) * layers
    if settings.has("layer_types"):
        return settings.choices("layer_types", (FULL, SLIDING), count=layers)
    if style == "pattern":
        pattern = settings.size("sliding_window_pattern")
        return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(layers))
    first = settings.size("max_window_layers", minimum=0) if has_window else layers
    return tuple(FULL if i < first else SLIDING for i in range(layers))


def _check_parameter_count(fields: dict[str, Any]) -> None:
    """Reject models whose total size exceeds the limit, even if every single size is valid."""
    width, heads = fields["width"], fields["q_heads"] + fields["kv_heads"]
    layer = width * (2 * heads * fields["head_dim"] + 3 * fields["mlp_width"])
    total = 2 * fields["vocab_size"] * width + fields["layers"] * layer
    if total > MAX_PARAMETERS:
        raise CheckpointError(
            "config.json describes a model above the size limit",
            got=f"about {total:.1e} parameters: {width=}, layers={fields['layers']}, "
            f"mlp_width={fields['mlp_width']}, vocab_size={fields['vocab_size']}",
            expected=f"at most {MAX_PARAMETERS:.1e}",
            fix="use the original config.json of the checkpoint",
        )


def _token_ids(settings: ConfigReader, text: ConfigReader) -> TokenIds:
    first = lambda key: (settings if settings.has(key) else text).token_ids(key)
    single = lambda key: next(iter(first(key)), None)
    return TokenIds(single("bos_token_id"), first("eos_token_id"), single("pad_token_id"))
