"""The programs that `posenc inspect --runtime` prints: they run an artefact with ONNX Runtime alone and give what a session gives."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from posenc_export.cli import main
from posenc_export.clients import LANGUAGES, program
from posenc_export.export import export
from posenc_export.numerics import worst_error
from posenc_export.runtime import load
from posenc_export.runtime import manifest as manifests
from posenc_export.runtime.meanings import INPUTS, of_graph
from posenc_export.runtime.rules import _feedable
from posenc_export.runtime.summary import summary
from tests.tiny import block, decoder, encoder
from tests.traces import sources

pytestmark = pytest.mark.xdist_group("plain runtimes")  # one worker, which traces the models of these files once
MODELS = {
    "rope": decoder("rope"),
    "fox": decoder("fox"),
    "cope": block("cope"),
    "mrope": block("mrope"),
    "conv": block("conditional_conv"),
    "encoder": encoder("learned"),
}
QUICK = [("rope", "onnx", "positions"), ("rope", "onnx-static", "positions"), ("rope", "ort", "positions"), ("rope", "ort", "mask"), ("encoder", "onnx", "mask")]
SLOW = [(name, target, "positions") for name in ("fox", "cope", "mrope", "conv") for target in ("onnx", "onnx-static", "ort")] + [("fox", "ort", "mask")]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in SLOW)]


def _made(name: str, target: str, signature: str, folder: Path) -> Path:
    export(sources(MODELS[name]), target, folder, signature=signature, verify=False)
    return folder


def _python(folder: Path) -> Dict[str, Any]:
    """The names that the program defines."""
    names: Dict[str, Any] = {"__name__": "client"}
    exec(compile(program(manifests.read(folder), "python"), "client", "exec"), names)
    return names


def _prompt(manifest: Any) -> np.ndarray:
    if manifest.kind == "block":
        return np.random.default_rng(0).standard_normal((1, 9, 48)).astype(manifest.dtype)
    return np.random.default_rng(0).integers(0, 61, (1, 9))


@pytest.mark.parametrize(("name", "target", "signature"), CASES)
def test_the_python_program_gives_what_a_session_gives(name: str, target: str, signature: str, tmp_path: Path) -> None:
    model, client = load(_made(name, target, signature, tmp_path / "a"), provider="cpu"), _python(tmp_path / "a")
    x, graph, states, held, found = _prompt(model.manifest), client["load"](tmp_path / "a"), client["empty"](), 0, []
    for new in (6, 1, 2) if states else (9,):
        output, states = client["call"](graph, states, x[:, held : held + new], held)
        found.append(output)
        held += new
    whole = model.session().prefill(x)
    wanted = whole[:, [5, 6, 8]] if model.manifest.input("logits_index") else whole  # of the last token of each call
    assert worst_error(np.concatenate(found, axis=1), wanted) <= model.manifest.reference.tolerance


def test_the_python_program_decodes_the_same_text(tmp_path: Path) -> None:
    folder = _made("rope", "ort", "positions", tmp_path / "a")
    client, session = _python(folder), load(folder, provider="cpu").session()
    assert client["generate"](client["load"](folder), [5, 7, 9], 12) == [int(token[0]) for token in session.generate([[5, 7, 9]], 12)]


@pytest.mark.parametrize("target", ["onnx", "onnx-static"])
def test_the_reference_evaluator_of_onnx_runs_the_same_program(target: str, tmp_path: Path) -> None:
    model, client = load(_made("rope", target, "positions", tmp_path / "a"), provider="cpu"), _python(tmp_path / "a")
    x, graph = _prompt(model.manifest), ReferenceEvaluator(str(tmp_path / "a" / "model.onnx"))
    first, states = client["call"](graph, client["empty"](), x[:, :7], 0)
    second, _ = client["call"](graph, states, x[:, 7:], 7)
    assert worst_error(np.concatenate((first, second), axis=1), model.session().prefill(x)[:, [6, 8]]) <= model.manifest.reference.tolerance


def test_a_program_in_another_language_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(_made("rope", "onnx", "positions", tmp_path / "a")), "--runtime", "cobol"]) == 2
    assert "expected runtime to be one of python, node, got 'cobol'" in capsys.readouterr().err


NODE = os.environ.get("POSENC_NODE_MODULES", "")  # a folder node_modules that has onnxruntime-node


@pytest.mark.exhaustive
@pytest.mark.skipif(not NODE or shutil.which("node") is None, reason="node or onnxruntime-node is not installed")
@pytest.mark.parametrize(("target", "signature"), [("onnx", "positions"), ("onnx-static", "positions"), ("ort", "positions"), ("ort", "mask")])
def test_the_node_program_decodes_the_same_text(target: str, signature: str, tmp_path: Path) -> None:
    folder = _made("rope", target, signature, tmp_path / "a")
    (tmp_path / "node_modules").symlink_to(NODE)
    (tmp_path / "decode.mjs").write_text(program(manifests.read(folder), "node"))
    done = subprocess.run(["node", "decode.mjs", str(folder), "12", "5", "7", "9"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [int(token) for token in done.stdout.split()] == [int(token[0]) for token in load(folder, provider="cpu").session().generate([[5, 7, 9]], 12)]


@pytest.mark.exhaustive
@pytest.mark.skipif(not NODE or shutil.which("node") is None, reason="node or onnxruntime-node is not installed")
@pytest.mark.parametrize(("name", "dtype"), [("cope", "float32"), ("mrope", "float16"), ("conv", "float16"), ("encoder", "float32")])
def test_the_node_program_runs_blocks_and_encoders(name: str, dtype: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    export(sources(MODELS[name]), "onnx", folder, dtype=dtype, verify=False)
    (tmp_path / "node_modules").symlink_to(NODE)
    (tmp_path / "run.mjs").write_text(program(manifests.read(folder), "node"))
    done = subprocess.run(["node", "run.mjs", str(folder)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout and "NaN" not in done.stdout and "undefined" not in done.stdout


WEIRD = [{}, {"order": 3}, {"order": [[], {}], "layers": [], "tokens": []}, {"kind": "block", "attention": 1, "encodings": [2]}, {"layers": {"a": None}, "order": ["a"]}]


@pytest.mark.parametrize("config", WEIRD)
def test_a_description_that_no_export_wrote_is_no_error_of_the_summary(config: Any, tmp_path: Path) -> None:
    manifest = manifests.read(_made("rope", "onnx", "positions", tmp_path / "a")).replace(config=config)
    assert summary(manifest)["positions"] == "0 .. 1099" and set(summary(manifest)) == {"model", "encoding", "sizes", "positions"}


def test_a_description_cannot_put_code_into_a_program(tmp_path: Path) -> None:
    hostile = {"kind": "decoder", "order": ["a"], "layers": {"a": {"attention": {"encodings": [{"name": '"""\nraise SystemExit\n"""\u2028*/', "x": "\x1b[2J"}]}}}}
    manifest = manifests.read(_made("rope", "onnx", "positions", tmp_path / "a")).replace(config=hostile)
    wanted = "encoding: ????raise SystemExit???????:x=??2J in 1 of 1 layers"
    for language in LANGUAGES:
        assert wanted in program(manifest, language) and program(manifest, language).isascii() and "\x1b" not in program(manifest, language)


@pytest.mark.parametrize("language", LANGUAGES)
def test_inspect_prints_the_program(language: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = _made("rope", "ort", "positions", tmp_path / "a")
    assert main(["inspect", str(folder), "--runtime", language]) == 0
    assert capsys.readouterr().out == program(manifests.read(folder), language)


def test_an_artefact_of_torch_has_no_such_program(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = _made("rope", "torchscript", "positions", tmp_path / "a")
    assert main(["inspect", str(folder), "--runtime", "python"]) == 2
    assert "expected an artefact with model.onnx for --runtime, got target torchscript" in capsys.readouterr().err


def test_every_input_that_a_graph_may_have_has_a_meaning(tmp_path: Path) -> None:
    for signature in ("positions", "mask"):
        manifest = manifests.read(_made("rope", "onnx", signature, tmp_path / signature)).replace(config={"tokens": {"segments": 2}})
        assert set(_feedable(manifest)) <= set(INPUTS)


def test_a_state_says_what_it_holds_before_the_first_call(tmp_path: Path) -> None:
    said = of_graph(manifests.read(_made("rope", "onnx-static", "positions", tmp_path / "a")))
    assert said["past_positions"].endswith("First call: all slots hold -1.") and said["past_key_values.0.key"].endswith("First call: all slots hold 0.")
