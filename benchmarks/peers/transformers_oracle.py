"""What Hugging Face transformers computes: tiny checkpoints with their logits, and judgements.

Run by the Python of the `transformers` environment, never by ours; `golden` starts it.

make FOLDER                    write every checkpoint of CHECKPOINTS with its golden logits
check DIRECTORY [GOLDEN]       load a directory, compare its logits with golden ones
compare DIRECTORY GOLDEN       the same for a large model, by sequence, with perplexities
tokenize DIRECTORY TEXTS       tokens of a list of texts, by Qwen 2's own tokenizer class
perplexity DIRECTORY TEXT      of the text's first tokens, predicted from the ones before them
"""

import argparse
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

GOLDEN = "golden.safetensors"
CONFIG_OF_VERSION_4 = "config_v4.json"
# What forgetting or misreading any one thing must do to a logit, far above every tolerance.
LEAST_EFFECT = 0.01

Config = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A tiny model: what it is made of, and what must not be forgotten when it is read.

    Args:
        config: all that differs from the family's defaults.
        tokens: length of the two golden sequences.
        forgotten: changes of the config that a loader's mistakes amount to.
        older_config: writes the config as transformers 4 would have, where that differs much.
        shard_size: largest file of weights, as transformers spells sizes.
    """

    config: Config
    tokens: int = 32
    forgotten: tuple[Config, ...] = ()
    older_config: Callable[[Config], Config] | None = None
    shard_size: str = "1GB"


def plain_rope(theta: float) -> Config:
    """Rotary positions without scaling, the same for every layer."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def older_config(config: Config) -> Config:
    """The same model as transformers 4 spelled it: a base, and a scaling where there is one."""
    rope = dict(config["rope_parameters"])
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    older = config | {
        "rope_theta": theta, "rope_scaling": scaling,
        "torch_dtype": config["dtype"], "transformers_version": "4.51.0",
    }  # fmt: skip
    # Older configs distinguish layers by a count or by a pattern.
    newer = {"rope_parameters", "dtype", "layer_types"}
    return {key: older[key] for key in sorted(older.keys() - newer)}


def oldest_config(config: Config) -> Config:
    """As the first Llamas had it: a scaling with a `type`, and nothing that can be inferred."""
    older = older_config(config)
    factor, kind = older["rope_scaling"]["factor"], older["rope_scaling"]["rope_type"]
    older |= {"rope_scaling": {"type": kind, "factor": factor}, "transformers_version": "4.31.0"}
    newer = {"attention_bias", "attention_dropout", "head_dim", "mlp_bias", "num_key_value_heads"}
    return {key: value for key, value in older.items() if key not in newer}


def older_gemma3_config(config: Config) -> Config:
    """As older Gemma 3 checkpoints had it: a pattern of layers, two bases and a scaling."""
    rope = config["rope_parameters"]
    older = older_config(config | {"rope_parameters": rope["full_attention"]}) | {
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
        "sliding_window_pattern": config["layer_types"].index("full_attention") + 1,
    }
    # Tied by default, so checkpoints of the time do not say it.
    newer = {"_sliding_window_pattern", "use_bidirectional_attention", "tie_word_embeddings"}
    return {key: older[key] for key in sorted(older.keys() - newer)}


# An epsilon that is large enough to be missed when a loader keeps its own.
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
# Frequencies of 16 dimensions fall into all three ranges: kept, blended and divided.
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
# `beta_fast` differs from its default of 32 so that the ramp starts inside the head.
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 8.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

