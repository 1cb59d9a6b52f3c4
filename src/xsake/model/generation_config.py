"""Options of generation from generation_config.json of Hugging Face transformers."""

import math
from pathlib import Path
from typing import Any

from xsake.errors import CheckpointError
from xsake.model.huggingface.files import CheckpointFolder

GENERATION_CONFIG = "generation_config.json"
MAX_BYTES = 2**20

# Values that change nothing, by key; null never does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (), "begin_suppress_tokens": ([],), "bad_words_ids": ([],),
    "constraints": (), "diversity_penalty": (0,), "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "exponential_decay_length_penalty": (),
    "force_words_ids": ([],), "forced_bos_token_id": (), "forced_decoder_ids": (),
    "forced_eos_token_id": (), "guidance_scale": (1,), "is_assistant": (False,),
    "length_penalty": (1,), "low_memory": (False,), "max_time": (), "min_length": (0,),
    "min_new_tokens": (0,), "no_repeat_ngram_size": (0,), "num_beam_groups": (1,),
    "num_beams": (1,), "num_return_sequences": (1,), "output_attentions": (False,),
    "output_hidden_states": (False,), "output_logits": (False,), "output_scores": (False,),
    "penalty_alpha": (0,), "prompt_lookup_num_tokens": (), "remove_invalid_values": (False,),
    "renormalize_logits": (False,), "return_dict_in_generate": (False,), "sequence_bias": (),
    "speculation_type": (), "suppress_tokens": ([],), "token_healing": (False,), "top_h": (),
    "typical_p": (1,), "use_mtp": (False,), "watermarking_config": (),
}  # fmt: skip
# How tokens are computed, not which; and ids that `generate` does not need.
_IGNORED = frozenset((
    "_from_model_config", "assistant_confidence_threshold", "assistant_lookbehind", "bos_token_id",
    "cache_config", "cache_implementation", "compile_config", "decoder_start_token_id",
    "disable_compile", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "pad_token_id", "return_legacy_cache", "target_lookbehind",
    "transformers_version", "use_cache",
))  # fmt: skip
_READ = frozenset((
    "do_sample", "eos_token_id", "max_length", "max_new_tokens", "min_p", "repetition_penalty",
    "stop_strings", "temperature", "top_k", "top_p",
))  # fmt: skip


def read_generation_config(directory: str | Path, *, needs_length: bool = True) -> dict[str, Any]:
    """Return arguments of `GenerationOptions` that generate as transformers does by the file.

    Args:
        directory: has generation_config.json.
        needs_length: whether a `max_length` without `max_new_tokens` is an error.
    """
    folder = CheckpointFolder.open(directory)
    config = folder.json(GENERATION_CONFIG, max_bytes=MAX_BYTES)
    config = {key: value for key, value in config.items() if value is not None}
    for key, value in config.items():
        if key not in _READ | _IGNORED and not _is_neutral(key, value):
            raise CheckpointError(
                "generation-key", f"{GENERATION_CONFIG} has a key that is not supported",
                got=f"{key}: {value!r}"[:200],
                expected=" or ".join([*map(repr, _NEUTRAL.get(key, ())), "null"]),
                fix="give the options yourself, or remove the key from the file",
            )  # fmt: skip
    if needs_length and "max_length" in config and "max_new_tokens" not in config:
        raise CheckpointError(
            "generation-length", "max_length, which includes the prompt, is not supported",
            got=f"max_length: {config['max_length']!r}"[:200], expected="max_new_tokens",
            fix="give max_new_tokens yourself",
        )  # fmt: skip
    options: dict[str, Any] = {
        "end_ids": _end_ids(config),
        "max_new_tokens": _count(config, "max_new_tokens", 1),
    }
    options["stop"] = _stop_strings(config)
    penalty = _number(config, "repetition_penalty", math.inf)
    options["repetition_penalty"] = None if penalty == 1 else penalty
    options |= _sampling(config) if _flag(config, "do_sample") else {"temperature": 0}
    return {key: value for key, value in options.items() if value is not None}


def _sampling(config: dict[str, Any]) -> dict[str, Any]:
    top_k, top_p = _count(config, "top_k", 0), _number(config, "top_p", 1)
    return {
        "temperature": _number(config, "temperature", math.inf) or 1.0,
        "top_k": 50 if top_k is None else top_k or None,  # the default of transformers
        "top_p": None if top_p == 1 else top_p,
        "min_p": None if config.get("min_p") == 0 else _number(config, "min_p", 1),
    }


def _is_neutral(key: str, value: Any) -> bool:
    # `False == 0` is not meant.
    return any(
        value == neutral and (type(value) is bool) == (type(neutral) is bool)
        for neutral in _NEUTRAL.get(key, ())
    )


def _end_ids(config: dict[str, Any]) -> tuple[int, ...] | None:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and 0 <= each < 2**31 for each in ids):
        raise _invalid_value("eos_token_id", value, "a token id, or a list of them")
    return tuple(sorted(set(ids))) or None


def _stop_strings(config: dict[str, Any]) -> tuple[str, ...] | None:
    value = config.get("stop_strings")
    texts = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _invalid_value("stop_strings", value, "a text, or a list of them, none empty")
    return tuple(texts) or None


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if type(value) is not bool:
        raise _invalid_value(key, value, "true or false")
    return value


def _count(config: dict[str, Any], key: str, least: int) -> int | None:
    value = config.get(key)
    if value is not None and (type(value) is not int or not least <= value < 2**31):
        raise _invalid_value(key, value, f"an integer of at least {least}")
    return value


def _number(config: dict[str, Any], key: str, most: float) -> float | None:
    value = config.get(key)
    if value is not None and (type(value) not in (int, float) or not 0 < value <= most):
        expected = "a number above 0" + ("" if most == math.inf else f" and at most {most}")
        raise _invalid_value(key, value, expected)
    return value


def _invalid_value(key: str, value: Any, expected: str) -> CheckpointError:
    return CheckpointError(
        "generation-value", f"{GENERATION_CONFIG} has an invalid value",
        got=f"{key}: {value!r}"[:200], expected=expected,
        fix=f"correct {key}, or give the options yourself",
    )  # fmt: skip
