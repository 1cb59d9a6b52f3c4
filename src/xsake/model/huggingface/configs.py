"""Read and write config.json: every key that affects results is either supported or rejected."""

import dataclasses
from typing import Any

from pydantic import ValidationError

from xsake._schema import describe_first
from xsake.errors import CheckpointError
from xsake.model.config import SCALINGS, DecoderConfig, LayerKind, Rope, YarnScaling
from xsake.model.huggingface import config_reader as kinds
from xsake.model.huggingface.config_reader import FLAG, NUMBER, SIZE, ConfigReader
from xsake.model.huggingface.families import DERIVED, FAMILIES, FULL, SLIDING, ModelFamily
from xsake.model.layers import yarn_attention_factor

MAX_PARAMETERS = 2**40
_DEFAULT_WINDOW = 4096

_OFF, _ABSENT, _ONE, _NO_EXPERTS = (None, False), (None,), (None, 1), (None, 0, 1)
# Unsupported keys with the values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": _ABSENT, "compression_config": _ABSENT,
    "is_encoder_decoder": _OFF, "add_cross_attention": _OFF, "use_bidirectional_attention": _OFF,
    "num_experts": _NO_EXPERTS, "num_local_experts": _NO_EXPERTS, "n_routed_experts": _NO_EXPERTS,
    "attn_logit_softcapping": _ABSENT, "final_logit_softcapping": _ABSENT,
    "partial_rotary_factor": _ONE, "rope_interleaved": _OFF, "use_mrope": _OFF, "alibi": _OFF,
    "no_rope_layers": _ABSENT, "no_rope_layer_interval": _ABSENT, "attention_chunk_size": _ABSENT,
    "attn_temperature_tuning": _OFF, "scale_attn_by_inverse_layer_idx": _OFF,
    "use_qk_norm": _OFF, "qk_layernorm": _OFF, "use_parallel_residual": _OFF,
    "parallel_attn": _OFF, "embedding_multiplier": _ONE, "residual_multiplier": _ONE,
    "attention_multiplier": _ABSENT, "logits_scaling": _ONE, "logit_scale": _ONE,
    "per_layer_config": _ABSENT, "num_kv_shared_layers": (None, 0),
    "hidden_size_per_layer_input": (None, 0), "sliding_window": _ABSENT,
    "use_sliding_window": _OFF, "sliding_window_pattern": _ABSENT, "rope_local_base_freq": _ABSENT,
}  # fmt: skip
_WINDOW_KEYS = {
    "none": (),
    "all": ("sliding_window",),
    "some": ("sliding_window", "use_sliding_window"),
    "pattern": ("sliding_window", "sliding_window_pattern"),
}
# Fields of a scaling by key of `rope_parameters`.
_FACTOR = {"factor": "factor"}
_ORIGINAL = {"original_max_position_embeddings": "original_context"}
_SCALING_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": _FACTOR,
    "llama3": _FACTOR | _ORIGINAL | {
        "low_freq_factor": "low_factor", "high_freq_factor": "high_factor",
    },
    "yarn": _FACTOR | _ORIGINAL | {
        "beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attention_factor",
        "truncate": "is_truncated",
    },
}  # fmt: skip
# Keys without a field: common ones, of which "finetuned" of the oldest files has no effect, and
# those of a type; `default` files have leftovers.
_COMMON_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_OTHER_ROPE_KEYS = {"default": {*_FACTOR, *_ORIGINAL}, "yarn": {"mscale", "mscale_all_dim"}}


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Special tokens for generation."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


@dataclasses.dataclass(frozen=True)
class ModelDescription:
    """Parsed config.json."""

    family: ModelFamily
    config: DecoderConfig
    token_ids: TokenIds