CHECKPOINTS = {
    "llama": Checkpoint(
        SMALL | {"model_type": "llama", "hidden_size": 48, "intermediate_size": 40,
         "num_attention_heads": 6, "tie_word_embeddings": True, **plain_rope(100000.0)},
        forgotten=(plain_rope(10000.0),),
    ),
    "llama_scaled": Checkpoint(
        SMALL | {"model_type": "llama", "head_dim": 16, "attention_bias": True, "mlp_bias": True,
         "rope_parameters": LLAMA3_ROPE},
        tokens=48,
        forgotten=(
            plain_rope(10000.0),
            {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 2.0}},
            {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 8.0}},
            {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 64}},
        ),
        older_config=older_config,
    ),
    "llama_yarn": Checkpoint(
        SMALL | {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1,
         "max_position_embeddings": 1024, "rope_parameters": YARN_ROPE},
        tokens=48,
        forgotten=(
            plain_rope(1000.0),
            {"rope_parameters": YARN_ROPE | {"beta_fast": 32.0}},
            {"rope_parameters": YARN_ROPE | {"attention_factor": 1.0}},
            {"rope_parameters": YARN_ROPE | {"truncate": False}},
        ),
        shard_size="30KB",
    ),
    "llama_linear": Checkpoint(
        SMALL | {"model_type": "llama", "num_key_value_heads": 4,
         "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
        forgotten=(plain_rope(10000.0),),
        older_config=oldest_config,
    ),
    "qwen2": Checkpoint(
        SMALL | {"model_type": "qwen2", "tie_word_embeddings": True, **plain_rope(1000000.0)},
        forgotten=(plain_rope(10000.0),),
    ),
    "qwen2_windowed": Checkpoint(
        SMALL | {"model_type": "qwen2", "intermediate_size": 40, "num_hidden_layers": 3,
         "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1,
         **plain_rope(1000000.0)},
        forgotten=(
            {"layer_types": ["full_attention"] * 3},
            {"layer_types": ["sliding_attention"] * 3},
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            {"sliding_window": 13},
        ),
        older_config=older_config,
    ),
    "qwen3": Checkpoint(
        SMALL | {"model_type": "qwen3", "head_dim": 16,
         **plain_rope(1000000.0)},
        forgotten=(plain_rope(10000.0),),
    ),
    "mistral": Checkpoint(
        SMALL | {"model_type": "mistral", "sliding_window": 16, **plain_rope(10000.0)},
        tokens=40,
        forgotten=({"sliding_window": None}, {"sliding_window": 17}),
    ),
    "gemma3": Checkpoint(
        SMALL | {"model_type": "gemma3_text", "intermediate_size": 40, "num_hidden_layers": 3,
         "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 24,
         "sliding_window": 8, "tie_word_embeddings": True,
         "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "rope_parameters": GEMMA3_ROPE,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        forgotten=(
            {"sliding_window": 9},
            {"query_pre_attn_scalar": 16},
            {"rope_parameters": GEMMA3_ROPE | {"full_attention": GEMMA3_ROPE["sliding_attention"]}},
            {"rope_parameters": GEMMA3_ROPE | {"sliding_attention": GEMMA3_ROPE["full_attention"]}},
            {"rope_parameters": GEMMA3_ROPE
             | {"full_attention": {"rope_type": "default", "rope_theta": 1000000.0}}},
        ),
        older_config=older_gemma3_config,
    ),
    "gpt2": Checkpoint(
        {"model_type": "gpt2", "vocab_size": 64, "n_positions": 48, "n_embd": 32, "n_layer": 2,
         "n_head": 4, "layer_norm_epsilon": 1e-3, "bos_token_id": 1, "eos_token_id": 2},
        forgotten=({"scale_attn_weights": False}, {"layer_norm_epsilon": 1e-5}),
    ),
}  # fmt: skip


def make(folder: Path) -> None:
    """Write every checkpoint, each whole or not at all; the same bytes whenever it is called."""
    for name, checkpoint in CHECKPOINTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            written = Path(scratch, name)
            summary = _write(checkpoint, written, seed=zlib.crc32(name.encode()))
            shutil.rmtree(folder / name, ignore_errors=True)
            # Not the modes: the library makes its files readable by their owner only.
            shutil.copytree(written, folder / name, copy_function=shutil.copyfile)
        size = sum(file.stat().st_size for file in (folder / name).iterdir())
        print(f"{name:15} {size / 1000:5.0f} kB  {summary}")


