"""The rotation a transformers configuration describes, as the specification of an encoding; every key is consumed or refused by name."""

import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Union

Spec = Dict[str, Any]
# Keys of rope_parameters that each kind takes: ours by theirs. Their meaning is that of transformers.modeling_rope_utils.
KINDS: Dict[str, Dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "ntk": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    },
    "longrope": {
        "factor": "factor",
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "original_max_position_embeddings": "original_max_positions",
        "attention_factor": "attention_factor",
    },
    "proportional": {"factor": "factor"},
}
REQUIRED = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
# How mrope_section is read, by the beginning of model_type: sections of time, height and width one behind the other, in turn, or height and width in turn before time.
AXES = {
    **dict.fromkeys(("glm4v", "glm46v", "glm_image", "glm_ocr", "paddleocr_vl", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl"), "sections"),
    **dict.fromkeys(("cohere_compass", "cosmos3_edge", "qwen3_5", "qwen3_omni_moe", "qwen3_vl", "qwen4_exp"), "in turn"),
    "ernie4_5_vl_moe": "alternating",
}
NAMES = {"default": "rope", "dynamic": "rope_dynamic", "longrope": "rope_longrope"}


def rope_spec(config: Mapping[str, Any]) -> Union[Spec, Dict[str, Spec]]:
    """The specification, {"name": ..., parameter: value}, or one per layer type where `rope_parameters` is nested by layer type.

    Args:
        config: of a model, as transformers writes it: rope_parameters (v5), or rope_theta and rope_scaling with rope_type or type, and
            partial_rotary_factor, head_dim or hidden_size and num_attention_heads, max_position_embeddings, original_max_position_embeddings
            (which goes before the one in rope_parameters, as there). GPT-NeoX's rotary_pct and rotary_emb_base and GPT-J's rotary_dim are read too.
            mrope_section gives mrope or mrope_interleaved, as model_type or else mrope_interleaved says. The layout of pairs is the family's, not the
            configuration's. theta is 10000 where none is given. Nested by layer type, truncate of yarn is taken from where it stands; transformers 5.23
            looks for it outside.

    Raises:
        ValueError: an unknown kind, a key its kind does not take, a missing one, a value of another type.
    """
    config = _spelled(config)
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError(f"hugging_face: rope_parameters and rope_scaling are one thing, got {new!r} and {old!r}; remove one")
    given = new or old
    if not isinstance(given, Mapping):
        raise ValueError(f"hugging_face: rope_parameters is a mapping, got {given!r}")
    nested = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    if nested and len(nested) == len(given):
        return {layer: _spec(config, parameters) for layer, parameters in nested.items()}
    if nested:
        raise ValueError(f"hugging_face: rope_parameters is nested for all layer types or none, got {', '.join(map(str, given))}")
    return _spec(config, given)


def _spelled(config: Mapping[str, Any]) -> Dict[str, Any]:
    """The configuration with older names of theta and of the share that turns brought to one."""
    plain = dict(config)
    if plain.get("rope_local_base_freq") is not None:
        raise ValueError("hugging_face: rotations by layer type are nested in rope_parameters, got rope_local_base_freq; nest them")
    for old, new in (("rotary_pct", "partial_rotary_factor"), ("rotary_emb_base", "rope_theta")):
        value = plain.pop(old, None)
        if value is not None and plain.setdefault(new, value) != value:
            raise ValueError(f"hugging_face: {old} and {new} are one thing, got {value!r} and {plain[new]!r}; remove one")
    if plain.get("rotary_dim") is not None:
        plain.setdefault("partial_rotary_factor", _number("rotary_dim", plain["rotary_dim"]) / _head_size(plain))
    return plain


def _spec(config: Mapping[str, Any], given: Mapping[str, Any]) -> Spec:
    rest = dict(given)
    sections, interleaved = rest.pop("mrope_section", None), rest.pop("mrope_interleaved", None)
    named = {str(rest.pop(key)) for key in ("rope_type", "type") if key in rest} or {"default"}
    kinds = sorted({"default" if name == "mrope" and sections is not None else name for name in named})
    kind = kinds[0]
    if len(kinds) > 1 or kind not in KINDS:
        raise ValueError(f"hugging_face: rope_type is one of {', '.join(KINDS)}, got {', '.join(kinds)}")
    theta = rest.pop("rope_theta", config.get("rope_theta", 10000.0))
    if config.get("rope_theta") not in (None, theta) and not any(isinstance(value, Mapping) for value in (config.get("rope_parameters") or {}).values()):
        raise ValueError(f"hugging_face: rope_theta is given once, got {config['rope_theta']!r} and {theta!r}; remove one")
    partial = rest.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "original_max_position_embeddings" in KINDS[kind] and config.get("original_max_position_embeddings"):  # Phi-3 keeps it beside rope_scaling
        rest["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    rest = {key: value for key, value in rest.items() if value is not None}
    unknown = sorted(set(rest) - set(KINDS[kind]))
    if unknown:
        raise ValueError(f"hugging_face: rope_type {kind} takes {', '.join(KINDS[kind]) or 'no further keys'}, got {', '.join(unknown)}; remove them or convert by hand")
    if kind in ("yarn", "longrope") and "factor" not in rest:
        rest["factor"] = _ratio(config, rest)
    missing = [key for key in REQUIRED.get(kind, ()) if key not in rest]
    if missing:
        raise ValueError(f"hugging_face: rope_type {kind} needs {', '.join(missing)}, got {', '.join(given) or 'nothing'}")
    spec: Spec = {"name": NAMES.get(kind, f"rope_{kind}"), "theta": _number("rope_theta", theta)}
    for key, value in rest.items():
        spec[KINDS[kind][key]] = PARSERS.get(key, _number)(key, value)
    finished = _finished(config, kind, spec, None if partial is None else _number("partial_rotary_factor", partial))
    return finished if sections is None else _by_axes(config, kind, finished, sections, interleaved)


def _by_axes(config: Mapping[str, Any], kind: str, spec: Spec, sections: Any, interleaved: Any) -> Spec:
    """The rotation with mrope_section: pairs that turn by time, height and width."""
    if kind not in ("default", "yarn") or {"mscale", "mscale_all_dim"} & set(spec):
        raise ValueError(f"hugging_face: a rotation with mrope_section is of rope_type default, or yarn without mscale, got {kind}; convert it by hand")
    pairs = spec.get("rotary", _head_size(config)) // 2
    whole = isinstance(sections, (list, tuple)) and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sections)
    if not whole or len(sections) != 3 or sum(sections) != pairs:
        raise ValueError(f"hugging_face: mrope_section is three numbers above 0 that add up to {pairs} pairs, got {sections!r}; correct it")
    first, second, third = sections
    order = _order_of_axes(str(config.get("model_type", "")), interleaved)
    if order == "in turn":
        return {**spec, "name": "mrope_interleaved", "height": second, "width": third}
    if order == "alternating":
        return {**spec, "name": "mrope", "time": third, "height": first, "order": "alternating"}
    return {**spec, "name": "mrope", "time": first, "height": second}


def _order_of_axes(model_type: str, interleaved: Any) -> str:
    """A value of AXES: transformers goes by the model, whatever mrope_interleaved says."""
    known = next((order for begin, order in AXES.items() if model_type.startswith(begin)), None)
    said = None if interleaved is None else {"yes": "in turn", "no": "sections"}[_yes_or_no("mrope_interleaved", interleaved)]
    if known is None and said is None:
        raise ValueError(f"hugging_face: mrope_interleaved is given where model_type is none of {', '.join(AXES)}, got {model_type!r}; say true or false")
    if known and said and (known == "in turn") != (said == "in turn"):
        raise ValueError(f"hugging_face: mrope_interleaved is {known == 'in turn'} for {model_type}, got {interleaved!r}; correct it")
    return known or str(said)


def _finished(config: Mapping[str, Any], kind: str, spec: Spec, partial: Optional[float]) -> Spec:
    """With what the kind makes of partial_rotary_factor, of the length of the model, and of factor where it only serves another value."""
    if kind == "dynamic":
        if not config.get("max_position_embeddings"):
            raise ValueError("hugging_face: rope_type dynamic needs max_position_embeddings, got none")
        spec["original_max_positions"] = _whole("max_position_embeddings", config["max_position_embeddings"])
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
        raise ValueError(f"hugging_face: expected original_max_position_embeddings of at least 2 beside longrope, got {length}; correct config.json")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))


