"""Check that the ends of a graph, its tokens and outputs, agree with the configuration."""

from typing import Any, Dict, Tuple, cast

from posenc_export.runtime.artefact.graph_inputs import B, R, S
from posenc_export.runtime.artefact.schema import Axis, Manifest, Value

HIDDEN, KEYS_AND_VALUES = "last_hidden_state", "encoder_key_values"


def expect(holds: bool, rule: str, got: Any) -> None:
    """Raise ValueError unless a rule holds."""
    if not holds:
        raise ValueError(f"expected {rule}, got {got}")


def line(value: Value) -> str:
    return f"{value.name} {value.dtype} {list(value.axes)}"


def short(value: Any) -> str:
    return repr(value)[:60]


def check_ends(manifest: Manifest) -> None:
    """Check that kind, first input, output and configuration describe the same model."""
    config, kind, most = manifest.config, manifest.kind, manifest.max_positions
    own = config.get("kind")
    expect(own == kind, f"config.kind to be {kind} as kind", short(own))
    tokens: Any = config.get("tokens") if kind != "block" else {"vocabulary": 1}
    expect(isinstance(tokens, dict), "config.tokens to be an object", short(tokens))
    rule = f"config.max_positions to be {most} as max_positions"
    expect(config.get("max_positions") == most, rule, short(config.get("max_positions")))
    output, source = _output(manifest, tokens), _source(manifest, tokens)
    ends = {"inputs[0]": (manifest.inputs[0], source), "outputs[0]": (manifest.outputs[0], output)}
    for name, (value, wanted) in ends.items():
        expect(value == wanted, f"{name} of kind {kind} to be {line(wanted)}", line(value))
    _check_readout(manifest)
    least = {"vocabulary": 1, "segments": 0}
    for key in least if tokens else ():
        number = tokens.get(key, 0)
        rule = f"config.tokens.{key} to be a whole number of at least {least[key]}"
        expect(type(number) is int and least[key] <= number < 2**31, rule, short(number))


def _output(manifest: Manifest, tokens: Dict[str, Any]) -> Value:
    config = manifest.config
    width = config.get("width")
    name, size = {
        "decoder": ("logits", tokens.get("vocabulary")),
        "encoder": (HIDDEN, width),
        "block": ("output", width),
        "module": ("output", config.get("outputs")),
    }[manifest.kind]
    if manifest.kind == "module" and manifest.outputs[0].name in (
        "logits",
        HIDDEN,
        KEYS_AND_VALUES,
    ):
        name = manifest.outputs[0].name
    rule = "whole numbers for the sizes of the model in config"
    for number in (size, width):
        expect(type(number) is int, rule, short(number))
    selects = manifest.decodes and manifest.input("logits_index") is not None
    return Value(name, manifest.passed_dtype, (B, R if selects else S, cast(int, size)))


def _source(manifest: Manifest, tokens: Dict[str, Any]) -> Value:
    if manifest.kind in ("decoder", "encoder") or (manifest.kind == "module" and tokens):
        return Value("input_ids", "int64", (B, S))
    return Value("hidden_states", manifest.passed_dtype, (B, S, manifest.config["width"]))


def _check_readout(manifest: Manifest) -> None:
    """Check that a second output belongs to a model whose configuration describes it."""
    readout: Any = manifest.config.get("readout")
    described = isinstance(readout, dict) and manifest.encodes and not manifest.states
    count = len(manifest.outputs)
    rule = "a second output exactly for a model without caches, with config.readout"
    expect(described == (count == 2), rule, f"{count} outputs")
    for value in manifest.outputs[1:]:
        tokens: Tuple[Axis, ...] = () if readout.get("pooling") else (S,)
        name, dtype = readout.get("output"), manifest.dtype
        facts = (value.name, value.dtype, value.axes[:-1], type(value.axes[-1]))
        rule = f"outputs[1] to be {short(name)} {dtype} {[B, *tokens, 'size']} as in config.readout"
        expect(facts == (name, dtype, (B, *tokens), int), rule, line(value))
