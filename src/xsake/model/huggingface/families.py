"""Model families: tensor names and defaults of config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from xsake.model.huggingface.storage import TensorSpec


class Prefixes(NamedTuple):
    """Prefixes of tensor names of the body and the head."""

    body: str
    head: str = ""


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """Hugging Face model type.

    Args:
        name: `model_type`.
        architecture: class of transformers.
        rows: tensors of parameters; those of absent parameters are ignored.
        prefixes: of tensor names; the first one is written.
        defaults: of transformers for absent config keys.
        window: layers with a sliding window: "none", "all", "some" or "pattern".
        harmless: patterns of tensors without effect, with the reason.
    """

    name: str
    architecture: str
    rows: tuple[TensorSpec, ...]
    prefixes: tuple[Prefixes, ...]
    defaults: Mapping[str, Any]
    window: str
    harmless: Mapping[str, str]


_ENDS = (
    TensorSpec("{body}embed_tokens.weight", "embedding", "vocab, embed"),
    TensorSpec("{body}norm.weight", "final_norm.weight", "embed"),
    TensorSpec("{head}lm_head.weight", "head", "vocab, embed"),
)
_BLOCK = "{body}layers.{layer}."
_ATTENTION = (
    TensorSpec(
        _BLOCK + "self_attn.q_proj.weight", "layers.attention.query", "q_heads*head_dim, embed"
    ),
    TensorSpec(
        _BLOCK + "self_attn.k_proj.weight", "layers.attention.key", "kv_heads*head_dim, embed"
    ),
    TensorSpec(
        _BLOCK + "self_attn.v_proj.weight", "layers.attention.value", "kv_heads*head_dim, embed"
    ),
    TensorSpec(
        _BLOCK + "self_attn.o_proj.weight", "layers.attention.out", "embed, q_heads*head_dim"
    ),
    TensorSpec(_BLOCK + "self_attn.q_proj.bias", "layers.attention.query_bias", "q_heads*head_dim"),
    TensorSpec(_BLOCK + "self_attn.k_proj.bias", "layers.attention.key_bias", "kv_heads*head_dim"),
    TensorSpec(
        _BLOCK + "self_attn.v_proj.bias", "layers.attention.value_bias", "kv_heads*head_dim"
    ),
    TensorSpec(_BLOCK + "self_attn.o_proj.bias", "layers.attention.out_bias", "embed"),
    TensorSpec(
        _BLOCK + "self_attn.q_norm.weight", "layers.attention.query_norm.weight", "head_dim"
    ),
    TensorSpec(_BLOCK + "self_attn.k_norm.weight", "layers.attention.key_norm.weight", "head_dim"),
)
_MLP = (
    TensorSpec(_BLOCK + "mlp.gate_proj.weight", "layers.mlp.gate", "mlp, embed"),
    TensorSpec(_BLOCK + "mlp.up_proj.weight", "layers.mlp.up", "mlp, embed"),
    TensorSpec(_BLOCK + "mlp.down_proj.weight", "layers.mlp.down", "embed, mlp"),
    TensorSpec(_BLOCK + "mlp.gate_proj.bias", "layers.mlp.gate_bias", "mlp"),
    TensorSpec(_BLOCK + "mlp.up_proj.bias", "layers.mlp.up_bias", "mlp"),
    TensorSpec(_BLOCK + "mlp.down_proj.bias", "layers.mlp.down_bias", "embed"),
)
_TWO_NORMS = (
    TensorSpec(_BLOCK + "input_layernorm.weight", "layers.attention_norm.weight", "embed"),
    TensorSpec(_BLOCK + "post_attention_layernorm.weight", "layers.mlp_norm.weight", "embed"),
)
_FOUR_NORMS = (
    TensorSpec(_BLOCK + "input_layernorm.weight", "layers.attention_norm.weight", "embed"),
    TensorSpec(
        _BLOCK + "post_attention_layernorm.weight", "layers.attention_post_norm.weight", "embed"
    ),
    TensorSpec(_BLOCK + "pre_feedforward_layernorm.weight", "layers.mlp_norm.weight", "embed"),
    TensorSpec(
        _BLOCK + "post_feedforward_layernorm.weight", "layers.mlp_post_norm.weight", "embed"
    ),
)
_LLAMA_ROWS = (*_ENDS, *_ATTENTION, *_MLP, *_TWO_NORMS)

_H = "{body}h.{layer}."
_FUSED, _FUSED_BIAS = _H + "attn.c_attn.weight", _H + "attn.c_attn.bias"
_GPT2_ROWS = (
    TensorSpec("{body}wte.weight", "embedding", "vocab, embed"),
    TensorSpec("{body}wpe.weight", "positions", "position, embed"),
    TensorSpec("{body}ln_f.weight", "final_norm.weight", "embed"),
    TensorSpec("{body}ln_f.bias", "final_norm.bias", "embed"),
    TensorSpec("{head}lm_head.weight", "head", "vocab, embed"),
    TensorSpec(_H + "ln_1.weight", "layers.attention_norm.weight", "embed"),
    TensorSpec(_H + "ln_1.bias", "layers.attention_norm.bias", "embed"),
    TensorSpec(_FUSED, "layers.attention.query", "embed, q_heads*head_dim", (0, 3)),
    TensorSpec(_FUSED, "layers.attention.key", "embed, kv_heads*head_dim", (1, 3)),
    TensorSpec(_FUSED, "layers.attention.value", "embed, kv_heads*head_dim", (2, 3)),
    TensorSpec(_FUSED_BIAS, "layers.attention.query_bias", "q_heads*head_dim", (0, 3)),
    TensorSpec(_FUSED_BIAS, "layers.attention.key_bias", "kv_heads*head_dim", (1, 3)),
    TensorSpec(_FUSED_BIAS, "layers.attention.value_bias", "kv_heads*head_dim", (2, 3)),
    TensorSpec(_H + "attn.c_proj.weight", "layers.attention.out", "q_heads*head_dim, embed"),
    TensorSpec(_H + "attn.c_proj.bias", "layers.attention.out_bias", "embed"),
    TensorSpec(_H + "ln_2.weight", "layers.mlp_norm.weight", "embed"),
    TensorSpec(_H + "ln_2.bias", "layers.mlp_norm.bias", "embed"),
    TensorSpec(_H + "mlp.c_fc.weight", "layers.mlp.up", "embed, mlp"),
    TensorSpec(_H + "mlp.c_fc.bias", "layers.mlp.up_bias", "mlp"),
    TensorSpec(_H + "mlp.c_proj.weight", "layers.mlp.down", "mlp, embed"),
    TensorSpec(_H + "mlp.c_proj.bias", "layers.mlp.down_bias", "embed"),
)

_FREQUENCIES = {r".*\.rotary_emb\.inv_freq": "frequencies are computed from config.json"}
_MODEL = (Prefixes("model."),)
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
            "llama", "LlamaForCausalLM", _LLAMA_ROWS, _MODEL,
            _COMMON | {"max_position_embeddings": 2048}, "none", _FREQUENCIES,
        ),
        ModelFamily("qwen2", "Qwen2ForCausalLM", _LLAMA_ROWS, _MODEL, _QWEN, "some", _FREQUENCIES),
        ModelFamily(
            "qwen3", "Qwen3ForCausalLM", _LLAMA_ROWS, _MODEL,
            _QWEN | {"head_dim": 128}, "some", _FREQUENCIES,
        ),
        ModelFamily(
            "mistral", "MistralForCausalLM", _LLAMA_ROWS, _MODEL,
            _COMMON | {"max_position_embeddings": 131072}, "all", _FREQUENCIES,
        ),
        ModelFamily(
            "gemma3_text", "Gemma3ForCausalLM", (*_ENDS, *_ATTENTION, *_MLP, *_FOUR_NORMS),
            # The last two: text part of a multimodal model, in older and newer files.
            (
                *_MODEL, Prefixes("language_model.model.", "language_model."),
                Prefixes("model.language_model."),
            ),
            _COMMON | {
                "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
                "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
                "sliding_window_pattern": 6, "head_dim": 256, "vocab_size": 262208,
                "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                "num_attention_heads": 8, "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
            },
            "pattern",
            _FREQUENCIES | {
                r"(model\.)?(vision_tower|multi_modal_projector)\..*": "only text is loaded",
            },
        ),
        ModelFamily(
            "gpt2", "GPT2LMHeadModel", _GPT2_ROWS,
            (Prefixes("transformer."), Prefixes("")),
            {
                "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True, "scale_attn_weights": True,
            },
            "none",
            {r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias": "causal mask, not a parameter"},
        ),
    )
}  # fmt: skip
