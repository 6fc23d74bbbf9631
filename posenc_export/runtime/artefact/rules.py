"""Check that the fields of a manifest agree with each other, its configuration and its graph."""

from collections import Counter
from typing import Any, Dict, List, Sequence, Tuple, cast

import msgspec

from posenc_export.runtime.artefact import graph_inputs
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS
from posenc_export.runtime.artefact.certificate import Certificate
from posenc_export.runtime.artefact.graph_inputs import (
    HIDDEN,
    KEYS_AND_VALUES,
    B,
    M,
    P,
    Q,
    R,
    S,
    T,
    W,
)
from posenc_export.runtime.artefact.schema import GRAPHS, Axis, Manifest, State, Value

WEIGHTS = "model.onnx.data"  # external data of an ONNX graph: concatenated tensors
PAIRS = {"past_embedding.": "present_embedding.", "past_key_values.": "present."}  # of states
TYPES = {f"tensor({name})": name for name in ("float16", "bfloat16", "int64", "int32", "int8")}
TYPES["tensor(float)"] = "float32"


def expect(holds: bool, rule: str, got: Any) -> None:
    """Raise ValueError unless a rule holds."""
    if not holds:
        raise ValueError(f"expected {rule}, got {got}")


def line(value: Value) -> str:
    return f"{value.name} {value.dtype} {list(value.axes)}"


def short(value: Any) -> str:
    return repr(value)[:60]


def check(manifest: Manifest) -> None:
    """Raise ValueError with the first rule that fields of a manifest contradict."""
    values = (*manifest.inputs, *manifest.encoder, *manifest.outputs)
    names = Counter(value.name for value in values)
    names.update(name for state in manifest.states for name in (state.past, state.present))
    twice = min((name for name, count in names.items() if count > 1), default="")
    expect(not twice, "unique names of inputs, outputs and states", f"{twice} twice")
    _check_ends(manifest)
    _check_inputs(manifest)
    _check_encoder(manifest)
    for index, state in enumerate(manifest.states):
        _check_state(f"states[{index}]", state, manifest)
    _check_caches(manifest)
    _check_files(manifest)
    for certificate in (manifest.certificate, *manifest.proofs):
        if certificate is not None:
            msgspec.convert(certificate, Certificate)