def read_config(values: dict[str, Any]) -> ModelDescription:
    """Parse config.json; raise a `CheckpointError` with the key of an unsupported value.

    Args:
        values: content of config.json, written by transformers 4 or 5.
    """
    outer = ConfigReader(values)
    custom_code = outer.section("auto_map")
    if custom_code and custom_code.values.keys() & {"AutoConfig", "AutoModelForCausalLM"}:
        raise outer.error(
            "auto_map", custom_code.values, "a model of transformers itself, without custom code",
            fix="remove the key if the model is identical to its model_type",
        )  # fmt: skip
    model_type = outer.read("model_type", kinds.one_of((*FAMILIES, "gemma3")))
    family = FAMILIES["gemma3_text" if model_type == "gemma3" else model_type]
    text = _text_config(outer) if model_type == "gemma3" else outer
    for reader in (outer, text):
        _reject_unsupported_keys(reader, family)
    config = _read_decoder(dataclasses.replace(text, defaults=family.defaults), family)

    def token_ids(key: str) -> tuple[int, ...]:
        reader = outer if outer.has(key) else text
        return tuple(kinds.as_list(reader.read(key, kinds.TOKEN_IDS, [])))

    bos, eos, pad = map(token_ids, ("bos_token_id", "eos_token_id", "pad_token_id"))
    return ModelDescription(
        family, config, TokenIds(next(iter(bos), None), eos, next(iter(pad), None))
    )


def _text_config(outer: ConfigReader) -> ConfigReader:
    text = outer.section("text_config")
    if text is None:
        raise outer.error("text_config", None, "the text config of a gemma3 model")
    text.read("model_type", kinds.one_of(["gemma3_text"]), None)
    tied = outer.read("tie_word_embeddings", FLAG, None)
    if tied is None:
        return text
    if text.read("tie_word_embeddings", FLAG, tied) != tied:
        raise text.error("tie_word_embeddings", not tied, f"{tied}, as outside text_config")
    return dataclasses.replace(text, values={**text.values, "tie_word_embeddings": tied})


def _reject_unsupported_keys(reader: ConfigReader, family: ModelFamily) -> None:
    supported = {*family.keys, *_WINDOW_KEYS[family.window], *family.rope_bases.values()}
    for key, neutral in _NEUTRAL.items():
        value = reader.values.get(key)
        if key not in supported and not any(_is_neutral(value, each) for each in neutral):
            accepted = " or ".join("absent" if each is None else str(each) for each in neutral)
            raise reader.error(
                key, value, f"{accepted}, for model_type {family.name!r}",
                fix="this changes the model and is not supported",
            )  # fmt: skip


def _is_neutral(value: Any, neutral: Any) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool) or neutral is None:
        return value is neutral
    return isinstance(value, int | float) and value == neutral


def _read_decoder(reader: ConfigReader, family: ModelFamily) -> DecoderConfig:
    fields: dict[str, Any] = {}
    for key, entry in family.keys.items():
        default = DERIVED[key](fields) if key in DERIVED else kinds.REQUIRED
        value = reader.read(key, entry.kind, default)
        fields[entry.field] = None if value is None else entry.read(value)
        if entry.field == "activation" and reader.has("hidden_act"):
            # Older Gemma files have two keys, of which only one has an effect.
            other, own = entry.read(reader.read("hidden_act", entry.kind)), fields["activation"]
            if other != own:
                raise reader.error("hidden_act", other, f"the same as {key}, {own}, or absent")
    if "n_head" in family.keys and fields["width"] % fields["q_heads"]:
        divisor = f"a divisor of n_embd, which is {fields['width']}"
        raise reader.error("n_head", fields["q_heads"], divisor)
    for field, value in family.fixed.items():
        fields[field] = value(fields) if callable(value) else value
    try:
        config = DecoderConfig.model_validate(
            fields | _read_layer_kinds(reader, family, fields["layers"])
        )
    except ValidationError as wrong:
        raise CheckpointError(
            "config-model", "config.json describes an invalid model",
            got=describe_first(wrong)[:300],
            expected="consistent sizes and layer types",
            fix="use the original config.json of the checkpoint",
        ) from wrong  # fmt: skip
    _check_parameter_count(config)
    return config


