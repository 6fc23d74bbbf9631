"""Kernels of this machine keep their contracts, wrong ones are found, and results are kept."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable

import numpy as np
import onnx
import onnxruntime
import pytest

from posenc_export.export import VerificationError, export
from posenc_export.runtime import load, verify
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.graphs import kernel_library, onnx_parts
from posenc_export.runtime.graphs.onnx_nodes import Node, read_nodes
from posenc_export.runtime.graphs.ort_options import session_options
from posenc_export.runtime.verification import checks
from posenc_export.runtime.verification.conformance import geometry, suite, trial
from posenc_export.runtime.verification.conformance.trial import Kernel, Trial, worst
from tests.cases import choice
from tests.runtime.verification.kernels import PRODUCTS, experts, faults
from tests.tiny import block, decoder
from tests.traces import sources

FAULTS, LISTED = faults(), suite.listed()
KERNEL = next(kernel for kernel in LISTED if kernel.operator == "MatMulNBits")
KINDS: dict[str, dict[str, Any]] = {
    "int8-ort": {"weights": "int8"},
    "int8-32-ort": {"weights": "int8-32"},
    "int4-ort": {"weights": "int4"},
    "int4-128-ort": {"weights": "int4-128"},
    "float16-ort": {"dtype": "float16"},
    "int8-onnx": {"weights": "int8"},
    "int4-onnx": {"weights": "int4"},
    "float16-onnx": {"dtype": "float16"},
}
Artefacts = Callable[[str], Path]


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Artefacts:
    """Return the folder of an artefact of a kind, which is exported once."""
    base, result = tmp_path_factory.mktemp("kernels"), {}

    def of(kind: str) -> Path:
        if kind not in result:
            result[kind] = base / kind
            target = kind.rpartition("-")[2]
            export(sources(PRODUCTS), target, result[kind], verify=False, **KINDS[kind])
        return result[kind]

    return of


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder without results."""
    monkeypatch.setenv(files.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def checked(folder: Path) -> Check:
    """Return the check of an artefact."""
    check = checks.operators(folder, load(folder, provider="cpu", threads=1))
    assert check is not None
    return check


# Each operator, and every third of its geometries.
FIRST = {kernel.operator: number for number, kernel in reversed([*enumerate(LISTED)])}
SOME = {*FIRST.values(), *range(0, len(LISTED), 3)}


@pytest.mark.parametrize(
    "number", choice(range(len(LISTED)), SOME), ids=lambda n: f"{n} {LISTED[n].operator}"
)
def test_a_kernel_keeps_its_contract(number: int) -> None:
    (result,) = suite.results([LISTED[number]])
    if result.missing:
        pytest.skip(result.missing)
    assert result.failure == "" and result.worst <= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_found(fault: str) -> None:
    assert worst(suite.trial(FAULTS[fault].kernel))[1] == "" and FAULTS[fault].error() > 2


def test_a_message_names_the_call() -> None:
    fault = FAULTS["window one token long"]
    _, failure = worst(suite.trial(fault.kernel), fault.opened)
    sizes = r"\d+x\d+x\d+.*"
    assert re.fullmatch(rf"an error of \S+ times its bound for call \d+ of {sizes}", failure)


@pytest.mark.parametrize("kind", KINDS)
def test_every_product_of_an_artefact_has_a_contract(kind: str, artefacts: Artefacts) -> None:
    kernels = geometry.kernels(artefacts(kind), load(artefacts(kind)).manifest)
    skipped = {name: why for name, why in kernels.skipped.items() if "MatMul" in name}
    names = [" ".join(step.operator for step in kernel.nodes) for kernel in kernels.contracts]
    # qkv, output, gate and up, down, and the head; the table, unless in float16
    assert sum("MatMul" in name for name in names) >= 5 and not skipped and not kernels.wrong
    assert sum("Gather" in name for name in names) == ("float16" not in kind)
    assert checked(artefacts(kind)).failures == {}


def _fused(path: Path) -> set[tuple[str, str]]:
    """Return the products of an optimized graph, with their attributes."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    products = ("MatMul", "GatherBlock", "QuantizeLinear", "Gemm")
    # Defaults that are written for nodes that are fused
    default = ("weight_prepacked", "output_dtype", "precision", "saturate")
    return {
        (node.op_type, str(sorted(str(a) for a in node.attribute if a.name not in default)))
        for node in nodes
        if node.op_type.startswith(products)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_alone_is_the_one_that_runs_in_the_artefact(
    kind: str, artefacts: Artefacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = artefacts(kind)
    manifest = load(folder).manifest
    options = session_options(manifest, 1)
    options.optimized_model_filepath = str(tmp_path / "whole.onnx")
    onnxruntime.InferenceSession(str(folder / "model.onnx"), options, ["CPUExecutionProvider"])
    alone: set[tuple[str, str]] = set()
    options_of = trial.options_of
    for number, contract in enumerate(geometry.kernels(folder, manifest).contracts):
        path = tmp_path / f"{number}.onnx"

        def writing(*arguments: Any, path: Path = path) -> Any:
            options = options_of(*arguments)
            options.optimized_model_filepath = str(path)
            return options

        monkeypatch.setattr(trial, "options_of", writing)
        trial.opened(suite.trial(contract), 1)
        alone |= _fused(path)
    whole = {item for item in _fused(tmp_path / "whole.onnx") if item[0] != "DequantizeLinear"}
    assert whole and whole <= alone


def altered(folder: Path, other: Path, change: Callable[[Node], Node]) -> geometry.Kernels:
    """Return the kernels of an artefact whose first MatMulNBits was changed."""
    graph = read_nodes(folder / "model.onnx")
    at = next(n for n, node in enumerate(graph.nodes) if node.operator == "MatMulNBits")
    nodes = [change(node) if n == at else node for n, node in enumerate(graph.nodes)]
    content = onnx_parts.serialised(graph, nodes, graph.outputs, tuple(graph.inputs))
    (other / "model.onnx").write_bytes(content)
    return geometry.kernels(other, load(folder).manifest)


def test_an_accuracy_level_other_than_the_activations_of_the_manifest_is_found(
    artefacts: Artefacts, tmp_path: Path
) -> None:
    other = partial(onnx_parts.with_attribute, name="accuracy_level", value=1)
    ((place, reason),) = altered(artefacts("int4-ort"), tmp_path, other).wrong.items()
    assert place == "MatMulNBits layers.0.attention.projection.qkv.weight.codes"
    assert reason == "accuracy_level 1 in place of 4, as the manifest says"


CHANGES: dict[str, Callable[[Node], Node]] = {
    "codes that are computed": lambda node: replace(
        node, inputs=[node.inputs[0], "input_ids", *node.inputs[2:]]
    ),
    "an unknown attribute": partial(onnx_parts.with_attribute, name="other", value=1),
    "an unknown input": lambda node: replace(node, inputs=[*node.inputs, "", "input_ids"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_node_that_no_contract_describes_is_skipped(
    change: str, artefacts: Artefacts, tmp_path: Path
) -> None:
    kernels = altered(artefacts("int4-ort"), tmp_path, CHANGES[change])
    ((place, reason),) = kernels.skipped.items()
    assert place.startswith("MatMulNBits") and re.search("layout|not in the contract", reason)
    assert not kernels.wrong and len(kernels.contracts) > 5


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_chosen_experts_keep_their_contract(weights: str, tmp_path: Path) -> None:
    export(experts(), "ort", tmp_path / "made", verify=False, weights=weights)
    kernels = geometry.kernels(tmp_path / "made", load(tmp_path / "made").manifest)
    assert "QMoE" in [contract.operator for contract in kernels.contracts]
    assert checked(tmp_path / "made").failures == {} and not kernels.skipped


@pytest.mark.parametrize("cache", ["int8", "float16"])
def test_caches_of_few_bits_keep_their_contract(cache: str, tmp_path: Path) -> None:
    if cache == "float16" and kernel_library.path() is None:
        pytest.skip("the library of packages/kernels is not built")
    hidden = np.random.default_rng(0).standard_normal((2048, 48)).astype(np.float32)
    np.save(tmp_path / "x.npy", hidden)
    how = {"calibrate": tmp_path / "x.npy"} if cache == "int8" else {}
    target = "ort" if cache == "int8" else "ort-native"
    config = block("rope", max_positions=64)
    export(sources(config), target, tmp_path / "made", verify=False, cache=cache, **how)  # type: ignore[arg-type]
    kernels = geometry.kernels(tmp_path / "made", load(tmp_path / "made").manifest)
    assert cache in [dict(kernel.sizes).get("cache") for kernel in kernels.contracts]
    assert checked(tmp_path / "made").failures == {}


def test_rows_of_a_state_in_float32_beside_float16_keep_their_contract(tmp_path: Path) -> None:
    config = decoder("deberta", max_positions=80)
    export(sources(config), "ort-cuda", tmp_path / "made", dtype="float16", verify=False)
    assert checked(tmp_path / "made").failures == {}


def ran(kernels: list[Kernel], **how: Any) -> list[bool]:
    """Return of each kernel whether it was tried now."""
    return [not result.known for result in suite.results(kernels, **how)]


def test_a_contract_that_was_kept_is_not_tried_again(empty: Path) -> None:
    assert ran([KERNEL]) == [True] and ran([KERNEL]) == [False]
    assert ran([KERNEL], again=True) == [True]
    assert ran([replace(KERNEL, opset=21)]) == [True]
    first, second = (next(iter(suite.results([KERNEL], again=how))).worst for how in (True, False))
    assert first == second > 0


def test_a_broken_contract_is_never_kept(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "worst", lambda trial: (7.0, "an error of 7 times its bound"))
    for _ in range(2):
        (result,) = suite.results([KERNEL])
        assert result.failure and not result.known
    assert not empty.exists()


@pytest.mark.parametrize("damage", [b"", b"1.5", b"-1", b"nan", bytes([255])])
def test_a_damaged_result_is_tried_again(damage: bytes, empty: Path) -> None:
    ran([KERNEL])
    (file,) = empty.iterdir()
    file.write_bytes(damage)
    assert ran([KERNEL]) == [True] and ran([KERNEL]) == [False]


def test_a_key_has_the_geometry_the_code_the_runtime_and_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native = next(k for k in LISTED if k.operator == kernel_library.OPERATOR)
    before = suite.key_of(KERNEL), suite.key_of(native)
    assert repr(KERNEL) in before[0] and onnxruntime.__version__ in before[0]
    monkeypatch.setenv(kernel_library.INSTRUCTIONS, "plain")
    assert (suite.key_of(KERNEL) == before[0]) and suite.key_of(native) != before[1]
    for name, value in (("processor", "another"), ("features", ["none"])):
        with monkeypatch.context() as context:
            context.setattr(suite.machine, name, lambda value=value: value)
            suite._here.cache_clear()
            assert suite.key_of(KERNEL) != before[0]
        suite._here.cache_clear()


def test_other_code_of_contracts_has_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = suite.key_of(KERNEL)
    (tmp_path / "operators.py").write_text("# another contract\n")
    monkeypatch.setattr(suite, "HERE", tmp_path)
    suite._here.cache_clear()
    assert suite.key_of(KERNEL) != before
    suite._here.cache_clear()


def test_results_are_in_the_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(files.CACHE)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the XDG specification ignores
    assert suite.folder() == Path("/home/somebody/.cache/posenc_export/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert suite.folder() == Path("/caches/posenc_export/kernels")


def test_without_a_folder_contracts_are_tried_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(files.CACHE, str(tmp_path / "file" / "cache"))
    assert ran([KERNEL]) == [True] and ran([KERNEL]) == [True]


def test_a_kernel_that_ends_the_process_is_refused(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posenc_export.runtime.graphs import ort_options

    whole = next(kernel for kernel in LISTED if kernel.operator == ort_options.INTEGERS)
    monkeypatch.setattr(ort_options, "saturates", lambda: True)
    monkeypatch.setattr(ort_options, "older", lambda version: True)
    (result,) = suite.results([whole])
    assert "ONNX Runtime 1.30 or newer" in result.missing and not empty.exists()


def test_a_second_verification_tries_no_kernel(
    artefacts: Artefacts, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lines = artefacts("int4-ort"), []
    first = verify(folder, "cpu", quick=True, record=False, progress=lines.append)
    count = len(geometry.kernels(folder, load(folder).manifest).contracts)
    said = f"{count} contracts of kernels on this processor"
    assert f"ort: {said}, {count} of them run now" in lines
    monkeypatch.setattr(suite, "worst", None)
    second = verify(folder, "cpu", quick=True, record=False, progress=lines.append)
    assert f"ort: {said}, 0 of them run now" in lines and first["checks"] == second["checks"]


def test_a_wrong_kernel_is_refused_by_export_and_by_verify(
    artefacts: Artefacts, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(sources(PRODUCTS), "ort", tmp_path / "made", weights="int4", verify="quick")
    right = suite.worst

    def wrong(trial: Trial) -> tuple[float, str]:
        found = trial.nodes[-1].attributes.get("K") == 72  # the product after the gates
        return (7.0, "an error of 7 times its bound") if found else right(trial)

    monkeypatch.setattr(suite, "worst", wrong)
    for file in empty.iterdir():
        file.unlink()
    certificate = verify(tmp_path / "made", provider="cpu", quick=True)
    failures = certificate["checks"]["operators"]["failures"]
    assert not certificate["passed"] and ["down" in name for name in failures] == [True]
    with pytest.raises(VerificationError, match="check 'operators' .*down.weight.codes: an error"):
        export(sources(PRODUCTS), "ort", tmp_path / "other", weights="int4", verify="quick")
