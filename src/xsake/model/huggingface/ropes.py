"""Convert RoPE parameters between config.json (transformers 4 and 5) and the decoder."""

from typing import Any

from xsake.model.config import LinearScaling, Llama3Scaling, Rope, YarnScaling
from xsake.model.huggingface.settings import ConfigReader
from xsake.model.rope import yarn_attention_factor

# "finetuned" of the oldest files has no effect.
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_TYPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    },
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip
# Leftover keys of `default` files.
_IGNORED_KEYS = {"default": {"factor", "original_max_position_embeddings"}}


def read_rope(settings: ConfigReader) -> Rope:
    """Read the RoPE of all layers from `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    newer = settings.section("rope_parameters")
    older = settings.section("rope_scaling")
    base = settings.number("rope_theta", above=1.0)
    if newer is None:
        return _parse_rope(older or ConfigReader({}), base, settings)
    rope = _parse_rope(newer, base, settings)
    if settings.has("rope_theta") and rope.base != base:
        raise _conflict_error(settings, "rope_theta", base, rope.base)
    if older is not None and _parse_rope(older, rope.base, settings) != rope:
        raise _conflict_error(settings, "rope_scaling", older.values, newer.values)
    return rope


def read_gemma_ropes(settings: ConfigReader) -> dict[str, Rope]:
    """Read the RoPE of full-attention layers and of sliding-window layers."""
    newer = settings.section("rope_parameters")
    older = settings.section("rope_scaling")
    bases = {
        "full_attention": ("rope_theta", settings.number("rope_theta", above=1.0)),
        "sliding_attention": (
            "rope_local_base_freq", settings.number("rope_local_base_freq", above=1.0)
        ),
    }  # fmt: skip
    if newer is None:
        full = _parse_rope(older or ConfigReader({}), bases["full_attention"][1], settings)
        return {
            "full_attention": full,
            "sliding_attention": Rope(base=bases["sliding_attention"][1]),
        }
    flat = sorted(newer.values.keys() - bases.keys())
    if flat:
        raise newer.error(
            flat[0], newer.values[flat[0]],
            "one object for full_attention and one for sliding_attention",
            fix="move the parameters into both objects",
        )  # fmt: skip
    ropes = {}
    for kind, (key, base) in bases.items():
        ropes[kind] = _parse_rope(newer.section(kind) or ConfigReader({}), base, settings)
        if settings.has(key) and ropes[kind].base != base:
            raise _conflict_error(settings, key, base, ropes[kind].base)
        scaling = ropes[kind].scaling
        if isinstance(scaling, YarnScaling) and not scaling.is_truncated:
            # transformers reads it outside of these objects, so it would have no effect.
            raise newer.error(f"{kind}.truncate", False, "true: ramps that end at dimensions")
    full = ropes["full_attention"]
    if older is not None and _parse_rope(older, full.base, settings) != full:
        raise _conflict_error(settings, "rope_scaling", older.values, newer.values)
    return ropes


def write_rope(rope: Rope) -> dict[str, Any]:
    """Return `rope_parameters` of one kind of layer, as in transformers 5."""
    base = {"rope_theta": rope.base}
    match rope.scaling:
        case None:
            return base | {"rope_type": "default"}
        case LinearScaling(factor=factor):
            return base | {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return base | {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_factor,
                "high_freq_factor": scaling.high_factor,
                "original_max_position_embeddings": scaling.original_context,
            }
        case YarnScaling() as scaling:
            parameters = base | {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_context,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "attention_factor": scaling.attention_factor,
            }
            return parameters if scaling.is_truncated else parameters | {"truncate": False}
    raise AssertionError(f"unknown scaling: {rope.scaling!r}")


def legacy_rope_scaling(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling` of transformers 4 for the result of `write_rope`."""
    if parameters["rope_type"] == "default":
        return None
    return {key: value for key, value in parameters.items() if key != "rope_theta"}


def _parse_rope(section: ConfigReader, base: float, settings: ConfigReader) -> Rope:
    """Parse the RoPE of one object; `settings` is the whole file."""
    rope_type = _rope_type(section)
    partial = section.number("partial_rotary_factor", 1.0)
    if partial != 1:
        raise section.error(
            "partial_rotary_factor", partial, "1: all dimensions of a head are rotated"
        )
    allowed = _COMMON_KEYS | _TYPE_KEYS[rope_type] | _IGNORED_KEYS.get(rope_type, set())
    for key, value in section.values.items():
        if key not in allowed and value is not None:
            raise section.error(
                key, value, f"only keys of rope_type {rope_type!r}: {', '.join(sorted(allowed))}"
            )
    base = section.number("rope_theta", base, above=1.0)
    if rope_type == "default":
        return Rope(base=base)
    if rope_type == "linear":
        return Rope(base=base, scaling=LinearScaling(factor=section.number("factor")))
    original = _original_context(section, settings)
    if rope_type == "yarn":
        return Rope(base=base, scaling=_yarn(section, original, settings))
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low >= high:
        raise section.error("low_freq_factor", low, f"less than high_freq_factor, which is {high}")
    factor = section.number("factor")
    return Rope(
        base=base,
        scaling=Llama3Scaling(
            factor=factor, low_factor=low, high_factor=high, original_context=original
        ),
    )


def _rope_type(section: ConfigReader) -> str:
    types = {
        section.choice(key, _TYPE_KEYS) for key in ("rope_type", "type") if section.has(key)
    }  # fmt: skip
    if len(types) > 1:
        raise section.error("type", section.values["type"], f"the same as rope_type: {types}")
    return types.pop() if types else "default"


def _original_context(section: ConfigReader, settings: ConfigReader) -> int:
    key = "original_max_position_embeddings"
    context = settings.size("max_position_embeddings")
    if settings.has(key):
        outer = settings.size(key)
        if section.has(key) and section.size(key) != outer:
            raise section.error(key, section.size(key), f"{outer}, as in the outer {key}")
        return outer
    return section.size(key, context)


def _yarn(section: ConfigReader, original: int, settings: ConfigReader) -> YarnScaling:
    context = settings.size("max_position_embeddings")
    factor = section.number("factor", context / original)
    attention = section.optional_number("attention_factor")
    if attention is None:
        attention = yarn_attention_factor(factor)
        above, below = section.optional_number("mscale"), section.optional_number("mscale_all_dim")
        if above is not None and below is not None:
            attention = (1 + above * (attention - 1)) / (1 + below * (attention - 1))
    return YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        attention_factor=attention,
        is_truncated=section.flag("truncate", True),
    )


def _conflict_error(settings: ConfigReader, key: str, older: Any, newer: Any):
    return settings.error(
        key, older, f"the same as in rope_parameters, {newer!r}"[:300],
        fix="keep only one of them; rope_parameters is the key of transformers 5",
    )  # fmt: skip
