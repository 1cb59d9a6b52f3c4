"""Convert a GGUF file of a Llama or a Qwen 2 into a Hugging Face directory.

python -m benchmarks.peers.gguf_to_huggingface FILE FOLDER  # by the `gguf` environment's Python

A fixture for measurements, started by `models`: the product itself reads safetensors only. Sizes
come from the file's own metadata; weights are dequantised.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SHARD_BYTES = 115_000_000
# GGUF's types of tokens that text is not split into by merges.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
# Rule of Qwen 2's tokenizer, as transformers has it.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

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


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What distinguishes families of models with the same layers.

    Args:
        name: of the class in transformers.
        has_pairwise_rope: whether the file orders rows of W_q and W_k for pairwise rotation.
        settings: keys of the config that the other family does not have.
        biases: parts of a layer with a bias.
    """

    name: str
    has_pairwise_rope: bool
    settings: Mapping[str, Any]
    biases: tuple[str, ...] = ()


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", True, {"attention_bias": False, "mlp_bias": False}),
    "qwen2": Architecture(
        "Qwen2ForCausalLM", False, {"use_sliding_window": False}, ("attn_q", "attn_k", "attn_v")
    ),
}


def huggingface_name(name: str) -> str:
    """What Hugging Face calls a GGUF tensor."""
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in INSIDE_LAYERS:
        raise SystemExit(f"A tensor that no Llama has: {name!r}.")
    return f"model.layers.{match[1]}.{INSIDE_LAYERS[match[2]]}.{match[3]}"


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


