"""Check that the fields of a manifest agree with each other, its configuration and its graph."""

import re
from collections import Counter
from contextlib import contextmanager
from typing import Any, Iterator, Sequence

import msgspec

from posenc_export.runtime.artefact import graph_inputs
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS
from posenc_export.runtime.artefact.certificate import CHECKS, Proof
from posenc_export.runtime.artefact.graph_inputs import B, M, P, Q, R, S, T, W
from posenc_export.runtime.artefact.schema import TARGETS, Axis, Manifest, State, Value
from posenc_export.shared.refusal import expect

WEIGHTS = "model.onnx.data"  # external data of an ONNX graph: concatenated tensors
# Names of a state as input and output, each followed by the name of the state in its layer
PAIRS = {
    "past_positions": "present_positions",
    "past_embedding.": "present_embedding.",
    "past_key_values.": "present.",
}
TYPES = {f"tensor({name})": name for name in ("float16", "bfloat16", "int64", "int32", "int8")}
TYPES["tensor(float)"] = "float32"
OF_ENCODER = re.compile(r"past_key_values\.\d+\.encoder\.(key|value)")
# Names of the first output by kind
OUTPUTS = {
    "decoder": ["logits"],
    "encoder": [graph_inputs.HIDDEN],
    "block": ["output"],
    "module": ["output", "logits", graph_inputs.HIDDEN, graph_inputs.KEYS_AND_VALUES],
}


def one_of(where: str, got: Any, *allowed: Any) -> None:
    """Raise ValueError unless a field has one of some values."""
    expect(
        got in allowed, f"{where} to be {' or '.join(map(_text, allowed)) or 'none'}", _text(got)
    )


def _text(value: Any) -> str:
    if isinstance(value, Value):
        return f"{value.name} {value.dtype} {list(value.axes)}"
    return (value if isinstance(value, str) else repr(value))[:120]


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
            msgspec.convert(certificate, Proof)
            msgspec.convert(certificate.get("checks", {}), CHECKS)


@contextmanager
def named(file: str) -> Iterator[None]:
    """Say in a ValueError which file of an artefact it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"runtime: {file}: {error}; export again") from None


def check_graph(manifest: Manifest, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Compare a manifest with the inputs and outputs of a graph as ONNX Runtime gives them. Raise
    ValueError for other names, dtypes, ranks or sizes.
    """
    past = [Value(state.past, state.dtype, state.axes) for state in manifest.states]
    present = [Value(state.present, state.dtype, present_axes(state)) for state in manifest.states]
    with named(graph_file(manifest)):
        _compare("input", [*manifest.inputs, *manifest.encoder, *past], inputs)
        _compare("output", [*manifest.outputs, *present], outputs)


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


def present_axes(state: State) -> tuple[Axis, ...]:
    """Return the axes of a state's output `present`."""
    return tuple(T if axis == P else axis for axis in state.axes)


def _check_ends(manifest: Manifest) -> None:
    """Check that kind, first input, outputs and configuration describe the same model."""
    config, kind, passed = manifest.config, manifest.kind, manifest.passed_dtype
    one_of("config.kind", config.get("kind"), kind)
    one_of("config.max_positions", config.get("max_positions"), manifest.max_positions)
    tokens: Any = {} if kind == "block" else config.get("tokens")
    expect(isinstance(tokens, dict), "config.tokens to be an object", _text(tokens))
    sizes: dict[str, Any] = {"width": config.get("width")}
    if tokens or kind in ("decoder", "encoder"):
        sizes["tokens.vocabulary"] = tokens.get("vocabulary")
        sizes["tokens.segments"] = tokens.get("segments", 0)
    if kind == "module":
        sizes["outputs"] = config.get("outputs")
    for name, number in sizes.items():
        least = int(name == "tokens.vocabulary")
        rule = f"config.{name} to be a whole number of at least {least}"
        expect(type(number) is int and least <= number < 2**31, rule, repr(number)[:120])
    source: Any = Value("hidden_states", passed, (B, S, sizes["width"]))
    if "tokens.vocabulary" in sizes:
        source = Value("input_ids", "int64", (B, S))
    one_of("inputs[0]", manifest.inputs[0], source)
    size: Any = sizes[{"decoder": "tokens.vocabulary", "module": "outputs"}.get(kind, "width")]
    columns = R if manifest.decodes and manifest.input("logits_index") is not None else S
    outputs = [Value(name, passed, (B, columns, size)) for name in OUTPUTS[kind]]
    one_of("outputs[0]", manifest.outputs[0], *outputs)
    readout: Any = config.get("readout")
    described = isinstance(readout, dict) and manifest.encodes and not manifest.states
    rule = "a second output exactly for a model without caches, with config.readout"
    expect(described == (len(manifest.outputs) == 2), rule, f"{len(manifest.outputs)} outputs")
    for value in manifest.outputs[1:]:
        size = next((axis for axis in value.axes[1:] if isinstance(axis, int)), "size")
        one_of("outputs[1]", value, Value(str(readout.get("output")), manifest.dtype, (B, size)))


def _check_inputs(manifest: Manifest) -> None:
    inputs, names = graph_inputs.AFTER_TOKENS, []
    allowed = [name for name, row in inputs.items() if row.belongs(manifest)]
    for index, value in enumerate(manifest.inputs[1:], 1):
        one_of(f"inputs[{index}]", value.name, *allowed)
        one_of(f"inputs[{index}]", value, *inputs[value.name].values(value.name, manifest))
        names.append(value.name)
    if manifest.in_torch:
        wanted = ["token_type_ids"] if manifest.segments else []
        wanted += ["position_ids" if manifest.signature == "positions" else "attention_mask"]
        wanted += ["logits_index"] if manifest.input("logits_index") else []
        one_of(f"inputs[1:] for target {manifest.target}", names, wanted)


