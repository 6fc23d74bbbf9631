"""Rotary settings of a transformers configuration as the specification of an encoding."""

from typing import Any, Callable, Dict, Mapping, Tuple

WHERE = "rope_parameters"  # in messages, without a model_type
Spec = Dict[str, Any]
LARGEST = 1e300  # below which integers of any size become float64
# Our parameter original_max_positions; all others have transformers' names.
RANGE, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
# For each rope_type, its keys in rope_parameters (see transformers.modeling_rope_utils), and those
# that are required.
KINDS: Dict[str, Tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", ORIGINAL, *YARN),
    "llama3": LLAMA3,
}
REQUIRED = {**KINDS, "yarn": ("factor", ORIGINAL)}
# Keys with which other model types rotate a part of each head, or some layers differently.
OTHERS = ("rotary_pct", "rotary_emb_base", "rotary_dim", "rope_local_base_freq")


def refused(rule: str, got: object, remedy: str) -> ValueError:
    """As shared.refusal.refusal; `rope_spec` adds the place."""
    return ValueError(f"expected {rule}, got {got}; {remedy}")


def rope_spec(config: Mapping[str, Any]) -> Spec:
    """Return the specification {"name": ..., parameter: value} of a rotation of whole heads that
    all layers share, as in Llama. Every key is used or refused by name.

    The layout of rotary pairs depends on the model type and is not part of the configuration.

    Args:
        config: configuration of a model, as transformers writes it. Read are rope_parameters
            (version 5), or rope_theta and rope_scaling with rope_type or type;
            max_position_embeddings; original_max_position_embeddings, which takes precedence over
            that in rope_parameters. theta defaults to 10000.

    Raises:
        ValueError: an unknown rope_type, an unknown or missing key, a value of another type; a
            rotation of a part of each head, several of them, or several coordinates.
    """
    try:
        return _spec(config)
    except ValueError as error:
        raise ValueError(f"{config.get('model_type') or WHERE}: {error}") from None


def _spec(config: Mapping[str, Any]) -> Spec:
    parameters = _parameters(config)
    rest = {key: value for key, value in parameters.items() if key != "finetuned"}
    kind = _kind(rest)
    theta = rest.pop("rope_theta", config.get("rope_theta", 10000.0))
    if config.get("rope_theta") not in (None, theta):
        got = f"{config['rope_theta']!r} and {theta!r}"
        raise refused("one rope_theta", got, "remove one")
    share = "partial_rotary_factor"
    partial = rest.pop(share, config.get(share))
    if partial is not None and _number(share, partial) != 1:
        raise refused("rotation of whole heads", f"{share} {partial!r}", "convert it by hand")
    if ORIGINAL in KINDS[kind] and config.get(ORIGINAL):
        rest[ORIGINAL] = config[ORIGINAL]
    rest = {key: value for key, value in rest.items() if value is not None}
    if unknown := sorted(set(rest) - set(KINDS[kind])):
        rule = f"{', '.join(KINDS[kind]) or 'no further keys'} for rope_type {kind}"
        raise refused(rule, ", ".join(unknown), "remove them, or convert by hand")
    if kind == "yarn" and "factor" not in rest:
        rest["factor"] = _length(kind, config, RANGE) / _length(kind, rest, ORIGINAL)
    if missing := [key for key in REQUIRED[kind] if key not in rest]:
        rule = f"{', '.join(missing)} for rope_type {kind}"
        raise refused(rule, ", ".join(parameters) or "nothing", "add what is missing")
    spec: Spec = {"name": "rope" if kind == "default" else f"rope_{kind}"}
    spec["theta"] = _number("rope_theta", theta)
    for key, value in rest.items():
        ours = "original_max_positions" if key == ORIGINAL else key
        spec[ours] = PARSERS.get(key, _number)(key, value)
    if kind == "dynamic":
        spec["original_max_positions"] = _length(kind, config, RANGE)
    return spec


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the rotation under their current or older name."""
    if other := next((key for key in OTHERS if config.get(key) is not None), None):
        raise refused("one rotation of whole heads for all layers", other, "convert it by hand")
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and new != old:
        got = f"{new!r} and {old!r}"
        raise refused("rope_parameters or rope_scaling", got, "remove one")
    parameters = new or old
    if not isinstance(parameters, Mapping):
        rule = "rope_parameters to be a mapping"
        raise refused(rule, repr(parameters), "correct config.json")
    if nested := [str(key) for key, value in parameters.items() if isinstance(value, Mapping)]:
        got = f"rope_parameters for {', '.join(nested)}"
        raise refused("one rotation for all layers", got, "convert it by hand")
    return parameters


def _kind(rest: Spec) -> str:
    """Take rope_type, or its older name, and return it."""
    kinds = sorted({str(rest.pop(key)) for key in ("rope_type", "type") if key in rest})
    if len(kinds) > 1 or not set(kinds) <= set(KINDS):
        rule = f"rope_type to be one of {', '.join(KINDS)}"
        raise refused(rule, ", ".join(kinds), "convert it by hand")
    return kinds[0] if kinds else "default"


def _length(kind: str, values: Mapping[str, Any], key: str) -> int:
    if not values.get(key):
        raise refused(f"{key} for rope_type {kind}", "none", "add it")
    return _whole(key, values[key])


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= LARGEST:
        raise refused(f"{key} to be a finite number", f"{value!r:.80}", "correct it")
    return float(value)


def _whole(key: str, value: Any) -> int:
    if _number(key, value) != int(value):
        raise refused(f"{key} to be an integer", repr(value), "correct it")
    return int(value)


def _yes_or_no(key: str, value: Any) -> str:
    if not isinstance(value, bool):
        raise refused(f"{key} to be true or false", repr(value), "correct it")
    return "yes" if value else "no"


PARSERS: Dict[str, Callable[[str, Any], Any]] = {ORIGINAL: _whole, "truncate": _yes_or_no}
