"""Check that the fields of a manifest agree with each other and with the graph. Types and ranges
of single fields are checked by schema.py.
"""

from collections import Counter
from typing import Any, Dict, Sequence, Tuple, cast

import msgspec

from posenc_export.runtime.artefact.certificate import Certificate
from posenc_export.runtime.artefact.graph_inputs import (
    ENCODER_MASK,
    OF_ENCODER,
    B,
    M,
    P,
    Q,
    R,
    S,
    T,
    after_tokens,
)
from posenc_export.runtime.artefact.records import Axis
from posenc_export.runtime.artefact.schema import Manifest, State, Value

ENDS = {
    "decoder": ("input_ids", "logits"),
    "encoder": ("input_ids", "last_hidden_state"),
    "block": ("hidden_states", "output"),
}
GRAPHS = {
    **dict.fromkeys(("onnx", "onnx-static", "ort", "ort-cuda"), "model.onnx"),
    "torchscript": "model.pt",
    "pt2": "model.pt2",
    "aotinductor": "model.native.pt2",
}
WEIGHTS = "model.onnx.data"  # external data of an ONNX graph: concatenated tensors
GROWING = ("onnx",)
PAIRS = (
    ("past_positions", "present_positions"),
    ("past_embedding.", "present_embedding."),
    ("past_key_values.", "present."),
)
TYPES = {
    "tensor(float)": "float32",
    **{f"tensor({name})": name for name in ("float16", "bfloat16", "int64", "int32", "int8")},
}


def check(manifest: Manifest) -> None:
    """Raise ValueError if fields of a manifest contradict each other; the message gives the
    first rule that does not hold.
    """
    _check_names(manifest)
    _check_ends(manifest)
    _check_inputs(manifest)
    _check_encoder(manifest)
    for index, state in enumerate(manifest.states):
        _check_state(f"states[{index}]", state, manifest)
    _check_caches(manifest)
    _check_files(manifest)
    for certificate in (
        *([] if manifest.certificate is None else [manifest.certificate]),
        *manifest.proofs,
    ):
        msgspec.convert(certificate, Certificate)


