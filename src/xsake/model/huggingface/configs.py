"""From config.json to a decoder's config: handles or refuses every key that changes the numbers."""

import dataclasses
from typing import Any

from pydantic import ValidationError

from xsake.errors import CheckpointError
from xsake.model.config import DecoderConfig, LayerKind
from xsake.model.huggingface.families import FAMILIES, Family
from xsake.model.huggingface.ropes import read_rope, read_ropes_of_gemma
from xsake.model.huggingface.settings import Settings

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
}  # fmt: skip
MAX_LAYERS, MAX_PARAMETERS = 1024, 2**40
_DEFAULT_WINDOW = 4096

_OFF, _ABSENT, _ONE = (None, False), (None,), (None, 1)
_NO_EXPERTS = (None, 0, 1)
# Keys that change what a model computes, with the values that leave it as it is here.
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
    """Tokens with a meaning to a generator; the decoder itself does not know them."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


@dataclasses.dataclass(frozen=True)
class Description:
    """What config.json says."""

    family: Family
    config: DecoderConfig
    token_ids: TokenIds


def read_config(values: dict[str, Any]) -> Description:
    """The description of a model, or a `CheckpointError` that names the key.

    Args:
        values: the object in config.json, in the spelling of transformers 4 or 5.
    """
    settings = Settings(values)
    own_code = settings.section("auto_map")
    if own_code is not None and own_code.values.keys() & {"AutoConfig", "AutoModelForCausalLM"}:
        raise settings.refusal(
            "auto_map", own_code.values, "a model of transformers itself, without code of its own",
            fix="remove the key if the model computes exactly what its model_type says",
        )  # fmt: skip
    kind = settings.choice("model_type", (*FAMILIES, "gemma3"))
    own = settings
    if kind == "gemma3":
        kind, own = "gemma3_text", _text_part(settings)
    family = FAMILIES[kind]
    own = own.with_defaults(family.defaults)
    _refuse_what_is_not_computed(settings, family)
    _refuse_what_is_not_computed(own, family)
    fields = _gpt2(own) if kind == "gpt2" else _llama(own, family)
    _refuse_giants(fields)
    try:
        config = DecoderConfig.model_validate(fields)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        raise CheckpointError(
            "config.json describes a model that cannot be",
            got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300],
            expected="sizes and kinds of layers that fit each other",
            fix="take config.json from the checkpoint itself, unchanged",
        ) from wrong
    return Description(family, config, _token_ids(settings, own))


def _text_part(settings: Settings) -> Settings:
    text = settings.section("text_config")
    if text is None:
        raise settings.refusal("text_config", None, "the text part of a gemma3 model")
    if text.has("model_type"):
        text.choice("model_type", ("gemma3_text",))
    if settings.has("tie_word_embeddings") and text.has("tie_word_embeddings"):
        outer, inner = (x.flag("tie_word_embeddings") for x in (settings, text))
        if outer != inner:
            raise text.refusal("tie_word_embeddings", inner, f"{outer}, as outside text_config")
    elif settings.has("tie_word_embeddings"):
        tied = {"tie_word_embeddings": settings.flag("tie_word_embeddings")}
        text = dataclasses.replace(text, values={**text.values, **tied})
    return text


def _refuse_what_is_not_computed(settings: Settings, family: Family) -> None:
    for key, neutral in _NEUTRAL.items():
        value = settings.values.get(key)
        if key in _HANDLED[family.window] or any(_same(value, known) for known in neutral):
            continue
        accepted = " or ".join("absent" if known is None else str(known) for known in neutral)
        raise settings.refusal(
            key, value, f"{accepted}, for model_type {family.name!r}",
            fix="this would change what the model computes, and it is not supported",
        )  # fmt: skip


def _same(value: Any, known: Any) -> bool:
    if isinstance(value, bool) or isinstance(known, bool) or known is None:
        return value is known
    return isinstance(value, int | float) and value == known


def _llama(settings: Settings, family: Family) -> dict[str, Any]:
    """Fields of the decoder's config for every family but GPT-2."""
    is_gemma = family.window == "pattern"
    width, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    layers = settings.size("num_hidden_layers", most=MAX_LAYERS)
    ropes = (
        read_ropes_of_gemma(settings)
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
        **_kinds(settings, family, ropes, layers),
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


def _gpt2(settings: Settings) -> dict[str, Any]:
    width, heads = settings.size("n_embd"), settings.size("n_head")
    layers = settings.size("n_layer", most=MAX_LAYERS)
    if width % heads:
        raise settings.refusal("n_head", heads, f"a divisor of n_embd, which is {width}")
    _kind_of_each_layer(settings, "none", layers)
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


def _head_dim(settings: Settings, width: int, heads: int) -> int:
    given = settings.optional_size("head_dim")
    if given is not None:
        if given % 2:
            raise settings.refusal("head_dim", given, "even, for rotary positions")
        return given
    if width % (2 * heads):
        raise settings.refusal(
            "head_dim", None, f"given, as hidden_size {width} has no even share for {heads} heads"
        )
    return width // heads


def _activation(settings: Settings, key: str) -> str:
    found = ACTIVATIONS[settings.choice(key, ACTIVATIONS)]
    # Gemma's older files name it twice; only one of the two is heard.
    if key != "hidden_act" and settings.has("hidden_act"):
        other = ACTIVATIONS[settings.choice("hidden_act", ACTIVATIONS)]
        if other != found:
            raise settings.refusal("hidden_act", other, f"the same as {key}, {found}, or absent")
    return found


def _kinds(settings: Settings, family: Family, ropes: dict, layers: int) -> dict[str, Any]:
    window = _window(settings, family.window)
    words = _kind_of_each_layer(settings, family.window, layers, window is not None)
    if SLIDING in words and window is None:
        raise settings.refusal(
            "sliding_window", None, "a number of tokens, as some layers see only a window"
        )
    made = {
        word: LayerKind(window=window if word == SLIDING else None, rope=ropes[word])
        for word in dict.fromkeys(words)
    }
    order = tuple(made)
    numbers = tuple(order.index(word) for word in words)
    return {
        "kinds": tuple(made.values()),
        "kind_of_layer": numbers if len(made) > 1 else None,
    }


def _window(settings: Settings, style: str) -> int | None:
    if style == "none" or settings.is_null("sliding_window"):
        return None
    if style == "some" and not settings.flag("use_sliding_window"):
        return None
    return settings.size("sliding_window", _DEFAULT_WINDOW)


def _kind_of_each_layer(
    settings: Settings, style: str, layers: int, has_window: bool = False
) -> tuple[str, ...]:
    """`layer_types`, or what older files imply."""
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
    first = settings.size("max_window_layers", least=0) if has_window else layers
    return tuple(FULL if i < first else SLIDING for i in range(layers))


def _refuse_giants(fields: dict[str, Any]) -> None:
    """Sizes that are fine one by one can still describe a model that no memory holds."""
    width, heads = fields["width"], fields["q_heads"] + fields["kv_heads"]
    layer = width * (2 * heads * fields["head_dim"] + 3 * fields["mlp_width"])
    total = 2 * fields["vocab_size"] * width + fields["layers"] * layer
    if total > MAX_PARAMETERS:
        raise CheckpointError(
            "config.json describes a model larger than any that is supported",
            got=f"about {total:.1e} parameters: {width=}, layers={fields['layers']}, "
            f"mlp_width={fields['mlp_width']}, vocab_size={fields['vocab_size']}",
            expected=f"at most {MAX_PARAMETERS:.1e}",
            fix="take config.json from the checkpoint itself, unchanged",
        )


def _token_ids(settings: Settings, own: Settings) -> TokenIds:
    first = lambda key: (settings if settings.has(key) else own).token_ids(key)
    single = lambda key: next(iter(first(key)), None)
    return TokenIds(single("bos_token_id"), first("eos_token_id"), single("pad_token_id"))
