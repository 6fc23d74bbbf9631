"""What ties the fields of a manifest to each other and to the graph: the rules that types and ranges cannot say."""

from typing import Any, Dict, List, NoReturn, Sequence, Tuple, cast

import msgspec

from posenc_export.runtime.schema import Axis, Certificate, Manifest, State, Value

B, S, P, T, M = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length", "capacity"
Q, R = "encoder_sequence_length", "logits_count"
ENDS = {"decoder": ("input_ids", "logits"), "encoder": ("input_ids", "last_hidden_state"), "block": ("hidden_states", "output")}
GRAPHS = {"onnx": "model.onnx", "onnx-static": "model.onnx", "ort": "model.onnx", "ort-cuda": "model.onnx", "torchscript": "model.pt", "pt2": "model.pt2"}
WEIGHTS = "model.onnx.data"  # beside an ONNX graph: tensors, one behind the other
GROWING = ("onnx",)
PAIRS = (("past_positions", "present_positions"), ("past_embedding.", "present_embedding."), ("past_key_values.", "present."))
TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64", "tensor(int32)": "int32"}


def check(manifest: Manifest) -> None:
    """Refuse a manifest whose fields contradict each other.

    Raises:
        ValueError: the first rule that does not hold.
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
    """Compare a manifest with what a loaded ONNX graph declares: names, dtypes, ranks and fixed sizes, nothing more and nothing less.

    Args:
        inputs, outputs: with name, type ("tensor(float)") and shape (sizes, names, None), as ONNX Runtime gives them.

    Raises:
        ValueError: the first that differs.
    """
    try:
        _compare_all(manifest, inputs, outputs)
    except ValueError as error:
        raise ValueError(f"runtime: {graph_file(manifest)}: {error}; export again") from None


def _compare_all(manifest: Manifest, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    past = [Value(state.past, state.dtype, state.axes) for state in manifest.states]
    present = [Value(state.present, state.dtype, grown(state)) for state in manifest.states]
    for what, described, declared in (("input", [*manifest.inputs, *manifest.encoder, *past], inputs), ("output", [*manifest.outputs, *present], outputs)):
        there = {value.name: value for value in declared}
        for value in described:
            if value.name not in there:
                _refuse(f"every {what} of the manifest is one of the graph", value.name)
            _compare(what, value, there.pop(value.name))
        if there:
            _refuse(f"every {what} of the graph is in the manifest", next(iter(there)))


def _compare(what: str, value: Value, declared: Any) -> None:
    found = TYPES.get(declared.type, declared.type)
    if found != value.dtype:
        _refuse(f"{what} {value.name} is {value.dtype} as in the manifest", found)
    sizes = [size if isinstance(size, int) else "" for size in declared.shape]
    if sizes != [axis if isinstance(axis, int) else "" for axis in value.axes]:
        _refuse(f"{what} {value.name} is {list(value.axes)} as in the manifest", list(declared.shape))


def grown(state: State) -> Tuple[Axis, ...]:
    """Axes of the output that becomes a state."""
    return tuple(T if axis == P else axis for axis in state.axes)


def _refuse(rule: str, found: Any) -> NoReturn:
    raise ValueError(f"{rule}, got {found}")


def _check_names(manifest: Manifest) -> None:
    names = [value.name for value in (*manifest.inputs, *manifest.encoder, *manifest.outputs)]
    names += [name for state in manifest.states for name in (state.past, state.present)]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        _refuse("every input, output and state has a name of its own", f"{twice[0]} twice")


def _check_ends(manifest: Manifest) -> None:
    """Kind, first input, output and configuration tell the same model."""
    config = manifest.config
    if config.get("kind") != manifest.kind:
        _refuse(f"config.kind is {manifest.kind} as kind", repr(config.get("kind"))[:60])
    tokens = config.get("tokens") if manifest.kind != "block" else {"vocabulary": 1, "segments": 0}
    if not isinstance(tokens, dict):
        _refuse("config has the description of tokens", repr(tokens)[:60])
    if config.get("max_positions") != manifest.max_positions:
        _refuse(f"max_positions is {manifest.max_positions} in config as well", repr(config.get("max_positions"))[:60])
    wanted, given = _ends(manifest, tokens)
    for name, found, described in (("inputs[0]", manifest.inputs[0], wanted), ("outputs[0]", manifest.outputs[0], given)):
        if found != described:
            _refuse(f"{name} of kind {manifest.kind} is {_line(described)}", _line(found))
    for key, least in (("vocabulary", 0 if _reads_features(manifest) else 1), ("segments", 0)) if tokens else ():
        number = tokens.get(key)
        if type(number) is not int or not least <= number < 2**31:
            _refuse(f"config.tokens.{key} is a whole number of at least {least}", repr(number)[:60])


def _ends(manifest: Manifest, tokens: Dict[str, Any]) -> Tuple[Value, Value]:
    """The first input and the output that a configuration asks for."""
    of_module = "input_ids" if tokens else "hidden_states", "output"
    (source, output), first = ENDS.get(manifest.kind, of_module), manifest.inputs[0]
    key_values, width = manifest.config.get("key_values"), cast(int, manifest.config.get("width"))
    size: Any = {"decoder": tokens.get("vocabulary"), "module": manifest.config.get("outputs")}.get(manifest.kind, width)
    if manifest.kind == "encoder" and isinstance(key_values, dict):
        output, size = "encoder_key_values", key_values.get("size")
    for number in (size, width):
        if type(number) is not int:
            _refuse("config has the sizes of the model as whole numbers", repr(number)[:60])
    of_chosen = manifest.kind == "decoder" and manifest.input("logits_index") is not None
    given = Value(output, manifest.dtype, (B, R if of_chosen else S, size))
    if _reads_features(manifest):  # how many numbers a token has is up to the part that reads them
        if len(first.axes) != 3 or not isinstance(first.axes[2], int):
            _refuse(f"inputs[0] is input_features {manifest.dtype} [{B},{S},numbers of a token]", _line(first))
        return Value("input_features", manifest.dtype, (B, S, first.axes[2])), given
    return Value(source, "int64", (B, S)) if source == "input_ids" else Value(source, manifest.dtype, (B, S, width)), given


def _reads_features(manifest: Manifest) -> bool:
    tokens = manifest.config.get("tokens")
    return manifest.kind == "encoder" and isinstance(tokens, dict) and isinstance(tokens.get("features"), dict)


def _line(value: Value) -> str:
    return f"{value.name} {value.dtype} {list(value.axes)}"


def _feedable(manifest: Manifest) -> Dict[str, List[Value]]:
    """The inputs beside the first that the runtime can make, by name, each in the forms it may have."""
    ids = (1 + manifest.axes, B, S) if manifest.axes else (B, S)
    values = [Value("token_type_ids", "int64", (B, S))] if manifest.segments else []
    values += [Value("cache_position", "int64", (B, S)), Value("first_position", "int64", (B, 1))]
    values += [Value("seqlens_k", "int32", (B,)), Value("total_sequence_length", "int32", ())]
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
            _refuse(f"inputs[{index}] is one the runtime can make: {', '.join(feedable)}", value.name)
        if value not in feedable[value.name]:
            _refuse(f"inputs[{index}] is {' or '.join(map(_line, feedable[value.name]))}", _line(value))
    if GRAPHS[manifest.target] != "model.onnx":  # called by position
        types = ["token_type_ids"] if manifest.segments else []
        wanted = [*types, "position_ids" if manifest.signature == "positions" else "attention_mask"]
        wanted += ["logits_index"] if manifest.input("logits_index") else []
        found = [value.name for value in manifest.inputs[1:]]
        if found != wanted:
            _refuse(f"inputs behind the first are {', '.join(wanted)} for target {manifest.target}", ", ".join(found) or "none")


def _check_encoder(manifest: Manifest) -> None:
    """A mask, then keys and values in pairs of one shape, of a decoder."""
    if not manifest.encoder:
        return
    if manifest.kind != "decoder" or len(manifest.encoder) % 2 == 0:
        _refuse("encoder belongs to a decoder and has a mask, then keys and values in pairs", f"kind {manifest.kind} with {len(manifest.encoder)}")
    mask, *pairs = manifest.encoder
    if mask != Value("encoder_attention_mask", "int64", (B, Q)):
        _refuse(f"encoder[0] is {_line(Value('encoder_attention_mask', 'int64', (B, Q)))}", _line(mask))
    for index, value in enumerate(pairs):
        kind, sizes = ("key", "value")[index % 2], value.axes[1::2]
        named = value.name.startswith("past_key_values.") and value.name.endswith(f".encoder.{kind}")
        if not named or value.dtype != manifest.dtype or value.axes[::2] != (B, Q) or not all(isinstance(size, int) for size in sizes):
            _refuse(f"encoder[{index + 1}] is past_key_values.N.encoder.{kind} {manifest.dtype} [{B},heads,{Q},head size]", _line(value))
        if value.axes != pairs[index - index % 2].axes:
            _refuse(f"encoder[{index + 1}] has the axes of its key", _line(value))


def _check_state(where: str, state: State, manifest: Manifest) -> None:
    updates = ("append", "replace") if manifest.target in GROWING else ("in_place", "replace")
    if state.update not in updates:
        _refuse(f"{where}.update is {' or '.join(updates)} for target {manifest.target}", state.update)
    slots = {"append": P, "in_place": M}.get(state.update)
    named = {index: axis for index, axis in enumerate(state.axes) if isinstance(axis, str)}
    if named != ({0: B} if slots is None else {0: B, state.axis: slots}) or (state.axis == 0) != (slots is None):
        rule = f"{slots} at axis alone" if slots else "no other name, and axis is 0"
        _refuse(f"{where}.axes start with {B} and have {rule}", f"{list(state.axes)} with axis {state.axis}")
    if not any(_is_pair(state, past, present) for past, present in PAIRS):
        _refuse(f"{where} is named past... and present... of the same thing", f"{state.past} and {state.present}")
    if state.past == "past_positions":
        if (state.dtype, len(state.axes), state.fill, manifest.signature) != ("int64", 2, -1, "positions") or state is not manifest.states[0]:
            found = f"{state.dtype} {list(state.axes)} filled with {state.fill}"
            _refuse(f"{where} past_positions comes first, is int64 [{B},{slots}] filled with -1, and the signature is positions", found)
    elif state.fill:
        _refuse(f"{where}.fill is 0 but for past_positions", state.fill)


def _is_pair(state: State, past: str, present: str) -> bool:
    if not past.endswith("."):
        return (state.past, state.present) == (past, present)
    return len(state.past) > len(past) and state.past.startswith(past) and state.present == present + state.past[len(past) :]


def _check_caches(manifest: Manifest) -> None:
    in_place = [state for state in manifest.states if state.update == "in_place"]
    if manifest.layout == "rows" and manifest.target in GROWING:
        _refuse(f"layout is columns for target {manifest.target}", "rows")
    if manifest.capacity_bucket > (65536 if manifest.target not in GROWING else 0):
        _refuse(f"capacity_bucket is {'0 .. 65536' if manifest.target not in GROWING else '0'} for target {manifest.target}", manifest.capacity_bucket)
    for state in manifest.states:
        if not state.reads_hidden and (manifest.layout != "rows" or state not in in_place):
            _refuse("reads_hidden is false only for states in place with layout rows", f"false for {state.past}")


def _check_files(manifest: Manifest) -> None:
    graph = GRAPHS[manifest.target]
    if manifest.weights is not None and (graph != "model.onnx" or manifest.dtype != "float32"):
        _refuse("weights of few bits belong to model.onnx in float32", f"{manifest.weights.format} for target {manifest.target} in {manifest.dtype}")
    if "posenc.json" in manifest.files:
        _refuse("files are those beside posenc.json", "posenc.json")
    graphs = sorted(name for name in manifest.files if name in set(GRAPHS.values()))
    if graphs != [graph]:
        _refuse(f"files hold one graph, {graph} for target {manifest.target}", ", ".join(graphs) or "none")


def graph_file(manifest: Manifest) -> str:
    """Name of the graph's file."""
    return GRAPHS[manifest.target]
