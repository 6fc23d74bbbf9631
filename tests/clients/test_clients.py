"""The programs that `posenc inspect --runtime` prints run artefacts without this package and
give the outputs of a session.
"""

import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from posenc_export.clients import LANGUAGES, program
from posenc_export.commands.cli import main
from posenc_export.page.folder import inputs_of_pages
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.graph_inputs import AFTER_TOKENS, INPUTS, meanings_of
from posenc_export.runtime.artefact.summary import summary
from posenc_export.shared.numerics import worst_error
from tests.cases import choice
from tests.clients.running import printed
from tests.models.readouts import sources
from tests.tiny import block, decoder, encoder
from tests.traces import exported

# One worker, so that these models are traced once.
pytestmark = pytest.mark.xdist_group("plain runtimes")
MODELS = {
    "rope": decoder("rope"),
    "fox": decoder("fox"),
    "cope": block("cope"),
    "mrope": block("mrope"),
    "conv": block("conditional_conv"),
    "encoder": encoder("learned"),
}
QUICK = [
    *(("rope", target, "positions") for target in ("onnx", "onnx-static", "ort")),
    *(("rope", "ort", "mask"), ("encoder", "onnx", "mask")),
]
SLOW = [
    (name, target, "positions")
    for name in ("fox", "cope", "mrope", "conv")
    for target in ("onnx", "onnx-static", "ort")
] + [("fox", "ort", "mask")]
CASES = choice([*QUICK, *SLOW], QUICK)


def _made(name: str, target: str, folder: Path, signature: str = "positions") -> Path:
    return exported(folder, MODELS[name], target, signature=signature)


def _manifest(name: str, target: str, folder: Path) -> Any:
    return manifests.read(_made(name, target, folder / "a"))


def _python(folder: Path, language: str = "python") -> dict[str, Any]:
    """Execute a program; return the names that it defines."""
    names: dict[str, Any] = {"__name__": "client"}
    exec(compile(program(manifests.read(folder), language), "client", "exec"), names)
    return names


def _prompt(manifest: Any) -> np.ndarray:
    if manifest.kind == "block":
        return np.random.default_rng(0).standard_normal((1, 9, 48)).astype(manifest.dtype)
    return np.random.default_rng(0).integers(0, 61, (1, 9))


def _agrees(printed: str, folder: Path) -> bool:
    """Whether a program printed the outputs of a session for the input of the documentation: the
    number of tokens, and four outputs of the last one, in each line.
    """
    session = load(folder, provider="cpu").session()
    x, counts = np.arange(8)[None], [8]
    if session.manifest.kind == "block":
        numbers = np.sin(np.outer(np.arange(1, 12), np.arange(1, 49)))
        x, counts = numbers[None].astype(session.manifest.dtype), [8, 9, 10, 11]
    whole = session.prefill(x)
    lines = [re.sub(r"[\[\]]", " ", line).split() for line in printed.splitlines()]
    wanted = [[count, *whole[0, count - 1, :4].astype(float)] for count in counts]
    return np.allclose(np.array(lines, float), wanted, atol=1e-3)