def _ratio(config: Mapping[str, Any], rest: Mapping[str, Any]) -> float:
    for key, source in (("max_position_embeddings", config), ("original_max_position_embeddings", rest)):
        if not source.get(key):
            raise ValueError(f"hugging_face: without factor, {key} must be given, got none")
    return _whole("max_position_embeddings", config["max_position_embeddings"]) / _whole(key, rest[key])


def _head_size(config: Mapping[str, Any]) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    if not (config.get("hidden_size") and config.get("num_attention_heads")):
        raise ValueError("hugging_face: partial_rotary_factor and mrope_section need head_dim, or hidden_size and num_attention_heads, got none")
    return int(config["hidden_size"] // config["num_attention_heads"])


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"hugging_face: {key} is a number, got {value!r}")
    return float(value)


def _whole(key: str, value: Any) -> int:
    if not math.isfinite(_number(key, value)) or value != int(value):
        raise ValueError(f"hugging_face: {key} is a whole number, got {value!r}")
    return int(value)


def _numbers(key: str, value: Any) -> List[float]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"hugging_face: {key} is a list of numbers, got {value!r}")
    return [_number(key, item) for item in value]


def _yes_or_no(key: str, value: Any) -> str:
    if not isinstance(value, bool):
        raise ValueError(f"hugging_face: {key} is true or false, got {value!r}")
    return "yes" if value else "no"


PARSERS: Dict[str, Callable[[str, Any], Any]] = {
    "original_max_position_embeddings": _whole,
    "short_factor": _numbers,
    "long_factor": _numbers,
    "truncate": _yes_or_no,
}