def _check_encoder(manifest: Manifest) -> None:
    """Check that encoder inputs are a mask, then keys and values."""
    if not manifest.encoder:
        return
    expect(manifest.decodes, "encoder to belong to a decoder", manifest.kind)
    mask, *others = manifest.encoder
    name, dtype = graph_inputs.ENCODER_MASK, manifest.passed_dtype
    one_of("encoder[0]", mask, *graph_inputs.OF_ENCODER[name].values(name, manifest))
    for value in others:
        sizes = [axis for axis in value.axes if type(axis) is int]  # heads and head size
        formed = value == Value(value.name, dtype, (B, *sizes[:1], Q, *sizes[1:]))
        rule = f"past_key_values.N.encoder.key or .value [{B},heads,{Q},head size] in encoder"
        named = OF_ENCODER.fullmatch(value.name) is not None
        expect(named and formed and len(sizes) == 2, rule, _text(value))


def _check_state(where: str, state: State, manifest: Manifest) -> None:
    graph = TARGETS[manifest.target]
    one_of(f"{where}.update", state.update, "append" if graph.grows else "in_place", "replace")
    of_window = state.window and not graph.compact
    slots = {"append": P, "in_place": W if of_window else M}.get(state.update)
    axes = {0: B} if slots is None else {0: B, state.axis: slots}
    named = {index: axis for index, axis in enumerate(state.axes) if isinstance(axis, str)}
    one_of(f"names of axes of {where} by index", named, axes)
    expect((state.axis == 0) == (slots is None), f"{where}.axis of {slots or 'none'}", state.axis)
    begins = [past for past in PAIRS if state.past.startswith(past)]
    expect(bool(begins), f"{where}.past to begin with {' or '.join(PAIRS)}", state.past)
    present = PAIRS[begins[0]] + state.past.removeprefix(begins[0])
    one_of(f"{where}.present", state.present, present)
    one_of(f"{where}.fill", state.fill, -1 if state.holds_positions else 0)
    if begins[0] == "past_positions":
        facts = state.past, state.dtype, len(state.axes), manifest.signature, where
        one_of(where, facts, ("past_positions", "int64", 2, "positions", "states[0]"))


def keys_and_values(manifest: Manifest) -> list[State]:
    """Return the states that are keys or values, written in place."""
    ends = (".key", ".value")
    named = [s for s in manifest.states if s.past.startswith("past_key_values.")]
    return [state for state in named if state.in_place and state.past.endswith(ends)]


def _check_caches(manifest: Manifest) -> None:
    target, graph, compact = manifest.target, TARGETS[manifest.target], not manifest.by_columns
    if graph.grows:
        one_of(f"layout for target {target}", manifest.layout, "columns")
    most = 0 if graph.grows else 65536
    rule = f"capacity_bucket of at most {most} for target {target}"
    expect(manifest.capacity_bucket <= most, rule, manifest.capacity_bucket)
    for name, format_ in CACHE_FORMATS.items():
        small = [s for s in manifest.states if s.dtype == name != manifest.dtype]
        allowed = target in format_.targets and manifest.dtype == "float32"
        holds = bool(small) == (manifest.cache == name) and (allowed or not small)
        where = f"for target {' or '.join(format_.targets)} in float32"
        got = f"{len(small)} {name} states with cache {manifest.cache or manifest.dtype}"
        got += f" for target {target} in {manifest.dtype}"
        expect(holds, f"{name} states exactly with cache {name}, {where}", got)
        others = [state.past for state in small if state not in keys_and_values(manifest)]
        expect(not others, f"{name} states to be in-place keys and values", ", ".join(others))
    windows = " or ".join(name for name, other in TARGETS.items() if other.windows)
    begins = graph.windows and manifest.input("window_start") is not None
    for state in manifest.states:
        own = state.in_place and compact
        rule = f"window only for in-place states of {windows} that begin at input window_start"
        expect(not state.window or (own and begins), rule, state.past)
        rule = "reads_hidden to be false only for in-place states with layout rows"
        expect(state.reads_hidden or own, rule, f"false for {state.past}")


def _check_files(manifest: Manifest) -> None:
    graph, target, weights = graph_file(manifest), manifest.target, manifest.weights
    if weights is not None:
        plain = manifest.dtype == "float32"
        got = f"{weights.format} for target {target} in {manifest.dtype}"
        holds = not manifest.in_torch and (plain or target == "ort-cuda")
        expect(holds, "model.onnx in float32 for weights of few bits", got)
        allowed = ("int8", "float32") if plain else (manifest.dtype,)
        one_of("weights.activations", weights.activations, *allowed)
    mixed = weights.matrices if weights is not None and weights.format == "mixed" else 0
    expect(len(manifest.formats) == mixed, f"formats of {mixed} weights", len(manifest.formats))
    reserved = {"posenc.json", *(other.file for other in TARGETS.values())}
    graphs = sorted(reserved & manifest.files.keys())
    one_of(f"graph and manifest among files for target {target}", graphs, [graph])


def graph_file(manifest: Manifest) -> str:
    return TARGETS[manifest.target].file
