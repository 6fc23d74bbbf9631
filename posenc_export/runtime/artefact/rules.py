"""Check that the fields of a manifest agree with each other and with the graph. Types and ranges of single fields are checked by schema.py."""

from typing import Any, Dict, List, NoReturn, Sequence, Tuple, cast

import msgspec

from posenc_export.runtime.artefact.certificate import Certificate
from posenc_export.runtime.artefact.schema import Axis, Manifest, State, Value

B, S, P, T, M = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length", "capacity"
Q, R = "encoder_sequence_length", "logits_count"
ENDS = {"decoder": ("input_ids", "logits"), "encoder": ("input_ids", "last_hidden_state"), "block": ("hidden_states", "output")}
GRAPHS = {
    **dict.fromkeys(("onnx", "onnx-static", "ort", "ort-cuda"), "model.onnx"),
    "torchscript": "model.pt",
    "pt2": "model.pt2",
    "aotinductor": "model.native.pt2",
}
WEIGHTS = "model.onnx.data"  # external data of an ONNX graph: concatenated tensors
GROWING = ("onnx",)
PAIRS = (("past_positions", "present_positions"), ("past_embedding.", "present_embedding."), ("past_key_values.", "present."))
TYPES = {"tensor(float)": "float32", **{f"tensor({name})": name for name in ("float16", "bfloat16", "int64", "int32", "int8")}}


def check(manifest: Manifest) -> None:
    """Check that the fields of a manifest do not contradict each other.

    Raises:
        ValueError: a rule does not hold; the message gives the first one.
    """
    _check_names(manifest)
    _check_ends(manifest)
    _check_inputs(manifest)
    _check_encoder(manifest)
    for index, state in enumerate(manifest.states):
        _check_state(f"states[{index}]", state, manifest)
    _check_caches(manifest)
    _check_files(manifest)
    for certificate in (*([] if manifest.certificate is None else [manifest.certificate]), *manifest.proofs):
        msgspec.convert(certificate, Certificate)


