"""What Hugging Face transformers computes for MSA: tiny random MiniMax-M3 models, with gradients.

Run by the Python of the `transformers` environment, never by ours; `golden msa` starts it:
`msa_oracle.py FOLDER` writes a file for every configuration.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

# Query heads, kv heads, tokens, block, blocks, local ones.
CASES = {
    "group_2": (4, 2, 70, 8, 3, 1),
    "group_4": (4, 1, 33, 4, 2, 2),
    "group_1": (3, 3, 50, 16, 2, 1),
}
LAYERS, WIDTH, HEAD_DIM, VOCABULARY = 2, 16, 8, 32


def make(name: str) -> dict[str, torch.Tensor]:
    """Weights, tokens, logits, and gradients of the attention of one configuration."""
    q_heads, kv_heads, tokens, size, count, local = CASES[name]
    torch.manual_seed(len(name) + tokens)
    config = MiniMaxM3VLTextConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=q_heads, num_key_value_heads=kv_heads, head_dim=HEAD_DIM,
        dense_intermediate_size=24, mlp_layer_types=["dense"] * LAYERS,
        layer_types=["minimax_m3_sparse"] * LAYERS, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rotary_dim=HEAD_DIM,
        index_n_heads=kv_heads, index_head_dim=HEAD_DIM, index_block_size=size,
        index_topk_blocks=count, index_local_blocks=local, bos_token_id=0, eos_token_id=1,
        attn_implementation="eager",
    )  # fmt: skip
    model = MiniMaxM3VLForCausalLM(config).float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = parameter.ndim == 1
            parameter.normal_(0, 0.3 if is_norm else 1.5 / parameter.shape[-1] ** 0.5)
    ids = torch.randint(0, VOCABULARY, (2, tokens))
    logits = model(ids, use_cache=False).logits
    weight = torch.randn_like(logits)
    (logits * weight).sum().backward()
    arrays = {"tokens": ids.to(torch.int32), "logits": logits, "weight": weight}
    arrays |= {f"w.{key}": value for key, value in model.state_dict().items()}
    for key, parameter in model.named_parameters():
        if ".self_attn." in key and parameter.grad is not None:
            arrays[f"g.{key}"] = parameter.grad
    return {key: value.detach().contiguous() for key, value in arrays.items()}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        save_file(make(name), folder / f"{name}.safetensors")


if __name__ == "__main__":
    main()
