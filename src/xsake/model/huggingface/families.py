"""The families of models: what each calls its tensors, and what its config.json leaves unsaid."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from xsake.model.huggingface.storage import Row


class Prefixes(NamedTuple):
    """What a file puts before the names of the body's tensors and of the head's."""

    body: str
    head: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type of Hugging Face.

    Args:
        name: its `model_type`.
        architecture: the class that transformers loads it with.
        rows: where parameters are kept; rows of parameters that a model lacks do not count.
        prefixes: ways to begin names, the one that is written first.
        defaults: values of config keys that a file may leave out, as transformers has them.
        window: how a file says which layers see a window: "none", "all", "some" or "pattern".
        harmless: patterns of tensors that nothing is computed with, and why.
    """

    name: str
    architecture: str
    rows: tuple[Row, ...]
    prefixes: tuple[Prefixes, ...]
    defaults: Mapping[str, Any]
    window: str
    harmless: Mapping[str, str]


_ENDS = (
    Row("{body}embed_tokens.weight", "embedding", "vocab, embed"),
    Row("{body}norm.weight", "final_norm.weight", "embed"),
    Row("{head}lm_head.weight", "head", "vocab, embed"),
)
_BLOCK = "{body}layers.{layer}."
_ATTENTION = (
    Row(_BLOCK + "self_attn.q_proj.weight", "layers.attention.query", "q_heads*head_dim, embed"),
    Row(_BLOCK + "self_attn.k_proj.weight", "layers.attention.key", "kv_heads*head_dim, embed"),
    Row(_BLOCK + "self_attn.v_proj.weight", "layers.attention.value", "kv_heads*head_dim, embed"),
    Row(_BLOCK + "self_attn.o_proj.weight", "layers.attention.out", "embed, q_heads*head_dim"),
    Row(_BLOCK + "self_attn.q_proj.bias", "layers.attention.query_bias", "q_heads*head_dim"),
    Row(_BLOCK + "self_attn.k_proj.bias", "layers.attention.key_bias", "kv_heads*head_dim"),
    Row(_BLOCK + "self_attn.v_proj.bias", "layers.attention.value_bias", "kv_heads*head_dim"),
    Row(_BLOCK + "self_attn.o_proj.bias", "layers.attention.out_bias", "embed"),
    Row(_BLOCK + "self_attn.q_norm.weight", "layers.attention.query_norm.weight", "head_dim"),
    Row(_BLOCK + "self_attn.k_norm.weight", "layers.attention.key_norm.weight", "head_dim"),
)
_MLP = (
    Row(_BLOCK + "mlp.gate_proj.weight", "layers.mlp.gate", "mlp, embed"),
    Row(_BLOCK + "mlp.up_proj.weight", "layers.mlp.up", "mlp, embed"),
    Row(_BLOCK + "mlp.down_proj.weight", "layers.mlp.down", "embed, mlp"),
    Row(_BLOCK + "mlp.gate_proj.bias", "layers.mlp.gate_bias", "mlp"),
    Row(_BLOCK + "mlp.up_proj.bias", "layers.mlp.up_bias", "mlp"),
    Row(_BLOCK + "mlp.down_proj.bias", "layers.mlp.down_bias", "embed"),
)
_TWO_NORMS = (
    Row(_BLOCK + "input_layernorm.weight", "layers.attention_norm.weight", "embed"),
    Row(_BLOCK + "post_attention_layernorm.weight", "layers.mlp_norm.weight", "embed"),
)
_FOUR_NORMS = (
    Row(_BLOCK + "input_layernorm.weight", "layers.attention_norm.weight", "embed"),
    Row(_BLOCK + "post_attention_layernorm.weight", "layers.attention_post_norm.weight", "embed"),
    Row(_BLOCK + "pre_feedforward_layernorm.weight", "layers.mlp_norm.weight", "embed"),
    Row(_BLOCK + "post_feedforward_layernorm.weight", "layers.mlp_post_norm.weight", "embed"),
)
_LLAMA_ROWS = (*_ENDS, *_ATTENTION, *_MLP, *_TWO_NORMS)