def _write(checkpoint: Checkpoint, folder: Path, seed: int) -> str:
    dice = torch.Generator().manual_seed(seed)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    model = _model_of(config)
    _randomise(model, dice)
    tokens = torch.randint(config.vocab_size, (2, checkpoint.tokens), generator=dice)
    logits = logits_of(model, tokens)
    effect, culprit = _least_effect(model, checkpoint, tokens, logits)
    if effect < LEAST_EFFECT:
        raise SystemExit(f"{folder.name}: {culprit} moves no logit by more than {effect:.2g}.")
    model.save_pretrained(folder, max_shard_size=checkpoint.shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # The library writes several entries of metadata in no fixed order, so there is one.
    origin = {
        "transformers": transformers.__version__, "torch": str(torch.__version__), "seed": seed,
    }  # fmt: skip
    save_file(
        {"tokens": tokens.to(torch.int32), "logits": logits},
        folder / GOLDEN, metadata={"origin": json.dumps(origin)},
    )  # fmt: skip
    if checkpoint.older_config is not None:
        _write_older_config(checkpoint.older_config, folder)
    if (difference := check(folder, folder / GOLDEN)["max_abs_difference"]) != 0:
        raise SystemExit(f"{folder.name}: read again, logits differ by {difference}.")
    return f"std {logits.std():.2f}, least effect {effect:.3f} by {culprit}"


def _write_older_config(spell: Callable[[Config], Config], folder: Path) -> None:
    """Write the older spelling, and prove that transformers reads the same model from it."""
    older = json.dumps(spell(json.loads((folder / "config.json").read_text())), indent=2)
    (folder / CONFIG_OF_VERSION_4).write_text(older + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(folder, scratch, dirs_exist_ok=True)
        shutil.copy(folder / CONFIG_OF_VERSION_4, Path(scratch, "config.json"))
        difference = check(Path(scratch), folder / GOLDEN)["max_abs_difference"]
    if difference != 0:
        raise SystemExit(f"{folder.name}: the older config gives logits off by {difference}.")


def _model_of(config: transformers.PretrainedConfig) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _randomise(model: torch.nn.Module, dice: torch.Generator) -> None:
    """Draw every parameter, so that none of them is at a value that hides its absence."""
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=dice)
        if parameter.ndim == 1:
            # Attention has to choose: scores of queries and keys must not all be near zero.
            stretch = 0.7 if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0
            drawn = 0.3 * drawn + stretch + _resting_value(model, name)
        elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
            drawn = 0.4 * drawn
        else:
            # torch's Linear is [out, in]; GPT-2's Conv1D is [in, out].
            inputs = parameter.shape[0 if model.config.model_type == "gpt2" else 1]
            gain = 1.5 if any(part in name for part in ("q_proj", "k_proj", "c_attn")) else 1.0
            drawn = gain * drawn / inputs**0.5
        parameter.data.copy_(drawn)


def _resting_value(model: torch.nn.Module, name: str) -> float:
    """What a bias or a norm's scale is when it does nothing; Gemma stores scales minus one."""
    is_scale = name.endswith("weight")
    return 1.0 if is_scale and model.config.model_type != "gemma3_text" else 0.0


@torch.inference_mode()
def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits `[B, T, V]` of tokens `[B, T]`, without a cache."""
    return model(tokens.long(), use_cache=False).logits


def _least_effect(
    model: torch.nn.Module, checkpoint: Checkpoint, tokens: torch.Tensor, logits: torch.Tensor
) -> tuple[float, str]:
    """Of everything a loader can get wrong, what moves the logits least, and by how much."""
    effects = {}
    for name, parameter in model.named_parameters():
        kept = parameter.data.clone()
        if kept.ndim == 1:
            parameter.data.fill_(_resting_value(model, name))
        else:
            parameter.data.copy_(kept.roll(1, dims=0))
        effects[name] = logits_of(model, tokens)
        parameter.data.copy_(kept)
    own_epsilon = ({"rms_norm_eps": 1e-5},) if "rms_norm_eps" in checkpoint.config else ()
    for change in checkpoint.forgotten + own_epsilon:
        config = transformers.AutoConfig.for_model(**checkpoint.config | change)
        careless = _model_of(config)
        careless.load_state_dict(model.state_dict())
        effects[f"config {change}"] = logits_of(careless, tokens)
    moved = {name: (wrong - logits).abs().max().item() for name, wrong in effects.items()}
    culprit = min(moved, key=moved.__getitem__)
    return moved[culprit], culprit


def check(folder: Path, golden: Path) -> Config:
    """How far the directory's logits are from golden ones, and what did not fit."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True,
        output_loading_info=True,
    )  # fmt: skip
    expected = load_file(golden)
    logits = logits_of(model.eval(), expected["tokens"])
    difference = (logits - expected["logits"]).abs().max().item()
    with safe_open(golden, framework="pt") as file:
        origin = json.loads(file.metadata()["origin"])
    problems = {kind: sorted(map(str, found)) for kind, found in report.items() if found}
    return {"max_abs_difference": difference, "problems": problems, "golden": origin}


