"""Rotary settings of a transformers configuration as the specification of an encoding."""

import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

WHERE = "rope_parameters"  # in messages, without a model_type
Spec = Dict[str, Any]
LARGEST = 1e300  # below which integers of any size become float64
# Our parameter original_max_positions; all others have transformers' names.
ORIGINAL = "original_max_position_embeddings"
YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
# For each rope_type, its keys in rope_parameters (see transformers.modeling_rope_utils).
KINDS: Dict[str, Tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", ORIGINAL, *YARN),
    "llama3": LLAMA3,
    "longrope": ("factor", "short_factor", "long_factor", ORIGINAL, "attention_factor"),
    "proportional": ("factor",),
}
REQUIRED = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", ORIGINAL),
    "llama3": LLAMA3,
    "longrope": ("short_factor", "long_factor", ORIGINAL),
}
# Order of axes over rotary pairs, by the beginning of model_type. "sections": time, then height,
# then width. "in turn": the three axes interleaved. "alternating": height and width interleaved,
# then time.
SECTIONS = "glm4v glm46v glm_image glm_ocr paddleocr_vl qwen2_5_omni qwen2_5_vl qwen2_vl".split()
IN_TURN = "cohere_compass cosmos3_edge qwen3_5 qwen3_omni_moe qwen3_vl qwen4_exp".split()
AXES = {
    **dict.fromkeys(SECTIONS, "sections"),
    **dict.fromkeys(IN_TURN, "in turn"),
    "ernie4_5_vl_moe": "alternating",
}
NAMES = {"default": "rope", "dynamic": "rope_dynamic", "longrope": "rope_longrope"}


def refused(rule: str, got: object, remedy: str) -> ValueError:
    """As shared.refusal.refusal; `rope_spec` adds the place."""
    return ValueError(f"expected {rule}, got {got}; {remedy}")


def rope_spec(config: Mapping[str, Any]) -> Union[Spec, Dict[str, Spec]]:
    """Return the specification {"name": ..., parameter: value}, or a specification for each layer
    type if `rope_parameters` is nested by layer type. Every key is used or refused by name.

    The layout of rotary pairs depends on the model family and is not part of the configuration.

    Args:
        config: configuration of a model, as transformers writes it. Read are rope_parameters
            (version 5), or rope_theta and rope_scaling with rope_type or type;
            partial_rotary_factor; head_dim, or hidden_size and num_attention_heads;
            max_position_embeddings; original_max_position_embeddings, which takes precedence over
            that in rope_parameters; GPT-NeoX's rotary_pct and rotary_emb_base; GPT-J's rotary_dim.
            theta defaults to 10000. With mrope_section the encoding is mrope or mrope_interleaved,
            by model_type or else by mrope_interleaved. If rope_parameters is nested by layer type,
            yarn's truncate is read inside it; transformers 5.23 reads it outside.

    Raises:
        ValueError: an unknown rope_type, an unknown or missing key, a value of another type.
    """
    try:
        return _of_config(_with_current_names(config))
    except ValueError as error:
        raise ValueError(f"{config.get('model_type') or WHERE}: {error}") from None


def _of_config(config: Mapping[str, Any]) -> Union[Spec, Dict[str, Spec]]:
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and new != old:
        got = f"{new!r} and {old!r}"
        raise refused("rope_parameters or rope_scaling", got, "remove one")
    parameters = new or old
    if not isinstance(parameters, Mapping):
        rule = "rope_parameters to be a mapping"
        raise refused(rule, repr(parameters), "correct config.json")
    nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if nested and len(nested) == len(parameters):
        return {layer: _spec(config, of_layer) for layer, of_layer in nested.items()}
    if nested:
        rule = "rope_parameters to be nested for all layer types or for none"
        raise refused(rule, ", ".join(map(str, parameters)), "correct config.json")
    return _spec(config, parameters)