def check_graph(manifest: Manifest, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Compare a manifest with the inputs and outputs of a loaded ONNX graph: names, dtypes, ranks and fixed sizes must be equal.

    Args:
        inputs, outputs: objects with name, type ("tensor(float)") and shape (sizes, names or None), as ONNX Runtime gives them.

    Raises:
        ValueError: an input or output differs; the message gives the first one.
    """
    try:
        _compare_all(manifest, inputs, outputs)
    except ValueError as error:
        raise ValueError(f"runtime: {graph_file(manifest)}: {error}; export again") from None


def _compare_all(manifest: Manifest, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    past = [Value(state.past, state.dtype, state.axes) for state in manifest.states]
    present = [Value(state.present, state.dtype, present_axes(state)) for state in manifest.states]
    for what, described, declared in (("input", [*manifest.inputs, *manifest.encoder, *past], inputs), ("output", [*manifest.outputs, *present], outputs)):
        there = {value.name: value for value in declared}
        for value in described:
            if value.name not in there:
                _refuse(f"every {what} of the manifest in the graph", f"no {value.name}")
            _compare(what, value, there.pop(value.name))
        if there:
            _refuse(f"every {what} of the graph in the manifest", f"no {next(iter(there))}")


def _compare(what: str, value: Value, declared: Any) -> None:
    found = TYPES.get(declared.type, declared.type)
    if found != value.dtype:
        _refuse(f"{what} {value.name} to be {value.dtype} as in the manifest", found)
    sizes = [size if isinstance(size, int) else "" for size in declared.shape]
    if sizes != [axis if isinstance(axis, int) else "" for axis in value.axes]:
        _refuse(f"{what} {value.name} to be {list(value.axes)} as in the manifest", list(declared.shape))


def present_axes(state: State) -> Tuple[Axis, ...]:
    """Return the axes of a state's output `present`."""
    return tuple(T if axis == P else axis for axis in state.axes)


def _refuse(rule: str, found: Any) -> NoReturn:
    raise ValueError(f"expected {rule}, got {found}")


def _check_names(manifest: Manifest) -> None:
    names = [value.name for value in (*manifest.inputs, *manifest.encoder, *manifest.outputs)]
    names += [name for state in manifest.states for name in (state.past, state.present)]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        _refuse("unique names of inputs, outputs and states", f"{twice[0]} twice")


def _check_ends(manifest: Manifest) -> None:
    """Check that kind, first input, output and configuration describe the same model."""
    config = manifest.config
    if config.get("kind") != manifest.kind:
        _refuse(f"config.kind to be {manifest.kind} as kind", repr(config.get("kind"))[:60])
    tokens = config.get("tokens") if manifest.kind != "block" else {"vocabulary": 1, "segments": 0}
    if not isinstance(tokens, dict):
        _refuse("config.tokens to be an object", repr(tokens)[:60])
    if config.get("max_positions") != manifest.max_positions:
        _refuse(f"config.max_positions to be {manifest.max_positions} as max_positions", repr(config.get("max_positions"))[:60])
    wanted, given = _ends(manifest, tokens)
    for name, found, described in (("inputs[0]", manifest.inputs[0], wanted), ("outputs[0]", manifest.outputs[0], given)):
        if found != described:
            _refuse(f"{name} of kind {manifest.kind} to be {_line(described)}", _line(found))
    for key, least in (("vocabulary", 0 if _reads_features(manifest) else 1), ("segments", 0)) if tokens else ():
        number = tokens.get(key)
        if type(number) is not int or not least <= number < 2**31:
            _refuse(f"config.tokens.{key} to be a whole number of at least {least}", repr(number)[:60])


def _ends(manifest: Manifest, tokens: Dict[str, Any]) -> Tuple[Value, Value]:
    """Return the first input and the output that a configuration requires."""
    of_module = "input_ids" if tokens else "hidden_states", "output"
    (source, output), first = ENDS.get(manifest.kind, of_module), manifest.inputs[0]
    key_values, width = manifest.config.get("key_values"), cast(int, manifest.config.get("width"))
    size: Any = {"decoder": tokens.get("vocabulary"), "module": manifest.config.get("outputs")}.get(manifest.kind, width)
    if manifest.kind == "encoder" and isinstance(key_values, dict):
        output, size = "encoder_key_values", key_values.get("size")
    for number in (size, width):
        if type(number) is not int:
            _refuse("whole numbers for the sizes of the model in config", repr(number)[:60])
    of_chosen = manifest.kind == "decoder" and manifest.input("logits_index") is not None
    given = Value(output, manifest.passed_dtype, (B, R if of_chosen else S, size))
    if _reads_features(manifest):  # the configuration does not give the number of features of a token
        if len(first.axes) != 3 or not isinstance(first.axes[2], int):
            _refuse(f"inputs[0] to be input_features {manifest.passed_dtype} [{B},{S},features]", _line(first))
        return Value("input_features", manifest.passed_dtype, (B, S, first.axes[2])), given
    return Value(source, "int64", (B, S)) if source == "input_ids" else Value(source, manifest.passed_dtype, (B, S, width)), given


def _reads_features(manifest: Manifest) -> bool:
    tokens = manifest.config.get("tokens")
    return manifest.kind == "encoder" and isinstance(tokens, dict) and isinstance(tokens.get("features"), dict)


def _line(value: Value) -> str:
    return f"{value.name} {value.dtype} {list(value.axes)}"


def _feedable(manifest: Manifest) -> Dict[str, List[Value]]:
    """Return the inputs after the first that the runtime can build, by name, each with its allowed forms."""
    ids = (1 + manifest.axes, B, S) if manifest.axes else (B, S)
    values = [Value("token_type_ids", "int64", (B, S))] if manifest.segments else []
    values += [Value("cache_position", "int64", (B, S)), Value("first_position", "int64", (B, 1))]
    values += [Value("seqlens_k", "int32", (B,)), Value("total_sequence_length", "int32", ())]
    values += [Value("slots", "int64", (T,))] if manifest.target == "ort-cuda" else []
    if manifest.signature == "positions":
        values.append(Value("position_ids", "int64", ids))
        values += [Value("logits_index", "int64", (B, R))] if manifest.kind == "decoder" else []
    found = {value.name: [value] for value in values}
    if manifest.signature == "mask":
        found["attention_mask"] = [Value("attention_mask", "int64", (B, axis)) for axis in (T, S)]
    return found


def _check_inputs(manifest: Manifest) -> None:
    feedable = _feedable(manifest)
    for index, value in enumerate(manifest.inputs[1:], 1):
        if value.name not in feedable:
            _refuse(f"inputs[{index}] to be one of {', '.join(feedable)}", value.name)
        if value not in feedable[value.name]:
            _refuse(f"inputs[{index}] to be {' or '.join(map(_line, feedable[value.name]))}", _line(value))
    if GRAPHS[manifest.target] != "model.onnx":  # torch programs take positional arguments
        types = ["token_type_ids"] if manifest.segments else []
        wanted = [*types, "position_ids" if manifest.signature == "positions" else "attention_mask"]
        wanted += ["logits_index"] if manifest.input("logits_index") else []
        found = [value.name for value in manifest.inputs[1:]]
        if found != wanted:
            _refuse(f"inputs[1:] to be {', '.join(wanted)} for target {manifest.target}", ", ".join(found) or "none")


def _check_encoder(manifest: Manifest) -> None:
    """Check that encoder inputs belong to a decoder and are a mask, then pairs of a key and a value of the same shape."""
    if not manifest.encoder:
        return
    if manifest.kind != "decoder" or len(manifest.encoder) % 2 == 0:
        _refuse("encoder to belong to a decoder and to be a mask, then pairs of a key and a value", f"kind {manifest.kind} with {len(manifest.encoder)} inputs")
    mask, *pairs = manifest.encoder
    if mask != Value("encoder_attention_mask", "int64", (B, Q)):
        _refuse(f"encoder[0] to be {_line(Value('encoder_attention_mask', 'int64', (B, Q)))}", _line(mask))
    for index, value in enumerate(pairs):
        kind, sizes = ("key", "value")[index % 2], value.axes[1::2]
        named = value.name.startswith("past_key_values.") and value.name.endswith(f".encoder.{kind}")
        if not named or value.dtype != manifest.passed_dtype or value.axes[::2] != (B, Q) or not all(isinstance(size, int) for size in sizes):
            _refuse(f"encoder[{index + 1}] to be past_key_values.N.encoder.{kind} {manifest.passed_dtype} [{B},heads,{Q},head size]", _line(value))
        if value.axes != pairs[index - index % 2].axes:
            _refuse(f"encoder[{index + 1}] to have the axes of its key", _line(value))


def _check_state(where: str, state: State, manifest: Manifest) -> None:
    updates = ("append", "replace") if manifest.target in GROWING else ("in_place", "replace")
    if state.update not in updates:
        _refuse(f"{where}.update to be {' or '.join(updates)} for target {manifest.target}", state.update)
    slots = {"append": P, "in_place": M}.get(state.update)
    named = {index: axis for index, axis in enumerate(state.axes) if isinstance(axis, str)}
    if named != ({0: B} if slots is None else {0: B, state.axis: slots}) or (state.axis == 0) != (slots is None):
        rule = f"to have {slots} only at axis" if slots else "to have no other name, with axis 0"
        _refuse(f"{where}.axes to start with {B} and {rule}", f"{list(state.axes)} with axis {state.axis}")
    if not any(_is_pair(state, past, present) for past, present in PAIRS):
        _refuse(f"{where} to have matching names past... and present...", f"{state.past} and {state.present}")
    if state.past == "past_positions":
        if (state.dtype, len(state.axes), state.fill, manifest.signature) != ("int64", 2, -1, "positions") or state is not manifest.states[0]:
            found = f"{state.dtype} {list(state.axes)} filled with {state.fill}"
            found += f", signature {manifest.signature}"
            _refuse(f"{where} past_positions to be the first state, int64 [{B},{slots}] filled with -1, with signature positions", found)
    elif state.fill:
        _refuse(f"{where}.fill to be 0 except for past_positions", state.fill)


def _is_pair(state: State, past: str, present: str) -> bool:
    if not past.endswith("."):
        return (state.past, state.present) == (past, present)
    return len(state.past) > len(past) and state.past.startswith(past) and state.present == present + state.past[len(past) :]


def _check_caches(manifest: Manifest) -> None:
    in_place = [state for state in manifest.states if state.update == "in_place"]
    if manifest.layout == "rows" and manifest.target in GROWING:
        _refuse(f"layout to be columns for target {manifest.target}", "rows")
    if manifest.capacity_bucket > (65536 if manifest.target not in GROWING else 0):
        _refuse(f"capacity_bucket to be {'0 .. 65536' if manifest.target not in GROWING else '0'} for target {manifest.target}", manifest.capacity_bucket)
    small = [state for state in manifest.states if state.dtype == "int8"]
    if bool(small) != bool(manifest.cache) or (small and (manifest.target, manifest.dtype) != ("ort", "float32")):
        found = f"{len(small)} int8 states with cache {manifest.cache or manifest.dtype} for target {manifest.target} in {manifest.dtype}"
        _refuse("int8 states exactly with cache int8, for target ort in float32", found)
    for state in small:
        if state not in in_place or not state.past.startswith("past_key_values.") or not state.past.endswith((".key", ".value")):
            _refuse("int8 states to be in-place keys and values", state.past)
    for state in manifest.states:
        if not state.reads_hidden and (manifest.layout != "rows" or state not in in_place):
            _refuse("reads_hidden to be false only for in-place states with layout rows", f"false for {state.past}")


def _check_files(manifest: Manifest) -> None:
    graph = GRAPHS[manifest.target]
    if manifest.weights is not None and (graph != "model.onnx" or manifest.dtype != "float32"):
        _refuse("model.onnx in float32 for weights of few bits", f"{manifest.weights.format} for target {manifest.target} in {manifest.dtype}")
    if (manifest.compiled is not None) != (manifest.target == "aotinductor"):
        _refuse("compiled exactly for target aotinductor", f"{'none' if manifest.compiled is None else 'it'} for target {manifest.target}")
    if "posenc.json" in manifest.files:
        _refuse("files other than posenc.json itself in files", "posenc.json")
    graphs = sorted(name for name in manifest.files if name in set(GRAPHS.values()))
    if graphs != [graph]:
        _refuse(f"files to hold one graph, {graph} for target {manifest.target}", ", ".join(graphs) or "none")


def graph_file(manifest: Manifest) -> str:
    """Return the file name of the graph."""
    return GRAPHS[manifest.target]