def compare(folder: Path, file: Path) -> Config:
    """Return by sequence how far logits are from golden ones in a file, and both perplexities.

    Weights stay in the dtype of their files; each layer is float32 while it computes.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", local_files_only=True
    ).eval()
    _compute_in_float32(model)
    sequences = []
    with safe_open(file, framework="pt") as stored:
        for row, tokens in enumerate(stored.get_tensor("tokens")):
            golden = stored.get_slice("logits")[row]
            logits = logits_of(model, tokens[None])[0]
            sequences.append({
                "max_abs_difference": (logits - golden).abs().max().item(),
                "max_abs_logit": logits.abs().max().item(),
                "top1_agreement": (logits.argmax(-1) == golden.argmax(-1)).double().mean().item(),
                "perplexity": perplexity_of(golden, tokens),
                "transformers_perplexity": perplexity_of(logits, tokens),
            })  # fmt: skip
    versions = {"transformers": transformers.__version__, "torch": str(torch.__version__)}
    return {"sequences": sequences, "versions": versions}


def _compute_in_float32(model: torch.nn.Module) -> None:
    stored = model.dtype

    def widen(module: torch.nn.Module, inputs: tuple) -> None:
        module.float()

    def restore(module: torch.nn.Module, inputs: tuple, out: Any) -> None:
        module.to(stored)

    model.model.embed_tokens.register_forward_hook(lambda module, inputs, out: out.float())
    for part in (*model.model.layers, model.model.norm, model.lm_head):
        part.register_forward_pre_hook(widen)
        part.register_forward_hook(restore)


def tokenize(folder: Path, texts: Path) -> Config:
    """Return the tokens of a JSON list of texts by transformers' rules for Qwen 2.

    Only the vocabulary, merges and added tokens are the directory's; how text is normalised and
    split is the library's.
    """
    document = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=[tuple(merge) for merge in merges]
    )
    special = [token["content"] for token in document["added_tokens"]]
    tokenizer.add_tokens([transformers.AddedToken(token, normalized=False) for token in special])
    read = json.loads(texts.read_text())
    return {"tokens": [tokenizer.encode(text, add_special_tokens=False) for text in read]}


def perplexity_of(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Of all tokens but the first, `[T]`, by their logits `[T, V]`."""
    losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:].long(), reduction="none")
    return losses.double().mean().exp().item()


def perplexity(folder: Path, text: Path, length: int) -> Config:
    """Of tokens 1 .. length - 1 of the text, each predicted from all before it, in float32."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = torch.tensor([tokenizer.encode(text.read_text()).ids[:length]])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    value = perplexity_of(logits_of(model, tokens)[0], tokens[0])
    return {"perplexity": value, "tokens": tokens.shape[1]}


def main() -> None:
    """Parse the command line and do the one thing it asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    maker = verbs.add_parser("make")
    maker.add_argument("folder", type=Path)
    checker = verbs.add_parser("check")
    checker.add_argument("folder", type=Path)
    checker.add_argument("golden", type=Path, nargs="?")
    for verb, second in (("compare", "golden"), ("tokenize", "texts")):
        comparer = verbs.add_parser(verb)
        comparer.add_argument("folder", type=Path)
        comparer.add_argument(second, type=Path)
    measurer = verbs.add_parser("perplexity")
    measurer.add_argument("folder", type=Path)
    measurer.add_argument("text", type=Path)
    measurer.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    if arguments.verb == "make":
        # One thread: sums of the same numbers in the same order.
        torch.set_num_threads(1)
        make(arguments.folder)
    elif arguments.verb == "check":
        golden = arguments.golden or arguments.folder / GOLDEN
        print(json.dumps(check(arguments.folder, golden)))
    elif arguments.verb == "compare":
        print(json.dumps(compare(arguments.folder, arguments.golden)))
    elif arguments.verb == "tokenize":
        print(json.dumps(tokenize(arguments.folder, arguments.texts)))
    else:
        print(json.dumps(perplexity(arguments.folder, arguments.text, arguments.tokens)))


if __name__ == "__main__":
    main()