_H = "{body}h.{layer}."
_FUSED, _FUSED_BIAS = _H + "attn.c_attn.weight", _H + "attn.c_attn.bias"
_GPT2_ROWS = (
    Row("{body}wte.weight", "embedding", "vocab, embed"),
    Row("{body}wpe.weight", "positions", "position, embed"),
    Row("{body}ln_f.weight", "final_norm.weight", "embed"),
    Row("{body}ln_f.bias", "final_norm.bias", "embed"),
    Row("{head}lm_head.weight", "head", "vocab, embed"),
    Row(_H + "ln_1.weight", "layers.attention_norm.weight", "embed"),
    Row(_H + "ln_1.bias", "layers.attention_norm.bias", "embed"),
    Row(_FUSED, "layers.attention.query", "embed, q_heads*head_dim", (0, 3)),
    Row(_FUSED, "layers.attention.key", "embed, kv_heads*head_dim", (1, 3)),
    Row(_FUSED, "layers.attention.value", "embed, kv_heads*head_dim", (2, 3)),
    Row(_FUSED_BIAS, "layers.attention.query_bias", "q_heads*head_dim", (0, 3)),
    Row(_FUSED_BIAS, "layers.attention.key_bias", "kv_heads*head_dim", (1, 3)),
    Row(_FUSED_BIAS, "layers.attention.value_bias", "kv_heads*head_dim", (2, 3)),
    Row(_H + "attn.c_proj.weight", "layers.attention.out", "q_heads*head_dim, embed"),
    Row(_H + "attn.c_proj.bias", "layers.attention.out_bias", "embed"),
    Row(_H + "ln_2.weight", "layers.mlp_norm.weight", "embed"),
    Row(_H + "ln_2.bias", "layers.mlp_norm.bias", "embed"),
    Row(_H + "mlp.c_fc.weight", "layers.mlp.up", "embed, mlp"),
    Row(_H + "mlp.c_fc.bias", "layers.mlp.up_bias", "mlp"),
    Row(_H + "mlp.c_proj.weight", "layers.mlp.down", "mlp, embed"),
    Row(_H + "mlp.c_proj.bias", "layers.mlp.down_bias", "embed"),
)

_FREQUENCIES = {r".*\.rotary_emb\.inv_freq": "frequencies follow from config.json"}
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
        Family(
            "llama", "LlamaForCausalLM", _LLAMA_ROWS, _MODEL,
            _COMMON | {"max_position_embeddings": 2048}, "none", _FREQUENCIES,
        ),
        Family("qwen2", "Qwen2ForCausalLM", _LLAMA_ROWS, _MODEL, _QWEN, "some", _FREQUENCIES),
        Family(
            "qwen3", "Qwen3ForCausalLM", _LLAMA_ROWS, _MODEL,
            _QWEN | {"head_dim": 128}, "some", _FREQUENCIES,
        ),
        Family(
            "mistral", "MistralForCausalLM", _LLAMA_ROWS, _MODEL,
            _COMMON | {"max_position_embeddings": 131072}, "all", _FREQUENCIES,
        ),
        Family(
            "gemma3_text", "Gemma3ForCausalLM", (*_ENDS, *_ATTENTION, *_MLP, *_FOUR_NORMS),
            # The last two: the text part of a model that also sees, in its older and newer file.
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
                r"(model\.)?(vision_tower|multi_modal_projector)\..*": "only text is read",
            },
        ),
        Family(
            "gpt2", "GPT2LMHeadModel", _GPT2_ROWS,
            (Prefixes("transformer."), Prefixes("")),
            {
                "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True, "scale_attn_weights": True,
            },
            "none",
            {r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias": "causality is no parameter here"},
        ),
    )
}  # fmt: skip