def _check_parameter_count(config: DecoderConfig) -> None:
    """Reject models whose total size exceeds the limit, even if every single size is valid."""
    heads = 2 * (config.q_heads + config.kv_heads) * config.head_dim
    layer = config.width * (heads + 3 * config.mlp_width)
    total = 2 * config.vocab_size * config.width + config.layers * layer
    if total > MAX_PARAMETERS:
        raise CheckpointError(
            "config-size", "config.json describes a model above the size limit",
            got=f"about {total:.1e} parameters: width={config.width}, layers={config.layers}, "
            f"mlp_width={config.mlp_width}, vocab_size={config.vocab_size}",
            expected=f"at most {MAX_PARAMETERS:.1e}",
            fix="use the original config.json of the checkpoint",
        )  # fmt: skip


def _read_layer_kinds(reader: ConfigReader, family: ModelFamily, layers: int) -> dict[str, Any]:
    window = _read_window(reader, family.window)
    types = _read_layer_types(reader, family.window, layers, window is not None)
    if SLIDING in types and window is None:
        expected = "a number of tokens, as some layers use a window"
        raise reader.error("sliding_window", None, expected)
    ropes = _read_ropes(reader, family)
    order = tuple(dict.fromkeys(types))
    layer_kinds = tuple(
        LayerKind(window=window if each == SLIDING else None, rope=ropes.get(each, ropes.get(FULL)))
        for each in order
    )
    numbers = tuple(order.index(each) for each in types) if len(order) > 1 else None
    return {"kinds": layer_kinds, "kind_of_layer": numbers}


def _read_window(reader: ConfigReader, style: str) -> int | None:
    # An explicit null differs from an absent key.
    if style == "none" or reader.values.get("sliding_window", 0) is None:
        return None
    if style == "some" and not reader.read("use_sliding_window", FLAG):
        return None
    return reader.read("sliding_window", SIZE, _DEFAULT_WINDOW)


def _read_layer_types(
    reader: ConfigReader, style: str, layers: int, has_window: bool
) -> tuple[str, ...]:
    """Return `layer_types`, or the equivalent of older files."""
    only = SLIDING if has_window else FULL
    allowed = (only,) if style in ("none", "all") else (FULL, SLIDING)
    types = reader.read("layer_types", kinds.one_per_layer(allowed, layers), None)
    if types is not None:
        return tuple(types)
    if style == "pattern":
        pattern = reader.read("sliding_window_pattern", SIZE)
        return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(layers))
    first = reader.read("max_window_layers", kinds.sizes(minimum=0)) if style == "some" else 0
    return tuple(FULL if i < first else only for i in range(layers))