def check_graph(manifest: Manifest, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Compare a manifest with the inputs and outputs of a loaded ONNX graph: names, dtypes, ranks
    and fixed sizes must be equal.

    Args:
        inputs, outputs: objects with name, type ("tensor(float)") and shape (sizes, names or None),
            as ONNX Runtime gives them.

    Raises:
        ValueError: an input or output differs; the message gives the first one.
    """
    past = [Value(state.past, state.dtype, state.axes) for state in manifest.states]
    present = [Value(state.present, state.dtype, present_axes(state)) for state in manifest.states]
    try:
        _compare("input", [*manifest.inputs, *manifest.encoder, *past], inputs)
        _compare("output", [*manifest.outputs, *present], outputs)
    except ValueError as error:
        raise ValueError(f"runtime: {graph_file(manifest)}: {error}; export again") from None


def _compare(what: str, described: Sequence[Value], declared: Sequence[Any]) -> None:
    """Compare the inputs or the outputs that a manifest describes with those that a graph
    declares.
    """
    there = {value.name: value for value in declared}
    for value in described:
        _expect(
            value.name in there, f"every {what} of the manifest in the graph", f"no {value.name}"
        )
        other = there.pop(value.name)
        dtype = TYPES.get(other.type, other.type)
        _expect(
            dtype == value.dtype,
            f"{what} {value.name} to be {value.dtype} as in the manifest",
            dtype,
        )
        sizes, wanted = (
            [axis if isinstance(axis, int) else "" for axis in axes]
            for axes in (other.shape, value.axes)
        )
        _expect(
            sizes == wanted,
            f"{what} {value.name} to be {list(value.axes)} as in the manifest",
            list(other.shape),
        )
    _expect(not there, f"every {what} of the graph in the manifest", f"no {next(iter(there), '')}")


def present_axes(state: State) -> Tuple[Axis, ...]:
    """Return the axes of a state's output `present`."""
    return tuple(T if axis == P else axis for axis in state.axes)


def _expect(holds: bool, rule: str, got: Any) -> None:
    if not holds:
        raise ValueError(f"expected {rule}, got {got}")


def _check_names(manifest: Manifest) -> None:
    names = Counter(
        value.name for value in (*manifest.inputs, *manifest.encoder, *manifest.outputs)
    )
    names.update(name for state in manifest.states for name in (state.past, state.present))
    twice = min((name for name, count in names.items() if count > 1), default="")
    _expect(not twice, "unique names of inputs, outputs and states", f"{twice} twice")


def _check_ends(manifest: Manifest) -> None:
    """Check that kind, first input, output and configuration describe the same model."""
    config, kind = manifest.config, manifest.kind
    _expect(
        config.get("kind") == kind, f"config.kind to be {kind} as kind", _short(config.get("kind"))
    )
    tokens: Any = config.get("tokens") if kind != "block" else {"vocabulary": 1, "segments": 0}
    _expect(isinstance(tokens, dict), "config.tokens to be an object", _short(tokens))
    most = config.get("max_positions")
    _expect(
        most == manifest.max_positions,
        f"config.max_positions to be {manifest.max_positions} as max_positions",
        _short(most),
    )
    for name, value, wanted in zip(
        ("inputs[0]", "outputs[0]"),
        (manifest.inputs[0], manifest.outputs[0]),
        _ends(manifest, tokens),
        strict=True,
    ):
        _expect(value == wanted, f"{name} of kind {kind} to be {_line(wanted)}", _line(value))
    _check_readout(manifest)
    for key, least in (
        (("vocabulary", 0 if _reads_features(manifest) else 1), ("segments", 0)) if tokens else ()
    ):
        number = tokens.get(key)
        _expect(
            type(number) is int and least <= number < 2**31,
            f"config.tokens.{key} to be a whole number of at least {least}",
            _short(number),
        )


def _ends(manifest: Manifest, tokens: Dict[str, Any]) -> Tuple[Value, Value]:
    """Return the first input and the output that a configuration requires."""
    of_module = "input_ids" if tokens else "hidden_states", "output"
    (source, output), first = ENDS.get(manifest.kind, of_module), manifest.inputs[0]
    key_values, width = manifest.config.get("key_values"), cast(int, manifest.config.get("width"))
    size: Any = {"decoder": tokens.get("vocabulary"), "module": manifest.config.get("outputs")}.get(
        manifest.kind, width
    )
    if manifest.kind == "encoder" and isinstance(key_values, dict):
        output, size = "encoder_key_values", key_values.get("size")
    for number in (size, width):
        _expect(
            type(number) is int,
            "whole numbers for the sizes of the model in config",
            _short(number),
        )
    selects = manifest.kind == "decoder" and manifest.input("logits_index") is not None
    last = Value(output, manifest.passed_dtype, (B, R if selects else S, size))
    if _reads_features(
        manifest
    ):  # the configuration does not give the number of features of a token
        known = len(first.axes) == 3 and isinstance(first.axes[2], int)
        _expect(
            known,
            f"inputs[0] to be input_features {manifest.passed_dtype} [{B},{S},features]",
            _line(first),
        )
        return Value("input_features", manifest.passed_dtype, (B, S, first.axes[2])), last
    return Value(source, "int64", (B, S)) if source == "input_ids" else Value(
        source, manifest.passed_dtype, (B, S, width)
    ), last


def _check_readout(manifest: Manifest) -> None:
    """Check that a second output belongs to an encoder whose configuration describes it."""
    readout: Any = manifest.config.get("readout")
    described = isinstance(readout, dict) and manifest.kind == "encoder" and not manifest.states
    _expect(
        described == (len(manifest.outputs) == 2),
        "a second output exactly for an encoder with config.readout",
        f"{len(manifest.outputs)} outputs",
    )
    for value in manifest.outputs[1:]:
        tokens: Tuple[Axis, ...] = () if readout.get("pooling") else (S,)
        right = (value.name, value.dtype, value.axes[:-1]) == (
            readout.get("output"),
            manifest.dtype,
            (B, *tokens),
        ) and isinstance(value.axes[-1], int)
        _expect(
            right,
            f"outputs[1] to be {_short(readout.get('output'))} {manifest.dtype} "
            f"{[B, *tokens, 'size']} as in config.readout",
            _line(value),
        )


def _reads_features(manifest: Manifest) -> bool:
    tokens = manifest.config.get("tokens")
    return (
        manifest.kind == "encoder"
        and isinstance(tokens, dict)
        and isinstance(tokens.get("features"), dict)
    )


def _line(value: Value) -> str:
    return f"{value.name} {value.dtype} {list(value.axes)}"


def _short(value: Any) -> str:
    return repr(value)[:60]


def _check_inputs(manifest: Manifest) -> None:
    feedable = after_tokens(manifest)
    for index, value in enumerate(manifest.inputs[1:], 1):
        _expect(
            value.name in feedable,
            f"inputs[{index}] to be one of {', '.join(feedable)}",
            value.name,
        )
        _expect(
            value in feedable[value.name],
            f"inputs[{index}] to be {' or '.join(map(_line, feedable[value.name]))}",
            _line(value),
        )
    if GRAPHS[manifest.target] != "model.onnx":  # torch programs take positional arguments
        wanted = ["token_type_ids"] if manifest.segments else []
        wanted += ["position_ids" if manifest.signature == "positions" else "attention_mask"]
        wanted += ["logits_index"] if manifest.input("logits_index") else []
        names = [value.name for value in manifest.inputs[1:]]
        _expect(
            names == wanted,
            f"inputs[1:] to be {', '.join(wanted)} for target {manifest.target}",
            ", ".join(names) or "none",
        )


def _check_encoder(manifest: Manifest) -> None:
    """Check that encoder inputs belong to a decoder and are a mask, then pairs of a key and a
    value of the same shape.
    """
    if not manifest.encoder:
        return
    rule = "encoder to belong to a decoder and to be a mask, then pairs of a key and a value"
    _expect(
        manifest.kind == "decoder" and len(manifest.encoder) % 2 == 1,
        rule,
        f"kind {manifest.kind} with {len(manifest.encoder)} inputs",
    )
    mask, *pairs = manifest.encoder
    (wanted,) = OF_ENCODER[ENCODER_MASK].values(ENCODER_MASK, manifest)
    _expect(mask == wanted, f"encoder[0] to be {_line(wanted)}", _line(mask))
    for index, value in enumerate(pairs):
        kind = ("key", "value")[index % 2]
        named = value.name.startswith("past_key_values.") and value.name.endswith(
            f".encoder.{kind}"
        )
        shaped = (
            value.dtype == manifest.passed_dtype
            and value.axes[::2] == (B, Q)
            and all(isinstance(size, int) for size in value.axes[1::2])
        )
        _expect(
            named and shaped,
            f"encoder[{index + 1}] to be past_key_values.N.encoder.{kind} "
            f"{manifest.passed_dtype} [{B},heads,{Q},head size]",
            _line(value),
        )
        _expect(
            value.axes == pairs[index - index % 2].axes,
            f"encoder[{index + 1}] to have the axes of its key",
            _line(value),
        )


def _check_state(where: str, state: State, manifest: Manifest) -> None:
    updates = ("append", "replace") if manifest.target in GROWING else ("in_place", "replace")
    _expect(
        state.update in updates,
        f"{where}.update to be {' or '.join(updates)} for target {manifest.target}",
        state.update,
    )
    slots = {"append": P, "in_place": M}.get(state.update)
    named = {index: axis for index, axis in enumerate(state.axes) if isinstance(axis, str)}
    rule = f"to have {slots} only at axis" if slots else "to have no other name, with axis 0"
    right = named == ({0: B} if slots is None else {0: B, state.axis: slots}) and (
        state.axis == 0
    ) == (slots is None)
    _expect(
        right,
        f"{where}.axes to start with {B} and {rule}",
        f"{list(state.axes)} with axis {state.axis}",
    )
    paired = any(_is_pair(state, past, present) for past, present in PAIRS)
    _expect(
        paired,
        f"{where} to have matching names past... and present...",
        f"{state.past} and {state.present}",
    )
    if not state.holds_positions:
        _expect(not state.fill, f"{where}.fill to be 0 except for past_positions", state.fill)
        return
    right = (state.dtype, len(state.axes), state.fill, manifest.signature) == (
        "int64",
        2,
        -1,
        "positions",
    ) and state is manifest.states[0]
    rule = (
        f"{where} past_positions to be the first state, int64 [{B},{slots}] filled with -1, with "
        "signature positions"
    )
    _expect(
        right,
        rule,
        f"{state.dtype} {list(state.axes)} filled with {state.fill}, signature "
        f"{manifest.signature}",
    )


def _is_pair(state: State, past: str, present: str) -> bool:
    if not past.endswith("."):
        return (state.past, state.present) == (past, present)
    return (
        len(state.past) > len(past)
        and state.past.startswith(past)
        and state.present == present + state.past[len(past) :]
    )


def _check_caches(manifest: Manifest) -> None:
    grows, target = manifest.target in GROWING, manifest.target
    _expect(
        manifest.layout == "columns" or not grows,
        f"layout to be columns for target {target}",
        "rows",
    )
    most = 0 if grows else 65536
    _expect(
        manifest.capacity_bucket <= most,
        f"capacity_bucket to be {'0' if grows else f'0 .. {most}'} for target {target}",
        manifest.capacity_bucket,
    )
    small = [state for state in manifest.states if state.dtype == "int8"]
    right = bool(small) == bool(manifest.cache) and (
        not small or (target, manifest.dtype) == ("ort", "float32")
    )
    got = (
        f"{len(small)} int8 states with cache {manifest.cache or manifest.dtype} for target "
        f"{target} in {manifest.dtype}"
    )
    _expect(right, "int8 states exactly with cache int8, for target ort in float32", got)
    for state in small:
        right = (
            state.in_place
            and state.past.startswith("past_key_values.")
            and state.past.endswith((".key", ".value"))
        )
        _expect(right, "int8 states to be in-place keys and values", state.past)
    for state in manifest.states:
        right = state.reads_hidden or (manifest.layout == "rows" and state.in_place)
        _expect(
            right,
            "reads_hidden to be false only for in-place states with layout rows",
            f"false for {state.past}",
        )


def _check_files(manifest: Manifest) -> None:
    graph, target, weights = GRAPHS[manifest.target], manifest.target, manifest.weights
    if weights is not None:
        right = graph == "model.onnx" and manifest.dtype == "float32"
        _expect(
            right,
            "model.onnx in float32 for weights of few bits",
            f"{weights.format} for target {target} in {manifest.dtype}",
        )
    matrices = weights.matrices if weights is not None and weights.format == "mixed" else 0
    _expect(
        len(manifest.formats) == matrices, f"formats of {matrices} weights", len(manifest.formats)
    )
    compiled = manifest.compiled is not None
    _expect(
        compiled == (target == "aotinductor"),
        "compiled exactly for target aotinductor",
        f"{'it' if compiled else 'none'} for target {target}",
    )
    _expect(
        "posenc.json" not in manifest.files,
        "files other than posenc.json itself in files",
        "posenc.json",
    )
    graphs = sorted(name for name in manifest.files if name in set(GRAPHS.values()))
    _expect(
        graphs == [graph],
        f"files to hold one graph, {graph} for target {target}",
        ", ".join(graphs) or "none",
    )
    for name, numbers in manifest.encodings.items():
        size = manifest.files[numbers.file].bytes if numbers.file in manifest.files else 0
        end = numbers.offset + numbers.bytes
        _expect(
            end <= size,
            f"encodings.{name} within the {size} bytes that files gives {numbers.file}",
            f"{end} bytes",
        )


def graph_file(manifest: Manifest) -> str:
    """Return the file name of the graph."""
    return GRAPHS[manifest.target]
