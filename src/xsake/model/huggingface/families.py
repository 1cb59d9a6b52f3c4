"""Model families: tensor names, keys of config.json, and defaults of transformers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from xsake.model.config import DecoderConfig
from xsake.model.huggingface.config_reader import (
    FLAG,
    MAX_SIZE,
    NUMBER,
    REQUIRED,
    SIZE,
    Kind,
    one_of,
    sizes,
)

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
}  # fmt: skip
MAX_LAYERS = 1024


class TensorSpec(NamedTuple):
    """Mapping of a tensor to a parameter."""

    name: str  # of the tensor; {layer} is the layer number, {body} and {head} the file's prefixes
    parameter: str  # path in the decoder
    axes: str  # logical axes of the tensor, outermost first; "a*b" is a merged axis, b fastest
    part: tuple[int, int] = (0, 1)  # (index, count) of a split of the tensor's last axis


class Prefixes(NamedTuple):
    """Prefixes of tensor names of the body and the head."""

    body: str
    head: str = ""


class Key(NamedTuple):
    """Key of config.json: the field of `DecoderConfig` it sets, and the conversion both ways."""

    field: str
    kind: Kind
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[DecoderConfig], Any] | None = None  # None: the value of the field


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """Hugging Face model type."""

    name: str  # `model_type`
    architecture: str  # class of transformers
    tensors: tuple[TensorSpec, ...]  # of parameters; those of absent parameters are ignored
    prefixes: tuple[Prefixes, ...]  # of tensor names; the first one is written
    keys: Mapping[str, Key]  # of config.json that set one field each
    # fields that no key sets; functions compute them from the other fields
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any]  # of transformers for absent config keys
    window: str  # layers with a sliding window: "none", "all", "some" or "pattern"
    # key of the RoPE base by layer type; one for all layers if there is one entry
    rope_bases: Mapping[str, str]
    harmless: Mapping[str, str]  # patterns of tensors without effect, with the reason


def _tensors(prefix: str, rows: Mapping[str, tuple[str, str]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(prefix + name, *row) for name, row in rows.items())


_ENDS = (
    TensorSpec("{body}embed_tokens.weight", "embedding", "vocab, embed"),
    TensorSpec("{body}norm.weight", "final_norm.weight", "embed"),
    TensorSpec("{head}lm_head.weight", "head", "vocab, embed"),
)
_BLOCK = _tensors("{body}layers.{layer}.", {
    "self_attn.q_proj.weight": ("layers.attention.query", "q_heads*head_dim, embed"),
    "self_attn.k_proj.weight": ("layers.attention.key", "kv_heads*head_dim, embed"),
    "self_attn.v_proj.weight": ("layers.attention.value", "kv_heads*head_dim, embed"),
    "self_attn.o_proj.weight": ("layers.attention.out", "embed, q_heads*head_dim"),
    "self_attn.q_proj.bias": ("layers.attention.query_bias", "q_heads*head_dim"),
    "self_attn.k_proj.bias": ("layers.attention.key_bias", "kv_heads*head_dim"),
    "self_attn.v_proj.bias": ("layers.attention.value_bias", "kv_heads*head_dim"),
    "self_attn.o_proj.bias": ("layers.attention.out_bias", "embed"),
    "self_attn.q_norm.weight": ("layers.attention.query_norm.weight", "head_dim"),
    "self_attn.k_norm.weight": ("layers.attention.key_norm.weight", "head_dim"),
    "mlp.gate_proj.weight": ("layers.mlp.gate", "mlp, embed"),
    "mlp.up_proj.weight": ("layers.mlp.up", "mlp, embed"),
    "mlp.down_proj.weight": ("layers.mlp.down", "embed, mlp"),
    "mlp.gate_proj.bias": ("layers.mlp.gate_bias", "mlp"),
    "mlp.up_proj.bias": ("layers.mlp.up_bias", "mlp"),
    "mlp.down_proj.bias": ("layers.mlp.down_bias", "embed"),
    "input_layernorm.weight": ("layers.attention_norm.weight", "embed"),
})  # fmt: skip
_LLAMA_TENSORS = (*_ENDS, *_BLOCK, *_tensors("{body}layers.{layer}.", {
    "post_attention_layernorm.weight": ("layers.mlp_norm.weight", "embed"),
}))  # fmt: skip
_GEMMA_TENSORS = (*_ENDS, *_BLOCK, *_tensors("{body}layers.{layer}.", {
    "post_attention_layernorm.weight": ("layers.attention_post_norm.weight", "embed"),
    "pre_feedforward_layernorm.weight": ("layers.mlp_norm.weight", "embed"),
    "post_feedforward_layernorm.weight": ("layers.mlp_post_norm.weight", "embed"),
}))  # fmt: skip

_H = "{body}h.{layer}."
_GPT2_TENSORS = (
    TensorSpec("{body}wte.weight", "embedding", "vocab, embed"),
    TensorSpec("{body}wpe.weight", "positions", "position, embed"),
    TensorSpec("{body}ln_f.weight", "final_norm.weight", "embed"),
    TensorSpec("{body}ln_f.bias", "final_norm.bias", "embed"),
    TensorSpec("{head}lm_head.weight", "head", "vocab, embed"),
    *_tensors(_H, {
        "ln_1.weight": ("layers.attention_norm.weight", "embed"),
        "ln_1.bias": ("layers.attention_norm.bias", "embed"),
    }),
    *(
        TensorSpec(f"{_H}attn.c_attn.{name}", f"layers.attention.{each}{suffix}", axes, (part, 3))
        for name, suffix, outer in (("weight", "", "embed, "), ("bias", "_bias", ""))
        for part, (each, axes) in enumerate((
            ("query", f"{outer}q_heads*head_dim"), ("key", f"{outer}kv_heads*head_dim"),
            ("value", f"{outer}kv_heads*head_dim"),
        ))
    ),
    *_tensors(_H, {
        "attn.c_proj.weight": ("layers.attention.out", "q_heads*head_dim, embed"),
        "attn.c_proj.bias": ("layers.attention.out_bias", "embed"),
        "ln_2.weight": ("layers.mlp_norm.weight", "embed"),
        "ln_2.bias": ("layers.mlp_norm.bias", "embed"),
        "mlp.c_fc.weight": ("layers.mlp.up", "embed, mlp"),
        "mlp.c_fc.bias": ("layers.mlp.up_bias", "mlp"),
        "mlp.c_proj.weight": ("layers.mlp.down", "mlp, embed"),
        "mlp.c_proj.bias": ("layers.mlp.down_bias", "embed"),
    }),
)  # fmt: skip


def _activation(gelu_tanh: str) -> Key:
    """Key of the activation, with the name to write for gelu_tanh."""
    write = lambda config: {"gelu_tanh": gelu_tanh}.get(config.activation, config.activation)
    return Key("activation", one_of(ACTIVATIONS), ACTIVATIONS.__getitem__, write)


def _derive_head_dim(fields: dict[str, Any]) -> Any:
    head_dim, rest = divmod(fields["width"], fields["q_heads"])
    return REQUIRED if rest else head_dim


_EVEN = Kind(
    lambda value: SIZE.accepts(value) and value % 2 == 0,
    f"an even integer up to {MAX_SIZE}, required if hidden_size / num_attention_heads is not even",
)
_KEYS = {
    "vocab_size": Key("vocab_size", SIZE),
    "hidden_size": Key("width", SIZE),
    "intermediate_size": Key("mlp_width", SIZE),
    "num_hidden_layers": Key("layers", sizes(maximum=MAX_LAYERS)),
    "num_attention_heads": Key("q_heads", SIZE),
    "num_key_value_heads": Key("kv_heads", SIZE),
    "head_dim": Key("head_dim", _EVEN),
    "max_position_embeddings": Key("context", SIZE),
    "rms_norm_eps": Key("norm_epsilon", NUMBER),
    "hidden_act": _activation("gelu_pytorch_tanh"),
    "tie_word_embeddings": Key("is_tied", FLAG),
}
_ATTENTION_BIAS = {"attention_bias": Key("has_qkv_bias", FLAG)}
_SAME_OUT_BIAS = {"has_out_bias": lambda fields: fields["has_qkv_bias"]}
_GEMMA_KEYS = {key: _KEYS[key] for key in _KEYS if key != "hidden_act"} | _ATTENTION_BIAS | {
    "hidden_activation": _KEYS["hidden_act"],
    "final_logit_softcapping": Key("logit_softcap", NUMBER),
    # The integer whose inverse square root is the scale.
    "query_pre_attn_scalar": Key(
        "query_scale", NUMBER, lambda value: value**-0.5, lambda config: round(config.scale**-2)
    ),
}  # fmt: skip
_GPT2_KEYS = {
    "vocab_size": Key("vocab_size", SIZE),
    "n_embd": Key("width", SIZE),
    "n_inner": Key("mlp_width", SIZE),
    "n_layer": Key("layers", sizes(maximum=MAX_LAYERS)),
    "n_head": Key("q_heads", SIZE),
    "n_positions": Key("context", SIZE),
    "layer_norm_epsilon": Key("norm_epsilon", NUMBER),
    "activation_function": _activation("gelu_new"),
    "tie_word_embeddings": Key("is_tied", FLAG),
    "scale_attn_weights": Key(
        "query_scale", FLAG, lambda is_scaled: None if is_scaled else 1.0,
        lambda config: config.scale != 1 or config.head_dim == 1,
    ),
}  # fmt: skip
DERIVED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "num_key_value_heads": lambda fields: fields["q_heads"],
    "head_dim": _derive_head_dim,
    "n_inner": lambda fields: 4 * fields["width"],
    "final_logit_softcapping": lambda fields: None,
}
"""Defaults of keys that depend on the fields before them, or are None."""

_FREQUENCIES = {r".*\.rotary_emb\.inv_freq": "frequencies are computed from config.json"}
_MODEL, _THETA = (Prefixes("model."),), {FULL: "rope_theta"}
_COMMON = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_QWEN = _COMMON | {
    "max_position_embeddings": 32768, "use_sliding_window": False, "max_window_layers": 28,
}  # fmt: skip

FAMILIES = {
    family.name: family
    for family in (
        ModelFamily(
            "llama", "LlamaForCausalLM", _LLAMA_TENSORS, _MODEL,
            _KEYS | _ATTENTION_BIAS | {"mlp_bias": Key("has_mlp_bias", FLAG)}, _SAME_OUT_BIAS,
            _COMMON | {"max_position_embeddings": 2048}, "none", _THETA, _FREQUENCIES,
        ),
        ModelFamily(
            "qwen2", "Qwen2ForCausalLM", _LLAMA_TENSORS, _MODEL,
            _KEYS, {"has_qkv_bias": True}, _QWEN, "some", _THETA, _FREQUENCIES,
        ),
        ModelFamily(
            "qwen3", "Qwen3ForCausalLM", _LLAMA_TENSORS, _MODEL,
            _KEYS | _ATTENTION_BIAS, _SAME_OUT_BIAS | {"has_qk_norm": True},
            _QWEN | {"head_dim": 128}, "some", _THETA, _FREQUENCIES,
        ),
        ModelFamily(
            "mistral", "MistralForCausalLM", _LLAMA_TENSORS, _MODEL,
            _KEYS, {}, _COMMON | {"max_position_embeddings": 131072}, "all", _THETA, _FREQUENCIES,
        ),
        ModelFamily(
            "gemma3_text", "Gemma3ForCausalLM", _GEMMA_TENSORS,
            # The last two: text part of a multimodal model, in older and newer files.
            (
                *_MODEL, Prefixes("language_model.model.", "language_model."),
                Prefixes("model.language_model."),
            ),
            _GEMMA_KEYS,
            _SAME_OUT_BIAS | {
                "has_qk_norm": True, "has_post_norms": True, "norm_offset": 1.0,
                "embedding_scale": lambda fields: fields["width"] ** 0.5,
            },
            _COMMON | {
                "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
                "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
                "sliding_window_pattern": 6, "head_dim": 256, "vocab_size": 262208,
                "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                "num_attention_heads": 8, "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
            },
            "pattern", _THETA | {SLIDING: "rope_local_base_freq"},
            _FREQUENCIES | {
                r"(model\.)?(vision_tower|multi_modal_projector)\..*": "only text is loaded",
            },
        ),
        ModelFamily(
            "gpt2", "GPT2LMHeadModel", _GPT2_TENSORS, (Prefixes("transformer."), Prefixes("")),
            _GPT2_KEYS,
            {
                "kv_heads": lambda fields: fields["q_heads"],
                "head_dim": lambda fields: fields["width"] // fields["q_heads"],
                "has_learned_positions": True, "norm": "layer", "is_gated": False,
                "has_qkv_bias": True, "has_out_bias": True, "has_mlp_bias": True,
            },
            {
                "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True, "scale_attn_weights": True,
            },
            "none", {},
            {r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias": "causal mask, not a parameter"},
        ),
    )
}  # fmt: skip