def check_graph(manifest: Manifest, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Compare a manifest with the inputs and outputs of a graph as ONNX Runtime gives them. Raise
    ValueError for other names, dtypes, ranks or sizes.
    """
    past = [Value(state.past, state.dtype, state.axes) for state in manifest.states]
    present = [Value(state.present, state.dtype, present_axes(state)) for state in manifest.states]
    try:
        _compare("input", [*manifest.inputs, *manifest.encoder, *past], inputs)
        _compare("output", [*manifest.outputs, *present], outputs)
    except ValueError as error:
        raise ValueError(f"runtime: {graph_file(manifest)}: {error}; export again") from None


def _compare(what: str, described: Sequence[Value], declared: Sequence[Any]) -> None:
    graph = {value.name: value for value in declared}
    for value in described:
        name = f"{what} {value.name}"
        rule = f"every {what} of the manifest in the graph"
        expect(value.name in graph, rule, f"no {value.name}")
        other = graph.pop(value.name)
        dtype = TYPES.get(other.type, other.type)
        expect(dtype == value.dtype, f"{name} to be {value.dtype} as in the manifest", dtype)
        both = (other.shape, value.axes)
        sizes, wanted = ([axis if isinstance(axis, int) else "" for axis in axes] for axes in both)
        rule = f"{name} to be {list(value.axes)} as in the manifest"
        expect(sizes == wanted, rule, list(other.shape))
    expect(not graph, f"every {what} of the graph in the manifest", f"no {next(iter(graph), '')}")


def present_axes(state: State) -> Tuple[Axis, ...]:
    """Return the axes of a state's output `present`."""
    return tuple(T if axis == P else axis for axis in state.axes)


def _check_ends(manifest: Manifest) -> None:
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
        name, dtype = readout.get("output"), manifest.dtype
        facts = (value.name, value.dtype, value.axes[:-1], type(value.axes[-1]))
        rule = f"outputs[1] to be {short(name)} {dtype} {[B, 'size']} as in config.readout"
        expect(facts == (name, dtype, (B,), int), rule, line(value))


def _check_inputs(manifest: Manifest) -> None:
    allowed, target = graph_inputs.after_tokens(manifest), manifest.target
    for index, value in enumerate(manifest.inputs[1:], 1):
        where, forms = f"inputs[{index}] to be", allowed.get(value.name, [])
        expect(bool(forms), f"{where} one of {', '.join(allowed)}", value.name)
        expect(value in forms, f"{where} {' or '.join(map(line, forms))}", line(value))
    if manifest.in_torch:
        wanted = ["token_type_ids"] if manifest.segments else []
        wanted += ["position_ids" if manifest.signature == "positions" else "attention_mask"]
        wanted += ["logits_index"] if manifest.input("logits_index") else []
        names = [value.name for value in manifest.inputs[1:]]
        rule = f"inputs[1:] to be {', '.join(wanted)} for target {target}"
        expect(names == wanted, rule, ", ".join(names) or "none")


def _check_encoder(manifest: Manifest) -> None:
    """Check that encoder inputs are a mask, then pairs of a key and a value."""
    if not manifest.encoder:
        return
    name, dtype = graph_inputs.ENCODER_MASK, manifest.passed_dtype
    rule = "encoder to belong to a decoder and to be a mask, then pairs of a key and a value"
    holds = manifest.decodes and len(manifest.encoder) % 2 == 1
    expect(holds, rule, f"kind {manifest.kind} with {len(manifest.encoder)} inputs")
    mask, *pairs = manifest.encoder
    (wanted,) = graph_inputs.OF_ENCODER[name].values(name, manifest)
    expect(mask == wanted, f"encoder[0] to be {line(wanted)}", line(mask))
    for index, value in enumerate(pairs):
        where, part = f"encoder[{index + 1}] to", ("key", "value")[index % 2]
        holds = (
            value.name.startswith("past_key_values.")
            and value.name.endswith(f".encoder.{part}")
            and value.dtype == dtype
            and value.axes[::2] == (B, Q)
            and all(isinstance(size, int) for size in value.axes[1::2])
        )
        form = f"past_key_values.N.encoder.{part} {dtype} [{B},heads,{Q},head size]"
        expect(holds, f"{where} be {form}", line(value))
        key = pairs[index - index % 2]
        expect(value.axes == key.axes, f"{where} have the axes of its key", line(value))


def _check_state(where: str, state: State, manifest: Manifest) -> None:
    target, signature = manifest.target, manifest.signature
    updates = ("append", "replace") if GRAPHS[target].grows else ("in_place", "replace")
    rule = f"{where}.update to be {' or '.join(updates)} for target {target}"
    expect(state.update in updates, rule, state.update)
    of_window = state.window and not GRAPHS[target].compact
    slots = {"append": P, "in_place": W if of_window else M}.get(state.update)
    named = {index: axis for index, axis in enumerate(state.axes) if isinstance(axis, str)}
    rule = f"to have {slots} only at axis" if slots else "to have no other name, with axis 0"
    expect(
        named == ({0: B} if slots is None else {0: B, state.axis: slots})
        and (state.axis == 0) == (slots is None),
        f"{where}.axes to start with {B} and {rule}",
        f"{list(state.axes)} with axis {state.axis}",
    )
    rule = f"{where} to have matching names past... and present..."
    expect(_is_pair(state), rule, f"{state.past} and {state.present}")
    if not state.holds_positions:
        expect(not state.fill, f"{where}.fill to be 0 except for past_positions", state.fill)
        return
    facts = (state.dtype, len(state.axes), state.fill, signature)
    expect(
        facts == ("int64", 2, -1, "positions") and state is manifest.states[0],
        f"{where} past_positions to be the first state, int64 [{B},{slots}] filled with -1, with "
        "signature positions",
        f"{state.dtype} {list(state.axes)} filled with {state.fill}, signature {signature}",
    )


def _is_pair(state: State) -> bool:
    if state.holds_positions:
        return state.present == "present_positions"
    pairs = [(past, present) for past, present in PAIRS.items() if state.past.startswith(past)]
    ends = ((state.past.removeprefix(past), present) for past, present in pairs)
    return any(end and state.present == present + end for end, present in ends)


def keys_and_values(manifest: Manifest) -> List[State]:
    """Return the states that are keys or values, written in place."""
    ends = (".key", ".value")
    named = [s for s in manifest.states if s.past.startswith("past_key_values.")]
    return [state for state in named if state.in_place and state.past.endswith(ends)]


def _check_caches(manifest: Manifest) -> None:
    target, bucket, graph = manifest.target, manifest.capacity_bucket, GRAPHS[manifest.target]
    rule = f"layout to be columns for target {target}"
    expect(manifest.by_columns or not graph.grows, rule, "rows")
    limits, most = ("0", 0) if graph.grows else ("0 .. 65536", 65536)
    expect(bucket <= most, f"capacity_bucket to be {limits} for target {target}", bucket)
    for name, format_ in CACHE_FORMATS.items():
        small = [s for s in manifest.states if s.dtype == name != manifest.dtype]
        allowed = target in format_.targets and manifest.dtype == "float32"
        expect(
            bool(small) == (manifest.cache == name) and (allowed or not small),
            f"{name} states exactly with cache {name}, for target {' or '.join(format_.targets)} "
            "in float32",
            f"{len(small)} {name} states with cache {manifest.cache or manifest.dtype} for target "
            f"{target} in {manifest.dtype}",
        )
        others = [state.past for state in small if state not in keys_and_values(manifest)]
        expect(not others, f"{name} states to be in-place keys and values", ", ".join(others))
    windows = " or ".join(name for name, other in GRAPHS.items() if other.windows)
    rule = f"window only for in-place states of {windows} that begin at input window_start"
    for state in [state for state in manifest.states if state.window]:
        holds = graph.windows and state.in_place and not manifest.by_columns
        expect(holds and manifest.input("window_start") is not None, rule, state.past)
    rule = "reads_hidden to be false only for in-place states with layout rows"
    for state in manifest.states:
        holds = state.reads_hidden or (state.in_place and not manifest.by_columns)
        expect(holds, rule, f"false for {state.past}")


def _check_files(manifest: Manifest) -> None:
    graph, target, weights = graph_file(manifest), manifest.target, manifest.weights
    if weights is not None:
        plain = manifest.dtype == "float32"
        got = f"{weights.format} for target {target} in {manifest.dtype}"
        holds = not manifest.in_torch and (plain or target == "ort-cuda")
        expect(holds, "model.onnx in float32 for weights of few bits", got)
        rule = f"activations of products in {'int8 or float32' if plain else manifest.dtype}"
        allowed = ("int8", "float32") if plain else (manifest.dtype,)
        expect(weights.activations in allowed, rule, weights.activations)
    mixed = weights.matrices if weights is not None and weights.format == "mixed" else 0
    expect(len(manifest.formats) == mixed, f"formats of {mixed} weights", len(manifest.formats))
    rule = "files other than posenc.json itself in files"
    expect("posenc.json" not in manifest.files, rule, "posenc.json")
    graphs = sorted({other.file for other in GRAPHS.values()}.intersection(manifest.files))
    rule = f"files to hold one graph, {graph} for target {target}"
    expect(graphs == [graph], rule, ", ".join(graphs) or "none")


def graph_file(manifest: Manifest) -> str:
    return GRAPHS[manifest.target].file
