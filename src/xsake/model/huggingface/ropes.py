"""Rotary positions between config.json, in its older and newer spelling, and the decoder's."""

from typing import Any

from xsake.model.config import LinearScaling, Llama3Scaling, Rope, YarnScaling
from xsake.model.huggingface.settings import Settings
from xsake.model.rope import yarn_attention_factor

# "finetuned" is a remark of the oldest files; it changes nothing.
_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_OWN_KEYS = {
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
# What `default` files carry along from the file that they were made from.
_WITHOUT_EFFECT = {"default": {"factor", "original_max_position_embeddings"}}


def read_rope(settings: Settings) -> Rope:
    """The one rope of all layers, from `rope_parameters` or `rope_theta` and `rope_scaling`."""
    newer = settings.section("rope_parameters")
    older = settings.section("rope_scaling")
    base = settings.number("rope_theta", above=1.0)
    if newer is None:
        return _rope(older or Settings({}), base, settings)
    rope = _rope(newer, base, settings)
    if settings.has("rope_theta") and rope.base != base:
        raise _contradiction(settings, "rope_theta", base, rope.base)
    if older is not None and _rope(older, rope.base, settings) != rope:
        raise _contradiction(settings, "rope_scaling", older.values, newer.values)
    return rope


def read_ropes_of_gemma(settings: Settings) -> dict[str, Rope]:
    """The ropes of layers that see all and of those that see a window."""
    newer = settings.section("rope_parameters")
    older = settings.section("rope_scaling")
    bases = {
        "full_attention": ("rope_theta", settings.number("rope_theta", above=1.0)),
        "sliding_attention": (
            "rope_local_base_freq", settings.number("rope_local_base_freq", above=1.0)
        ),
    }  # fmt: skip
    if newer is None:
        full = _rope(older or Settings({}), bases["full_attention"][1], settings)
        return {
            "full_attention": full,
            "sliding_attention": Rope(base=bases["sliding_attention"][1]),
        }
    flat = sorted(newer.values.keys() - bases.keys())
    if flat:
        raise newer.refusal(
            flat[0], newer.values[flat[0]],
            "one object for full_attention and one for sliding_attention",
            fix="put the parameters into both objects, as the layers of this family differ",
        )  # fmt: skip
    found = {}
    for kind, (key, base) in bases.items():
        found[kind] = _rope(newer.section(kind) or Settings({}), base, settings)
        if settings.has(key) and found[kind].base != base:
            raise _contradiction(settings, key, base, found[kind].base)
        scaling = found[kind].scaling
        if isinstance(scaling, YarnScaling) and not scaling.is_truncated:
            # transformers looks for it outside these objects, so it would not be heard there.
            raise newer.refusal(f"{kind}.truncate", False, "true: ramps that end at dimensions")
    full = found["full_attention"]
    if older is not None and _rope(older, full.base, settings) != full:
        raise _contradiction(settings, "rope_scaling", older.values, newer.values)
    return found


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope_parameters` of one kind of layer, as transformers 5 spells it."""
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
            found = base | {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_context,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "attention_factor": scaling.attention_factor,
            }
            return found if scaling.is_truncated else found | {"truncate": False}
    raise AssertionError(f"no such scaling: {rope.scaling!r}")


def older_scaling(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` as transformers 4 spells what `write_rope` gave."""
    if parameters["rope_type"] == "default":
        return None
    return {key: value for key, value in parameters.items() if key != "rope_theta"}


def _rope(own: Settings, base: float, settings: Settings) -> Rope:
    """The rope that one object describes; `settings` is the whole file."""
    kind = _kind(own)
    partial = own.number("partial_rotary_factor", 1.0)
    if partial != 1:
        raise own.refusal("partial_rotary_factor", partial, "1: all dimensions of a head turn")
    known = _ALWAYS | _OWN_KEYS[kind] | _WITHOUT_EFFECT.get(kind, set())
    for key, value in own.values.items():
        if key not in known and value is not None:
            raise own.refusal(
                key, value, f"only keys of rope_type {kind!r}: {', '.join(sorted(known))}"
            )
    base = own.number("rope_theta", base, above=1.0)
    if kind == "default":
        return Rope(base=base)
    if kind == "linear":
        return Rope(base=base, scaling=LinearScaling(factor=own.number("factor")))
    original = _original_context(own, settings)
    if kind == "yarn":
        return Rope(base=base, scaling=_yarn(own, original, settings))
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if low >= high:
        raise own.refusal("low_freq_factor", low, f"less than high_freq_factor, which is {high}")
    factor = own.number("factor")
    return Rope(
        base=base,
        scaling=Llama3Scaling(
            factor=factor, low_factor=low, high_factor=high, original_context=original
        ),
    )


def _kind(own: Settings) -> str:
    kinds = {
        own.choice(key, _OWN_KEYS) for key in ("rope_type", "type") if own.has(key)
    }  # fmt: skip
    if len(kinds) > 1:
        raise own.refusal("type", own.values["type"], f"the same as rope_type: {kinds}")
    return kinds.pop() if kinds else "default"


def _original_context(own: Settings, settings: Settings) -> int:
    key = "original_max_position_embeddings"
    whole = settings.size("max_position_embeddings")
    if settings.has(key):
        outer = settings.size(key)
        if own.has(key) and own.size(key) != outer:
            raise own.refusal(key, own.size(key), f"{outer}, as {key} outside says")
        return outer
    return own.size(key, whole)


def _yarn(own: Settings, original: int, settings: Settings) -> YarnScaling:
    whole = settings.size("max_position_embeddings")
    factor = own.number("factor", whole / original)
    attention = own.optional_number("attention_factor")
    if attention is None:
        attention = yarn_attention_factor(factor)
        above, below = own.optional_number("mscale"), own.optional_number("mscale_all_dim")
        if above is not None and below is not None:
            attention = (1 + above * (attention - 1)) / (1 + below * (attention - 1))
    return YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=own.number("beta_fast", 32.0),
        beta_slow=own.number("beta_slow", 1.0),
        attention_factor=attention,
        is_truncated=own.flag("truncate", True),
    )


def _contradiction(settings: Settings, key: str, older: Any, newer: Any):
    return settings.refusal(
        key, older, f"the same as in rope_parameters, {newer!r}"[:300],
        fix="keep only one of them: rope_parameters is how transformers 5 writes it",
    )  # fmt: skip