def config_of(metadata: Mapping[str, Any], *, is_tied: bool, dtype: str) -> dict[str, Any]:
    """Hugging Face's config of the model with this metadata."""
    family = metadata["general.architecture"]
    if family not in ARCHITECTURES:
        raise SystemExit(f"Neither a Llama nor a Qwen 2: {family}.")
    sizes = {
        key.removeprefix(f"{family}."): value
        for key, value in metadata.items()
        if key.startswith(f"{family}.")
    }
    heads, width = sizes["attention.head_count"], sizes["embedding_length"]
    scaling = [key for key in sizes if key.startswith("rope.scaling")]
    if scaling or sizes.get("rope.dimension_count", width // heads) * heads != width:
        raise SystemExit(f"Only plain rotation of whole heads is converted, not {scaling}.")
    architecture = ARCHITECTURES[family]
    config = {
        "architectures": [architecture.name],
        "attention_dropout": 0.0,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": sizes["feed_forward_length"],
        "max_position_embeddings": sizes["context_length"],
        "model_type": family,
        "num_attention_heads": heads,
        "num_hidden_layers": sizes["block_count"],
        "num_key_value_heads": sizes["attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": _as_written(sizes["attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _as_written(sizes["rope.freq_base"]),
        "tie_word_embeddings": is_tied,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }
    return dict(sorted((config | architecture.settings).items()))


def _as_written(number: float) -> float:
    """The decimal that was meant by a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def write_weights(tensors: Sequence[Any], config: Mapping[str, Any], folder: Path) -> None:
    """Dequantise shard by shard, so that one shard at a time is in memory; then the index."""
    # Both live in this script's environment only; the functions above are tested in ours.
    import gguf
    from safetensors.numpy import save_file

    architecture = ARCHITECTURES[config["model_type"]]
    heads = {
        "self_attn.q_proj.weight": config["num_attention_heads"],
        "self_attn.k_proj.weight": config["num_key_value_heads"],
    } if architecture.has_pairwise_rope else {}  # fmt: skip
    by_name = {huggingface_name(tensor.name): tensor for tensor in tensors}
    check_names(by_name, config)
    dtype = np.dtype(config["torch_dtype"])
    sizes = {name: dtype.itemsize * int(tensor.n_elements) for name, tensor in by_name.items()}
    shards = plan_shards(sizes, SHARD_BYTES)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        arrays = {}
        for name in names:
            tensor = by_name[name]
            array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(dtype)
            if not np.isfinite(array).all():
                raise SystemExit(f"{name} has values that {dtype} does not.")
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


def check_names(names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Refuse tensors that are missing, or that the model does not have."""
    biases = ARCHITECTURES[config["model_type"]].biases
    inside = {
        f"model.layers.{layer}.{part}.{kind}"
        for layer in range(config["num_hidden_layers"])
        for short, part in INSIDE_LAYERS.items()
        for kind in (("weight", "bias") if short in biases else ("weight",))
    }
    outside = set(OUTSIDE_LAYERS.values())
    if config["tie_word_embeddings"]:
        outside.remove("lm_head.weight")
    if wrong := (inside | outside) ^ set(names):
        raise SystemExit(f"Missing, or not a part of this model: {sorted(wrong)}.")


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """The byte-level BPE of the metadata, with its special tokens and its chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as split

    smollm = [split.Digits(individual_digits=True), split.ByteLevel(False, use_regex=True)]
    qwen2 = [split.Split(Regex(QWEN2_WORDS), "isolated"), split.ByteLevel(False, use_regex=False)]
    rules = {("gpt2", "smollm"): (smollm, None), ("gpt2", "qwen2"): (qwen2, normalizers.NFC())}
    kind = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind not in rules:
        raise SystemExit(f"How this tokenizer splits text is not known here: {kind}.")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    by_type: dict[int, dict[str, int]] = {}
    for number, (token, kind_of_token) in enumerate(zip(tokens, types, strict=True)):
        by_type.setdefault(kind_of_token, {})[token] = number
    by_type.pop(UNUSED, None)
    vocabulary = {token: number for part in by_type.values() for token, number in part.items()}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    steps, normalizer = rules[kind]
    tokenizer.pre_tokenizer = split.Sequence(steps)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    for add, kind_of_token in (
        (tokenizer.add_special_tokens, CONTROL), (tokenizer.add_tokens, USER_DEFINED),
    ):  # fmt: skip
        add([AddedToken(token, normalized=False) for token in by_type.get(kind_of_token, ())])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
    settings = {
        f"{role}_token": tokens[number] for role, number in ids.items() if number is not None
    }
    settings |= {
        "add_prefix_space": False,
        "chat_template": metadata["tokenizer.chat_template"],
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", settings)
    # Padding ends a text, too: it is the end of a document.
    generation = {f"{role}_token_id": ids[role] for role in ("bos", "pad")}
    generation["eos_token_id"] = sorted({ids["eos"], ids["pad"]})
    _write_json(folder / "generation_config.json", generation)


def convert(file: Path, folder: Path, dtype: str, origin: Mapping[str, Any]) -> None:
    """Write the whole directory.

    Args:
        file: GGUF.
        folder: made.
        dtype: of the weights.
        origin: of the file, for provenance.json.
    """
    import gguf

    reader = gguf.GGUFReader(file)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = config_of(metadata, is_tied=is_tied, dtype=dtype)
    folder.mkdir(parents=True)
    write_weights(reader.tensors, config, folder)
    write_tokenizer(metadata, folder)
    _write_json(folder / "config.json", config)
    rows = "; rows of W_q and W_k reordered for half-split RoPE"
    is_reordered = ARCHITECTURES[config["model_type"]].has_pairwise_rope
    libraries = ("gguf", "numpy", "safetensors", "tokenizers")
    provenance = {
        **origin,
        "changes": f"dequantised to {dtype}{rows if is_reordered else ''}",
        "versions": {name: importlib.metadata.version(name) for name in libraries}
        | {"python": platform.python_version()},
    }
    _write_json(folder / "provenance.json", provenance)
    say("tokenizer, config and provenance written")


def say(words: str) -> None:
    """Progress, kept out of the answer on standard output."""
    print(words, file=sys.stderr, flush=True)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Convert the file into the folder that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--origin", type=json.loads, default={}, help="JSON, for provenance.json")
    given = parser.parse_args()
    convert(given.file, given.folder, given.dtype, given.origin)


if __name__ == "__main__":
    main()