def _with_current_names(config: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the configuration with current names for older keys of the rotation."""
    plain = dict(config)
    if plain.get("rope_local_base_freq") is not None:
        rule = "rope_parameters nested by layer type for a model with several rotations"
        raise refused(rule, "rope_local_base_freq", "nest them")
    for old, new in (("rotary_pct", "partial_rotary_factor"), ("rotary_emb_base", "rope_theta")):
        value = plain.pop(old, None)
        if value is not None and plain.setdefault(new, value) != value:
            raise refused(f"{old} or {new}", f"{value!r} and {plain[new]!r}", "remove one")
    if plain.get("rotary_dim") is not None:
        share = _number("rotary_dim", plain["rotary_dim"]) / _head_size(plain)
        plain.setdefault("partial_rotary_factor", share)
    return plain


def _spec(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> Spec:
    rest = {key: value for key, value in parameters.items() if key != "finetuned"}
    sections, interleaved = rest.pop("mrope_section", None), rest.pop("mrope_interleaved", None)
    kind = _kind(rest, sections)
    theta = rest.pop("rope_theta", config.get("rope_theta", 10000.0))
    nested = any(isinstance(v, Mapping) for v in (config.get("rope_parameters") or {}).values())
    if config.get("rope_theta") not in (None, theta) and not nested:
        got = f"{config['rope_theta']!r} and {theta!r}"
        raise refused("one rope_theta", got, "remove one")
    partial = rest.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if ORIGINAL in KINDS[kind] and config.get(ORIGINAL):  # Phi-3 has it outside rope_scaling
        rest[ORIGINAL] = config[ORIGINAL]
    rest = {key: value for key, value in rest.items() if value is not None}
    if kind in ("yarn", "longrope") and "factor" not in rest and set(rest) <= set(KINDS[kind]):
        rest["factor"] = _length_ratio(config, rest)
    _check_keys(kind, rest, parameters)
    spec: Spec = {"name": NAMES.get(kind, f"rope_{kind}"), "theta": _number("rope_theta", theta)}
    for key, value in rest.items():
        ours = "original_max_positions" if key == ORIGINAL else key
        spec[ours] = PARSERS.get(key, _number)(key, value)
    share = None if partial is None else _number("partial_rotary_factor", partial)
    spec = _with_derived_values(config, kind, spec, share)
    return spec if sections is None else _with_sections(config, kind, spec, sections, interleaved)


def _kind(rest: Spec, sections: Any) -> str:
    """Take rope_type, or its older name, and return it."""
    named = {str(rest.pop(key)) for key in ("rope_type", "type") if key in rest} or {"default"}
    multi = sections is not None
    kinds = sorted({"default" if name == "mrope" and multi else name for name in named})
    if len(kinds) > 1 or kinds[0] not in KINDS:
        rule = f"rope_type to be one of {', '.join(KINDS)}"
        raise refused(rule, ", ".join(kinds), "convert it by hand")
    return kinds[0]


def _check_keys(kind: str, rest: Spec, parameters: Mapping[str, Any]) -> None:
    if unknown := sorted(set(rest) - set(KINDS[kind])):
        rule = f"{', '.join(KINDS[kind]) or 'no further keys'} for rope_type {kind}"
        raise refused(rule, ", ".join(unknown), "remove them, or convert by hand")
    if missing := [key for key in REQUIRED.get(kind, ()) if key not in rest]:
        rule = f"{', '.join(missing)} for rope_type {kind}"
        raise refused(rule, ", ".join(parameters) or "nothing", "add what is missing")


def _with_sections(
    config: Mapping[str, Any], kind: str, spec: Spec, sections: Any, interleaved: Any
) -> Spec:
    """Return the rotation with mrope_section: each rotary pair rotates by time, height or width."""
    if kind not in ("default", "yarn") or {"mscale", "mscale_all_dim"} & set(spec):
        rule = "rope_type default, or yarn without mscale, with mrope_section"
        raise refused(rule, kind, "convert it by hand")
    pairs = spec.get("rotary", _head_size(config)) // 2
    listed = isinstance(sections, (list, tuple))
    whole = listed and all(type(size) is int and size > 0 for size in sections)
    if not whole or len(sections) != 3 or sum(sections) != pairs:
        rule = f"mrope_section to be three integers above 0 with sum {pairs}"
        raise refused(rule, repr(sections), "correct config.json")
    first, second, third = sections
    order = _order_of_axes(str(config.get("model_type", "")), interleaved)
    if order == "in turn":
        return {**spec, "name": "mrope_interleaved", "height": second, "width": third}
    if order == "alternating":
        return {**spec, "name": "mrope", "time": third, "height": first, "order": "alternating"}
    return {**spec, "name": "mrope", "time": first, "height": second}


def _order_of_axes(model_type: str, interleaved: Any) -> str:
    """Return a value of AXES. model_type and mrope_interleaved must not contradict each other."""
    known = next((order for begin, order in AXES.items() if model_type.startswith(begin)), None)
    if interleaved is None and known is None:
        rule = f"mrope_interleaved beside mrope_section, or a model_type of {', '.join(AXES)}"
        got = f"neither for model_type {model_type!r}"
        raise refused(rule, got, "remove mrope_section, or set mrope_interleaved")
    if interleaved is None:
        return str(known)
    in_turn = _yes_or_no("mrope_interleaved", interleaved) == "yes"
    if known and (known == "in turn") != in_turn:
        rule = f"mrope_interleaved to be {known == 'in turn'} for {model_type}"
        raise refused(rule, interleaved, "correct it")
    return known or ("in turn" if in_turn else "sections")


def _with_derived_values(
    config: Mapping[str, Any], kind: str, spec: Spec, partial: Optional[float]
) -> Spec:
    """Add the parameters that depend on several keys."""
    if kind == "dynamic":
        key = "max_position_embeddings"
        if not config.get(key):
            raise refused(f"{key} for rope_type dynamic", "none", "add it")
        spec["original_max_positions"] = _whole(key, config[key])
    if kind == "proportional":
        spec["share"] = 1.0 if partial is None else partial
    elif partial is not None and partial != 1.0:
        spec["rotary"] = int(_head_size(config) * partial)
    if kind == "longrope":
        factor = spec.pop("factor")
        if "attention_factor" not in spec:
            spec["attention_factor"] = _longrope_magnitude(factor, spec["original_max_positions"])
    return spec


def _longrope_magnitude(factor: float, length: int) -> float:
    if length < 2:
        raise refused(f"{ORIGINAL} of at least 2 for longrope", length, "correct config.json")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))


def _length_ratio(config: Mapping[str, Any], rest: Mapping[str, Any]) -> float:
    lengths = []
    for key, source in (("max_position_embeddings", config), (ORIGINAL, rest)):
        if not source.get(key):
            raise refused(f"factor or {key}", "neither", "add one")
        lengths.append(_whole(key, source[key]))
    return lengths[0] / lengths[1]


def _head_size(config: Mapping[str, Any]) -> int:
    if config.get("head_dim"):
        return _whole("head_dim", config["head_dim"])
    if not (config.get("hidden_size") and config.get("num_attention_heads")):
        rule = "head_dim, or hidden_size and num_attention_heads, with partial_rotary_factor, "
        raise refused(f"{rule}rotary_dim or mrope_section", "none", "add head_dim")
    heads = _whole("num_attention_heads", config["num_attention_heads"])
    return _whole("hidden_size", config["hidden_size"]) // heads


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= LARGEST:
        raise refused(f"{key} to be a finite number", f"{value!r:.80}", "correct it")
    return float(value)


def _whole(key: str, value: Any) -> int:
    if _number(key, value) != int(value):
        raise refused(f"{key} to be an integer", repr(value), "correct it")
    return int(value)


def _numbers(key: str, value: Any) -> List[float]:
    if not isinstance(value, (list, tuple)):
        raise refused(f"{key} to be a list of numbers", repr(value), "correct it")
    return [_number(key, item) for item in value]


def _yes_or_no(key: str, value: Any) -> str:
    if not isinstance(value, bool):
        raise refused(f"{key} to be true or false", repr(value), "correct it")
    return "yes" if value else "no"


PARSERS: Dict[str, Callable[[str, Any], Any]] = {
    ORIGINAL: _whole,
    "short_factor": _numbers,
    "long_factor": _numbers,
    "truncate": _yes_or_no,
}