@pytest.mark.parametrize(("name", "target"), [("cope", "ort"), ("encoder", "onnx")])
def test_the_python_program_prints_the_outputs_for_the_documented_input(
    name: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = _made(name, target, tmp_path / "a")
    _python(folder)["main"](folder)
    assert _agrees(capsys.readouterr().out, folder)


def test_a_program_refuses_more_tokens_than_its_caches_hold(tmp_path: Path) -> None:
    client = _python(_made("rope", "ort", tmp_path / "a"))
    graph, ids = client["load"](tmp_path / "a"), np.zeros((1, 5), np.int64)
    said = r"expected at most 1024 tokens in a row \(CAPACITY\), got 1025"
    with pytest.raises(ValueError, match=said):
        client["call"](graph, client["empty"](), ids, 1020)


WRONG = {
    "an id below 0": ([-1], {}, "expected token ids 0 .. 60, got -1 .. -1"),
    "an id of the vocabulary's size": ([5, 61], {}, "expected token ids 0 .. 60, got 5 .. 61"),
    "a start below 0": ([5], {"start": -1}, "expected positions 0 .. 1099, got -1 .. -1"),
    "a start behind the table": ([5], {"start": 1100}, "expected positions 0 .. 1099, got 1100"),
    "tokens beyond the table": ([5] * 3, {"start": 1098}, "positions 0 .. 1099, got 1098 .. 1100"),
    "no token": ([], {}, "expected at least one token, got none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_program_refuses_a_call_that_the_graph_cannot_compute(case: str, tmp_path: Path) -> None:
    tokens, how, message = WRONG[case]
    client = _python(_made("rope", "onnx", tmp_path / "a"))
    with pytest.raises(ValueError, match=re.escape(message)):
        graph = client["load"](tmp_path / "a")
        client["call"](graph, client["empty"](), np.array([tokens], np.int64), 0, **how)


@pytest.mark.parametrize("language", ["node", "c", "libtorch"])
def test_a_program_in_each_language_has_the_refusals(language: str, tmp_path: Path) -> None:
    target = "torchscript" if language == "libtorch" else "onnx"
    text = program(_manifest("rope", target, tmp_path), language)
    start = "START" if language == "c" else "start"
    below = f"{start} >= 0 &&" if language == "libtorch" else f"{start} < 0 ||"
    for rule in (below, "token ids 0 .. ", "positions 0 .. ", "at least one token"):
        assert rule in text


def test_a_program_for_products_of_bytes_sets_what_they_need(tmp_path: Path) -> None:
    folder = exported(tmp_path / "a", MODELS["rope"], "ort", weights="int8")
    for language in ("python", "node", "web", "c"):
        text = program(manifests.read(folder), language)
        assert re.search(r'"session.x64quantprecision"[,:] "1"', text)
    plain = manifests.read(_made("rope", "ort", tmp_path / "b"))
    assert "x64quantprecision" not in program(plain, "python")


def test_the_program_for_a_sentence_encoder_prints_the_embedding_of_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = exported(tmp_path / "a", sources("mean"), "onnx", signature="mask")
    wanted = load(folder, provider="cpu").session().read_out(np.array([[5, 6, 7]]))
    _python(folder)["main"](folder, "5", "6", "7")
    assert np.allclose(np.array(capsys.readouterr().out.split(), float), [3, *wanted[0]], atol=1e-5)


@pytest.mark.parametrize(("name", "target", "signature"), CASES)
def test_the_python_program_gives_the_outputs_of_a_session(
    name: str, target: str, signature: str, tmp_path: Path
) -> None:
    model = load(_made(name, target, tmp_path / "a", signature), provider="cpu")
    client, x, held, result = _python(tmp_path / "a"), _prompt(model.manifest), 0, []
    graph, states = client["load"](tmp_path / "a"), client["empty"]()
    for new in (6, 1, 2) if states else (9,):
        output, states = client["call"](graph, states, x[:, held : held + new], held)
        result.append(output)
        held += new
    wanted = model.session().prefill(x)
    if model.manifest.input("logits_index"):
        wanted = wanted[:, [5, 6, 8]]  # the last token of each call
    assert worst_error(np.concatenate(result, axis=1), wanted) <= model.manifest.reference.tolerance


def test_the_python_program_decodes_the_same_text(tmp_path: Path) -> None:
    folder = _made("rope", "ort", tmp_path / "a")
    client, session = _python(folder), load(folder, provider="cpu").session()
    wanted = [int(token[0]) for token in session.generate([[5, 7, 9]], 12)]
    assert client["generate"](client["load"](folder), [5, 7, 9], 12) == wanted


@pytest.mark.parametrize(
    ("language", "target"),
    [
        *(("reference", "onnx"), ("reference", "onnx-static")),
        *(("openvino", "ort"), ("openvino", "onnx"), ("tract", "onnx")),
    ],
)
def test_the_program_for_a_library_gives_the_outputs_of_a_session(
    language: str, target: str, tmp_path: Path
) -> None:
    if language != "reference":  # which is in onnx
        pytest.importorskip(language, reason=f"{language} is not installed")
    model = load(_made("rope", target, tmp_path / "a"), provider="cpu")
    client, x = _python(tmp_path / "a", language), _prompt(model.manifest)
    graph = client["load"](tmp_path / "a")
    first, states = client["call"](graph, client["empty"](), x[:, :7], 0)
    second, _ = client["call"](graph, states, x[:, 7:], 7)
    wanted = model.session().prefill(x)[:, [6, 8]]
    error = worst_error(np.concatenate((first, second), axis=1), wanted)
    assert error <= model.manifest.reference.tolerance


RUN = [
    *(("libtorch", name, "torchscript", {}) for name in ("cope", "mrope", "encoder")),
    ("libtorch", "rope", "torchscript", {}),
    ("libtorch", "fox", "torchscript", {"signature": "mask"}),
    *((language, "cope", "ort", {}) for language in ("c", "node")),
    *((language, "encoder", "onnx", {}) for language in ("c", "node")),
    *((language, "mrope", "onnx", {"dtype": "float16"}) for language in ("c", "node")),
    ("node", "conv", "onnx", {"dtype": "float16"}),
    *(
        (language, "rope", target, {"signature": signature})
        for language in ("c", "node")
        for target, signature in [case[1:] for case in QUICK[:4]]
    ),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("language", "name", "target", "options"), RUN)
def test_a_compiled_or_node_program_gives_the_tokens_or_outputs_of_a_session(
    language: str, name: str, target: str, options: dict[str, str], tmp_path: Path
) -> None:
    folder = exported(tmp_path / "a", MODELS[name], target, **options)
    model = load(folder, provider="cpu")
    if not model.manifest.decodes:
        assert _agrees(printed(tmp_path, language), folder)
        return
    tokens = [int(token[0]) for token in model.session().generate([[5, 7, 9]], 12)]
    assert printed(tmp_path, language, 12, 5, 7, 9).split() == [*map(str, tokens)]


STARTS = {
    "positions of tokens": ("onnx", "positions"),
    "rows counted by the graph": ("ort", "positions"),
    "a mask": ("onnx", "mask"),
}
SAID = {
    "rows counted by the graph": "The graph counts the tokens of a row",
    "a mask": "The graph counts positions from attention_mask",
}


@pytest.mark.parametrize("case", STARTS)
@pytest.mark.parametrize("language", ["python", "node", "web", "c"])
def test_a_program_takes_a_start_only_where_the_graph_does(
    language: str, case: str, tmp_path: Path
) -> None:
    target, signature = STARTS[case]
    folder = _made("rope", target, tmp_path / "a", signature)
    text = program(manifests.read(folder), language)
    takes = {"c": "#define START 0", "python": "start=0"}.get(language, "start = 0")
    assert (takes in text) == (case not in SAID)
    assert all((said in text) == (name == case) for name, said in SAID.items())


def test_a_program_in_another_language_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = str(_made("rope", "onnx", tmp_path / "a"))
    names = "python, openvino, tract, reference, node, web, c, libtorch"
    assert main(["inspect", folder, "--runtime", "cobol"]) == 2
    assert f"expected runtime to be one of {names}, got 'cobol'" in capsys.readouterr().err
    assert main(["inspect", folder, "--runtime", "C"]) == 2
    assert capsys.readouterr().err.endswith("got 'C'; did you mean c?\n")


CALLS = {"decode": ("rope", "FOLDER COUNT TOKEN..."), "run": ("cope", "FOLDER")}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("language", ["python", "node"])
def test_a_program_without_arguments_or_its_folder_prints_one_line(
    name: str, language: str, tmp_path: Path
) -> None:
    model, arguments = CALLS[name]
    command, suffix = (sys.executable, ".py") if language == "python" else ("node", ".mjs")
    if shutil.which(command) is None:
        pytest.skip("node is not installed")
    # Empty: it is imported before the arguments are read.
    package = tmp_path / "node_modules" / "onnxruntime-node"
    package.mkdir(parents=True)
    (package / "index.js").touch()
    text = program(_manifest(model, "ort", tmp_path), language)
    (tmp_path / f"{name}{suffix}").write_text(text)
    refusals = {
        (): f"usage: {language} {name}{suffix} {arguments}",
        ("nowhere", "4", "5"): "expected a folder with model.onnx, got nowhere",
    }
    for given, refusal in refusals.items():
        done = subprocess.run(
            [command, f"{name}{suffix}", *given], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode and not done.stdout and done.stderr == f"{refusal}\n"


WEIRD = [
    {},
    {"order": 3},
    {"order": [[], {}], "layers": [], "tokens": []},
    {"kind": "block", "attention": 1, "encodings": [2]},
    {"layers": {"a": None}, "order": ["a"]},
]


@pytest.mark.parametrize("config", WEIRD)
def test_the_summary_accepts_any_description(config: Any, tmp_path: Path) -> None:
    lines = summary(_manifest("rope", "onnx", tmp_path).replace(config=config))
    assert lines["positions"] == "0 .. 1099"
    assert set(lines) == {*"model encoding sizes positions".split()}


def test_a_description_cannot_put_code_into_a_program(tmp_path: Path) -> None:
    encoding = {"name": '"""\nraise SystemExit\n"""\u2028*/', "x": "\x1b[2J"}
    layers = {"a": {"attention": {"encodings": [encoding]}}}
    hostile = {"kind": "decoder", "order": ["a"], "layers": layers}
    manifest = _manifest("rope", "onnx", tmp_path).replace(config=hostile)
    wanted = "encoding: ????raise SystemExit???????:x=??2J in 1 of 1 layers"
    for language in set(LANGUAGES) - {"libtorch"}:
        text = program(manifest, language)
        assert wanted in text and text.isascii() and "\x1b" not in text


@pytest.mark.parametrize("name", ['"); raise SystemExit', "a\\", "a\nb", "é", ""])
@pytest.mark.parametrize("field", ["outputs", "states"])
def test_a_name_that_could_end_a_string_of_a_program_is_refused(
    field: str, name: str, tmp_path: Path
) -> None:
    manifest = _manifest("rope", "onnx", tmp_path)
    first, *others = getattr(manifest, field)
    changed = msgspec.structs.replace(first, **{"name" if field == "outputs" else "past": name})
    with pytest.raises(ValueError, match="expected names of letters, digits, _ and . for --run"):
        program(manifest.replace(**{field: (changed, *others)}), "python")


@pytest.mark.parametrize("language", LANGUAGES)
def test_inspect_prints_the_program(
    language: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target = "torchscript" if language == "libtorch" else "ort"
    folder = _made("rope", target, tmp_path / "a")
    assert main(["inspect", str(folder), "--runtime", language]) == 0
    assert capsys.readouterr().out == program(manifests.read(folder), language)


def test_an_artefact_of_a_torch_target_has_no_python_program(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = _made("rope", "torchscript", tmp_path / "a")
    assert main(["inspect", str(folder), "--runtime", "python"]) == 2
    said = "expected an artefact with model.onnx for --runtime, got target torchscript"
    assert said in capsys.readouterr().err


def test_a_model_whose_coordinates_are_no_positions_has_no_program(tmp_path: Path) -> None:
    exported(tmp_path / "a", block("boxes-joined"), "onnx")
    with pytest.raises(ValueError, match=r"for --runtime, got coordinates 0 \.\. 699; run it with"):
        program(manifests.read(tmp_path / "a"), "python")


def test_programs_and_pages_fill_inputs_of_the_table() -> None:
    for file in set(LANGUAGES.values()):
        text = resources.files("posenc_export.clients").joinpath("templates", f"{file}.jinja")
        table = text.read_text(encoding="utf-8").partition("} %}")[0]
        names = set(re.findall(r'^    "(\w+)": ', table, re.MULTILINE))
        others = INPUTS.keys() - names
        assert names <= INPUTS.keys() and not (others and file != "libtorch.cpp")
    assert set(inputs_of_pages()) == {*AFTER_TOKENS, "input_ids"} - {"slots", "token_type_ids"}


def test_the_doc_string_of_a_state_gives_its_initial_value(tmp_path: Path) -> None:
    said = meanings_of(_manifest("rope", "onnx-static", tmp_path))
    for name, value in {"past_positions": -1, "past_key_values.0.key": 0}.items():
        assert said[name].endswith(f"First call: all slots hold {value}.")