def _read_ropes(reader: ConfigReader, family: ModelFamily) -> dict[str, Rope]:
    """Read the RoPE by layer type from `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    newer, older = reader.section("rope_parameters"), reader.section("rope_scaling")
    is_split = len(family.rope_bases) > 1
    flat = sorted(newer.values.keys() - family.rope_bases.keys()) if newer and is_split else []
    if newer and flat:
        raise newer.error(
            flat[0], newer.values[flat[0]],
            "one object for full_attention and one for sliding_attention",
            fix="move the parameters into both objects",
        )  # fmt: skip
    ropes = {}
    for layer_type, key in family.rope_bases.items():
        base = reader.read(key, kinds.numbers(above=1.0))
        if newer is None:
            ropes[layer_type] = _read_rope(older if layer_type == FULL else None, base, reader)
            continue
        section = newer.section(layer_type) if is_split else newer
        rope = ropes[layer_type] = _read_rope(section, base, reader)
        if reader.has(key) and rope.base != base:
            raise _conflict_error(reader, key, base, rope.base)
        if older and layer_type == FULL and _read_rope(older, rope.base, reader) != rope:
            raise _conflict_error(reader, "rope_scaling", older.values, newer.values)
        if is_split and isinstance(rope.scaling, YarnScaling) and not rope.scaling.is_truncated:
            # transformers reads it outside of these objects, so it would have no effect.
            raise newer.error(f"{layer_type}.truncate", False, "true: ramps that end at dimensions")
    return ropes


def _read_rope(section: ConfigReader | None, base: float | int, reader: ConfigReader) -> Rope:
    """Parse the RoPE of one object; `reader` is that of the whole file."""
    section = section or ConfigReader({})
    rope_type = _read_rope_type(section)
    partial = section.read("partial_rotary_factor", NUMBER, 1.0)
    if partial != 1:
        expected = "1: all dimensions of a head are rotated"
        raise section.error("partial_rotary_factor", partial, expected)
    known = (
        _COMMON_ROPE_KEYS | _SCALING_KEYS[rope_type].keys() | _OTHER_ROPE_KEYS.get(rope_type, set())
    )
    for key, value in section.values.items():
        if key not in known and value is not None:
            expected = f"only keys of rope_type {rope_type!r}: {', '.join(sorted(known))}"
            raise section.error(key, value, expected)
    base = section.read("rope_theta", kinds.numbers(above=1.0), base)
    if rope_type == "default":
        return Rope(base=base)
    fields = {}
    if "original_max_position_embeddings" in _SCALING_KEYS[rope_type]:
        fields["original_context"] = _read_original_context(section, reader)
    if rope_type == "yarn":
        context = reader.read("max_position_embeddings", SIZE)
        factor = section.read("factor", NUMBER, context / fields["original_context"])
        section = dataclasses.replace(section, defaults={
            "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
            "attention_factor": _yarn_attention_factor(section, factor),
        })  # fmt: skip
    for key, field in _SCALING_KEYS[rope_type].items():
        if field not in fields:
            fields[field] = section.read(key, FLAG if field == "is_truncated" else NUMBER)
    if rope_type == "llama3" and fields["low_factor"] >= fields["high_factor"]:
        expected = f"less than high_freq_factor, which is {fields['high_factor']}"
        raise section.error("low_freq_factor", fields["low_factor"], expected)
    return Rope(base=base, scaling=SCALINGS[rope_type](**fields))


def _read_rope_type(section: ConfigReader) -> str:
    types = [section.read(key, kinds.one_of(_SCALING_KEYS), None) for key in ("rope_type", "type")]
    given = {each for each in types if each is not None}
    if len(given) > 1:
        raise section.error("type", types[1], f"the same as rope_type: {types[0]}")
    return given.pop() if given else "default"


def _read_original_context(section: ConfigReader, reader: ConfigReader) -> int:
    key = "original_max_position_embeddings"
    outer = reader.read(key, SIZE, None)
    inner = section.read(key, SIZE, outer or reader.read("max_position_embeddings", SIZE))
    if outer is not None and inner != outer:
        raise section.error(key, inner, f"{outer}, as in the outer {key}")
    return inner


def _yarn_attention_factor(section: ConfigReader, factor: float | int) -> float:
    attention = yarn_attention_factor(factor)
    above, below = (section.read(key, NUMBER, None) for key in ("mscale", "mscale_all_dim"))
    if above is None or below is None:
        return attention
    return (1 + above * (attention - 1)) / (1 + below * (attention - 1))


def _conflict_error(reader: ConfigReader, key: str, older: Any, newer: Any) -> CheckpointError:
    return reader.error(
        key, older, f"the same as in rope_parameters, {newer!r}"[:300],
        fix="keep only one of them; rope_parameters is the key of transformers 5",
    )  # fmt: skip


def write_config(
    family: ModelFamily, config: DecoderConfig, *, dtype: str, token_ids: TokenIds
) -> dict[str, Any]:
    """Return config.json for transformers 5, and for 4 where it can represent the model.

    Raises CheckpointError if the family cannot represent it.

    Args:
        family: to write.
        config: of the decoder.
        dtype: of the weights, such as "float32".
        token_ids: bos, eos and pad.
    """
    if any((kind.rope is None) == bool(family.rope_bases) for kind in config.kinds):
        raise _unsupported_error(family, "rotary positions in all layers, or in none for gpt2")
    eos = token_ids.eos
    values = {
        "architectures": [family.architecture],
        "model_type": family.name,
        # transformers 4 reads torch_dtype.
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": token_ids.bos,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": token_ids.pad,
        **_write_ropes(family, config),
        **_write_windows(family, config),
    }
    for key, entry in family.keys.items():
        values[key] = entry.write(config) if entry.write else getattr(config, entry.field)
    loaded = _canonical_fields(read_config(values).config)
    wrong = [
        f"{field}: {value!r}, would be read as {loaded[field]!r}"[:200]
        for field, value in _canonical_fields(config).items()
        if value != loaded[field]
    ]
    if wrong:
        raise _unsupported_error(family, "; ".join(wrong[:5]))
    return values


def _canonical_fields(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a config in a canonical form, for comparison."""
    layer_kinds = [config.kinds[number] for number in config.layer_kinds]
    fields = {name: getattr(config, name) for name in type(config).model_fields}
    del fields["kind_of_layer"]
    # 1 / sqrt(n) and n ** -0.5 are not always the same float.
    return fields | {"kinds": layer_kinds, "query_scale": float(f"{config.scale:.14g}")}


