"""The check "indices": no fault in slots, positions, tables' indices or masks stays hidden, and
no honest artefact is refused.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, cast

import numpy as np
import onnx
import pytest
import z3
from msgspec.structs import replace
from onnx import TensorProto, helper, numpy_helper

from posenc_export.commands.cli import main
from posenc_export.export import ReadAs, Sources, export
from posenc_export.export.read_module import as_model
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.records import Places
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.verification import checks, described
from posenc_export.runtime.verification.claims import OPEN
from tests.cases import combinations
from tests.reading import own_modules
from tests.tiny import VARIANTS, attending, block, decoder, encoder
from tests.traces import exported, sources

WINDOW, CHUNK = {"name": "window", "size": 9}, {"name": "chunk", "size": 12}
MASKS: dict[str, Any] = {"causal": {"name": "causal"}, "window": WINDOW, "chunk": CHUNK}
LONG = 540  # positions for which caches of windows are shorter
pytestmark = pytest.mark.xdist_group("indices")


def written(
    folder: Path,
    variant: str,
    target: str,
    mask: str = "causal",
    signature: str = "positions",
    most: int = 350,
) -> Path:
    config = attending(decoder(variant, max_positions=most), sees=MASKS[mask])
    path = folder / "artefact"
    exported(path, config, target, signature=signature)
    return path


def checked(path: Path) -> Any:
    return checks.indices(path, load(path, threads=1))


@pytest.mark.parametrize(
    ("variant", "target", "mask", "signature"),
    combinations(
        ["rope", "alibi", "t5", "shaw"],
        ["onnx", "onnx-static", "ort"],
        list(MASKS),
        ["positions", "mask"],
        besides=[  # every mask on every target, of models that the targets share
            (variant, target, mask, signature)
            for variant, mask, signature in (
                ("shaw", "causal", "mask"),
                ("alibi", "window", "positions"),
                ("t5", "chunk", "mask"),
            )
            for target in ("onnx", "onnx-static", "ort")
        ],
    ),
)
def test_no_honest_decoder_is_refused(
    variant: str, target: str, mask: str, signature: str, tmp_path: Path
) -> None:
    assert checked(written(tmp_path, variant, target, mask, signature)).failures == {}


@pytest.mark.parametrize("mask", ["window", "chunk"])
def test_masks_of_caches_of_windows_are_compared(mask: str, tmp_path: Path) -> None:
    path = written(tmp_path, "rope", "onnx-static", mask, most=LONG)
    assert all(state.window for state in manifests.read(path).states[1:])
    result = checked(path)
    assert result.failures == {}
    assert not any(
        "Attention input" in place or "TensorScatter" in place for place in result.skipped
    )


@pytest.mark.parametrize(
    ("target", "sees"),
    combinations(["ort", "onnx"], [{"name": "both"}, {"name": "near", "reach": 4}]),
)
def test_no_honest_encoder_is_refused(sees: dict[str, Any], target: str, tmp_path: Path) -> None:
    exported(tmp_path / "a", attending(encoder("t5"), sees=sees), target)
    assert checked(tmp_path / "a").failures == {}


def test_a_table_of_rows_by_distance_may_reach_beyond_the_positions(tmp_path: Path) -> None:
    config = decoder("wavlm", max_positions=40)
    export(sources(config), "ort-native", tmp_path / "a", verify="quick")


def test_a_decoder_that_refuses_gaps_in_masks_is_not_refused(tmp_path: Path) -> None:
    assert checked(written(tmp_path, "dual_chunk", "onnx", "window", "mask")).failures == {}


def of_layers(config: Any, *encodings: Any) -> Any:
    """Return a description with a layer for each encoding, or each tuple of several."""
    kind = config.kinds[0]
    several = [each if isinstance(each, tuple) else (each,) for each in encodings]
    attentions = [replace(kind.attention, encodings=each) for each in several]
    layers = {str(n): replace(kind, attention=of) for n, of in enumerate(attentions)}
    return replace(config, layers=layers, order=tuple(layers))


def beside(config: Any, encoding: Any) -> Any:
    """Return a description with another encoding of tokens behind its own."""
    encodings = (*config.tokens.encodings, encoding)
    return replace(config, tokens=replace(config.tokens, encodings=encodings))


NEAR, FAR = VARIANTS["t5-near"], VARIANTS["t5"]
ONE_HEAD: dict[str, Any] = {"heads": 1, "kv_heads": 1, "head_size": 48}
HONEST = {
    "two t5": of_layers(decoder("t5", max_positions=150), NEAR, FAR),
    "two t5 of one head": of_layers(decoder("t5", max_positions=150, **ONE_HEAD), NEAR, FAR),
    "rows of keys": of_layers(encoder("shaw"), {"name": "shaw", "score": "query_key"}),
    "coordinates": of_layers(encoder("learned_2d"), {"name": "alibi"}, {"name": "alibi"}),
    "rows beside others": of_layers(
        decoder("swin", max_positions=80), (VARIANTS["swin"], VARIANTS["dynamic_bias"])
    ),
    "boxes": of_layers(encoder("boxes"), {"name": "alibi"}, {"name": "alibi"}),
    "offsets beside rows": of_layers(
        decoder("swin", max_positions=48), (VARIANTS["decomposed_2d"], VARIANTS["dynamic_bias"])
    ),
    "as many heads as coordinates": of_layers(
        decoder("learned_2d", heads=3), {"name": "alibi"}, {"name": "nope"}
    ),
    "slots without caches": of_layers(encoder("mrope"), (VARIANTS["shaw"], VARIANTS["mrope"])),
    "two of tokens": beside(decoder("learned_2d", max_positions=80), VARIANTS["sinusoidal"]),
}


@pytest.mark.parametrize(("name", "target"), combinations(list(HONEST), ["onnx", "ort"]))
def test_no_honest_combination_is_refused(name: str, target: str, tmp_path: Path) -> None:
    exported(tmp_path / "a", HONEST[name], target)
    result = checked(tmp_path / "a")
    assert result.failures == {} and not any(OPEN in why for why in result.skipped.values())


@pytest.mark.parametrize("variant", ["rope", "alibi"])
def test_keys_beside_a_sink_are_proved(variant: str, tmp_path: Path) -> None:
    sees = {"name": "window", "size": 9}
    config = attending(decoder(variant, max_positions=80), sees=sees, sinks=True)
    exported(tmp_path / "a", config, "onnx")
    assert (result := checked(tmp_path / "a")).failures == result.skipped == {}
    model, graph = load(tmp_path / "a", threads=1), onnx.load(tmp_path / "a/model.onnx")
    number("Sub", 1, 1)(graph.graph)  # the window
    (tmp_path / "a/model.onnx").write_bytes(graph.SerializeToString())
    failures = checks.indices(tmp_path / "a", model).failures
    assert any("got one that is" in text for text in failures.values())


@pytest.mark.parametrize("target", ["onnx", "onnx-static"])
def test_the_mask_of_a_module_that_is_read_is_proved(target: str, tmp_path: Path) -> None:
    module = own_modules.seeded("a window")
    how = ReadAs(own_modules.inputs(module, 2, 16), own_modules.POSITIONS)
    export(Sources(as_model(module, how)), target, tmp_path / "a", verify=False)
    model, graph = load(tmp_path / "a", threads=1), onnx.load(tmp_path / "a/model.onnx")
    assert model.manifest.places.sees == ["k <= q and q - k < 6"]  # type: ignore[union-attr]
    assert checked(tmp_path / "a").failures == {}
    number("Sub", 1, 1)(graph.graph)  # the window
    (tmp_path / "a/model.onnx").write_bytes(graph.SerializeToString())
    failures = checks.indices(tmp_path / "a", model).failures
    assert any("got one that is seen" in text for text in failures.values())


def test_attention_in_both_branches_of_an_if_is_of_one_layer(tmp_path: Path) -> None:
    exported(tmp_path / "a", encoder("rope_dynamic-short"), "onnx")
    assert b"else_branch" in (tmp_path / "a/model.onnx").read_bytes()
    assert checked(tmp_path / "a").failures == {}


@pytest.mark.parametrize(("second", "declares"), [("kerple", False), ("rope", True)])
def test_a_bias_is_proved_if_no_other_is_added(second: str, declares: bool, tmp_path: Path) -> None:
    config = block("alibi", max_positions=40)
    attention = replace(config.attention, encodings=({"name": "alibi"}, {"name": second}))
    exported(tmp_path / "a", replace(config, attention=attention), "onnx")
    result = checked(tmp_path / "a")
    assert result.failures == {}
    unknown = [reason for reason in result.skipped.values() if "declares no rule" in reason]
    assert bool(unknown) != declares


Change = Callable[[onnx.GraphProto], None]


def node_before(graph: onnx.GraphProto, operator: str, index: int, last: bool = False) -> str:
    """Return the name of a value, not of tokens, that the first or last node with an operator
    reads.
    """
    nodes = [node for node in graph.node if node.op_type == operator]
    read = [str(node.input[index]) for node in nodes if node.input[index] != "input_ids"]
    return read[-1 if last else 0]


def inserted(graph: onnx.GraphProto, value: str, nodes: list[Any], result: str) -> None:
    """Let all nodes that read a value read a result of new nodes, which stand before the first
    of them.
    """
    for node in graph.node:
        node.input[:] = [result if name == value else name for name in node.input]
    place = next(n for n, node in enumerate(graph.node) if result in node.input)
    for node in reversed(nodes):
        graph.node.insert(place, node)


def late(operator: str, index: int, start: int, dtype: str = "int64", last: bool = False) -> Change:
    """Return a change that adds 1 to the numbers above `start` that a node reads."""

    def change(graph: onnx.GraphProto) -> None:
        value = node_before(graph, operator, index, last)
        for name, number in (("f.start", start), ("f.one", 1)):
            graph.initializer.append(numpy_helper.from_array(np.array(number, dtype), name))
        nodes = [
            helper.make_node("Greater", [value, "f.start"], ["f.above"]),
            helper.make_node("Add", [value, "f.one"], ["f.next"]),
            helper.make_node("Where", ["f.above", "f.next", value], ["f.result"]),
        ]
        inserted(graph, value, nodes, "f.result")

    return change


def number(operator: str, index: int, shift: int) -> Change:
    """Return a change of a constant that the first node with an operator reads."""

    def change(graph: onnx.GraphProto) -> None:
        constants = {tensor.name: tensor for tensor in graph.initializer}
        name = next(
            node.input[index]
            for node in graph.node
            if node.op_type == operator and node.input[index] in constants
        )
        changed = numpy_helper.to_array(constants[name]) + shift
        constants[name].CopyFrom(numpy_helper.from_array(changed, name))

    return change


def comparison(operator: str, other: str) -> Change:
    """Return a change of the operator of all nodes with another one."""

    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.op_type = other if node.op_type == operator else node.op_type

    return change


def attribute(name: str, changed: Callable[[Any], Any]) -> Change:
    """Return a change of an attribute of the last node that has it."""

    def change(graph: onnx.GraphProto) -> None:
        results = [a for node in graph.node for a in node.attribute if a.name == name]
        value = changed(helper.get_attribute_value(results[-1]))
        results[-1].CopyFrom(helper.make_attribute(name, value))

    return change


def swapped(operator: str) -> Change:
    """Return a change that exchanges what the first node with an operator reads."""

    def change(graph: onnx.GraphProto) -> None:
        inputs = next(node for node in graph.node if node.op_type == operator).input
        inputs[0], inputs[1] = inputs[1], inputs[0]

    return change


def through(operator: str, index: int, to: int) -> Change:
    """Return a change that casts what a node reads to another type and back."""

    def change(graph: onnx.GraphProto) -> None:
        value = node_before(graph, operator, index)
        casts = ([value], ["f.other"], to), (["f.other"], ["f.result"], TensorProto.INT64)
        nodes = [helper.make_node("Cast", *names, to=kind) for *names, kind in casts]
        inserted(graph, value, nodes, "f.result")

    return change


def first_row(operator: str, index: int) -> Change:
    """Return a change that gives all rows what a node reads of the first one."""

    def change(graph: onnx.GraphProto) -> None:
        value = node_before(graph, operator, index)
        graph.initializer.append(numpy_helper.from_array(np.array([0]), "f.first"))
        nodes = [
            helper.make_node("Shape", [value], ["f.rows"]),
            helper.make_node("Gather", [value, "f.first"], ["f.of_first"]),
            helper.make_node("Expand", ["f.of_first", "f.rows"], ["f.result"]),
        ]
        inserted(graph, value, nodes, "f.result")

    return change


def bucket_moved(graph: onnx.GraphProto) -> None:
    """Move a border in the table of buckets by one."""
    tensor = next(i for i in graph.initializer if len(i.dims) == 2 and i.dims[0] == 257)
    table = numpy_helper.to_array(tensor).copy()
    border = next(n for n in range(150, 257) if table[n] != table[n - 1])
    table[border] = table[border - 1]
    tensor.CopyFrom(numpy_helper.from_array(table, tensor.name))


FAULTS: dict[str, Any] = {
    "window one longer": ("rope", "onnx", "window", number("Sub", 1, 1)),
    "window one shorter": ("rope", "onnx-static", "window", number("Sub", 1, -1)),
    "window ignored": ("rope", "onnx", "window", number("Sub", 1, 1000)),
    "chunk one longer": ("rope", "onnx", "chunk", number("Div", 1, 1)),
    "chunk one shorter": ("rope", "ort", "chunk", number("Div", 1, -1)),
    "slots shift from 21 on": ("rope", "onnx-static", "causal", late("TensorScatter", 2, 20)),
    "rows shift from 300 on": ("rope", "onnx", "causal", late("RotaryEmbedding", 3, 299)),
    "tokens' rows shift from 300 on": ("learned", "ort", "causal", late("Gather", 1, 299)),
    "causal mask one short": ("rope", "onnx", "causal", comparison("LessOrEqual", "Less")),
    "padding is a position": ("rope", "onnx", "causal", number("GreaterOrEqual", 1, -1)),
    "bucket moved": ("deberta", "onnx", "causal", bucket_moved),
    "lengths one long": ("rope", "ort", "causal", late("GroupQueryAttention", 5, -5, "int32")),
    "first row's length": ("rope", "onnx-static", "causal", first_row("TensorScatter", 2)),
    "window attribute": (
        "rope", "ort", "window", attribute("local_window_size", lambda size: size + 1),
    ),
    "chunk attribute": (
        "rope", "ort-native", "chunk", attribute("chunk_size", lambda size: size - 1),
    ),
    "slots in windows": ("rope", "onnx-static", "window",
        late("TensorScatter", 2, 30, last=True), LONG),
    "last places of chunks shift": ("dual_chunk", "onnx", "causal", late("Gather", 1, 90)),
    "rows one short": ("shaw", "onnx", "causal", number("Clip", 2, -1)),
    "clipped at the wrong end": ("shaw", "ort", "causal", number("Clip", 1, 1)),
    "next row": ("shaw", "onnx-static", "causal", number("Add", 1, 1)),
    "distances of t5 exchanged": ("t5", "onnx", "causal", swapped("Sub")),
    "distances of shaw exchanged": ("shaw", "onnx", "causal", swapped("Sub")),
    "biases grow": ("alibi", "onnx", "causal", swapped("Sub")),
    "biases shift below 200": ("alibi", "onnx-static", "causal", late("Mul", 0, -200, "float32")),
    "first row's positions": ("rope", "onnx", "causal", first_row("RotaryEmbedding", 3)),
    "positions in float16": ("rope", "onnx", "causal",
        through("RotaryEmbedding", 3, TensorProto.FLOAT16), 4000),
    "slots in float16": ("rope", "onnx-static", "causal",
        through("TensorScatter", 2, TensorProto.FLOAT16), 4000),
    "slots of counted keys shift": ("cope", "ort", "causal", late("TensorScatter", 2, 20)),
    "offsets in windows shift": ("swin", "onnx", "causal", late("Gather", 1, 300)),
    "offsets to computed rows shift": ("swin_v2", "onnx", "causal", late("Gather", 1, 300)),
    "rows in bfloat16": ("learned", "onnx", "causal", through("Gather", 1, TensorProto.BFLOAT16)),
    # Slots are floats there, which have gaps behind 2^24.
    "distances in float32": ("shaw", "ort", "causal", lambda graph: None, (1 << 24) + 2),
    "keys after the query": ("rope", "onnx-static", "causal",
        comparison("LessOrEqual", "GreaterOrEqual")),
    "padding of a mask is a position": ("rope", "onnx", "causal",
        comparison("LessOrEqual", "Less"), "mask"),
    "chunk of a static cache one longer": ("rope", "onnx-static", "chunk", number("Div", 1, 1)),
    "chunk of ort one longer": ("rope", "ort", "chunk", number("Div", 1, 1)),
    "last slots shift from 41 on": ("rope", "ort-native", "causal",
        late("CachedAttention", 5, 40, "int32")),
    "logits of the next column": ("rope", "onnx", "causal", late("GatherND", 1, 3)),
    "longest row one long": ("rope", "ort", "causal",
        late("GroupQueryAttention", 6, 77, "int32")),
    "places in chunks one longer": ("dual_chunk", "onnx", "causal", number("Mod", 1, 1)),
    "keys' positions shift": ("rope", "onnx-static", "causal", late("TensorScatter", 1, 33)),
    "keys in windows": ("rope", "onnx-static", "window", late("Min", 0, 40), LONG),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_written_graph_is_found(fault: str, tmp_path: Path) -> None:
    variant, target, mask, change, *other = FAULTS[fault]
    signature = "mask" if "mask" in other else "positions"
    most = next((number for number in other if number != "mask"), 350)
    path = written(tmp_path, variant, target, mask, signature, most)
    model = load(path, threads=1)
    whole = onnx.load(path / "model.onnx")
    change(whole.graph)
    (path / "model.onnx").write_bytes(whole.SerializeToString())
    assert checks.indices(path, model).failures


def test_questions_to_the_solver_are_written_for_others(tmp_path: Path) -> None:
    path, log = written(tmp_path, "alibi", "onnx", "window"), tmp_path / "log"
    command = ["verify", str(path), "--quick", "--log-claims", str(log)]
    assert main(command) == 0 and main(command) == 2  # the folder exists
    answers = set()
    for file in log.iterdir():
        solver, text = z3.Solver(ctx=z3.Context()), file.read_text()
        solver.from_string(text)
        (answer,) = re.findall(r"\(set-info :status (\w+)\)", text)
        assert str(solver.check()) == answer and text.startswith(";")
        answers.add(answer)
    assert answers == {"sat", "unsat"}


def test_without_the_solver_positions_are_not_called_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "rope", "onnx")
    proved = checked(path).compared
    monkeypatch.setattr(checks, "SOLVER", "a_solver_that_is_not_installed")
    assert "pip install 'posenc-export[prove]'" in checked(path).skipped["positions"]
    assert checked(path).compared < proved


def test_an_artefact_that_declares_nothing_is_not_called_proved(tmp_path: Path) -> None:
    path = written(tmp_path, "rope", "onnx")
    manifest = manifests.read(path).replace(places=None)
    result = checks.indices(path, SimpleNamespace(manifest=manifest))  # type: ignore[arg-type]
    assert "export again" in result.skipped["positions"] and not result.failures


@pytest.mark.parametrize("variant", ["alibi", "t5"])
def test_masks_in_bfloat16_are_compared_before_the_cast(variant: str, tmp_path: Path) -> None:
    config = attending(decoder(variant, max_positions=80), sees=CHUNK)
    exported(tmp_path / "a", config, "ort-cuda", dtype="bfloat16")
    graph, result = onnx.load(tmp_path / "a" / "model.onnx"), []
    manifest = manifests.read(tmp_path / "a")
    for change in (lambda graph: None, number("Div", 1, 1)):
        change(graph.graph)
        (tmp_path / "a" / "model.onnx").write_bytes(graph.SerializeToString())
        result.append(checks.indices(tmp_path / "a", SimpleNamespace(manifest=manifest)).failures)  # type: ignore[arg-type]
    assert not result[0] and result[1]


def test_a_mask_of_a_layer_that_declares_nothing_is_a_failure(tmp_path: Path) -> None:
    folder = written(tmp_path, "rope", "onnx")
    manifest = manifests.read(folder)
    other = manifest.replace(places=Places())
    failures = checks.indices(folder, SimpleNamespace(manifest=other)).failures  # type: ignore[arg-type]
    assert any("expected a mask of 0 layers" in failure for failure in failures.values())


@pytest.mark.parametrize(
    "config", [{"attention": "both"}, {"order": ["global"], "layers": {}}, {"order": 3}]
)
def test_a_config_that_describes_no_model_is_refused(config: Any) -> None:
    manifest = cast(Manifest, SimpleNamespace(config=config))
    with pytest.raises(ValueError, match="verify: expected"):
        described.attentions(manifest)