def _unsupported_error(family: ModelFamily, got: str) -> CheckpointError:
    return CheckpointError(
        "family-model", f"the family {family.name!r} cannot represent this model", got=got,
        expected=f"a model supported by {family.architecture}",
        fix="export it with the family it was loaded from, or change the model's config",
    )  # fmt: skip


def _write_ropes(family: ModelFamily, config: DecoderConfig) -> dict[str, Any]:
    if not family.rope_bases:
        return {}
    ropes = {each: _first_kind(config, each).rope or Rope() for each in family.rope_bases}
    written = {each: _write_rope(rope) for each, rope in ropes.items()}
    values: dict[str, Any] = {"rope_parameters": written if len(ropes) > 1 else written[FULL]}
    if all(rope.scaling is None for each, rope in ropes.items() if each != FULL):
        # The keys of transformers 4.
        scaling = {key: value for key, value in written[FULL].items() if key != "rope_theta"}
        values["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
        values |= {key: ropes[each].base for each, key in family.rope_bases.items()}
    return values


def _write_rope(rope: Rope) -> dict[str, Any]:
    scaling = rope.scaling
    rope_type = "default" if scaling is None else scaling.kind
    values = {key: getattr(scaling, field) for key, field in _SCALING_KEYS[rope_type].items()}
    if values.get("truncate") is True:
        del values["truncate"]
    return {"rope_theta": rope.base, "rope_type": rope_type, **values}


def _write_windows(family: ModelFamily, config: DecoderConfig) -> dict[str, Any]:
    window = _first_kind(config, SLIDING).window
    if family.window in ("none", "all"):
        return dict.fromkeys(_WINDOW_KEYS[family.window], window)
    types = [
        FULL if config.kinds[number].window is None else SLIDING for number in config.layer_kinds
    ]
    if family.window == "some":
        first = types.index(SLIDING) if SLIDING in types else config.layers
        return {
            "layer_types": types, "sliding_window": window,
            "use_sliding_window": window is not None, "max_window_layers": first,
        }  # fmt: skip
    period = types.index(FULL) + 1 if FULL in types else config.layers + 1
    is_regular = types == [SLIDING if (i + 1) % period else FULL for i in range(config.layers)]
    # transformers requires a window even if no layer uses it.
    values = {"layer_types": types, "sliding_window": window or config.context}
    return values | ({"sliding_window_pattern": period} if is_regular else {})


def _first_kind(config: DecoderConfig, layer_type: str) -> LayerKind:
    """Return the first kind of this layer type, or any if there is none."""
    used = [config.kinds[number] for number in config.layer_kinds]
    matches = [kind for kind in used if (kind.window is None) == (layer_type == FULL)]
    return matches[0] if matches else used[0]
