"""The posenc command: errors are one line, and nothing is written."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import pytest

import posenc_export
from posenc_export import __version__
from posenc_export.commands import verify as verify_command
from posenc_export.commands.cli import main, parser_of
from posenc_export.commands.terminal import summary
from posenc_export.encodings import KNOWN
from posenc_export.export import TARGETS

BLOCK = ["export", "block", "--width", "64", "--heads", "4", "--max-positions", "64"]
# What follows BLOCK, and the rule of the refusal.
BAD = {
    "--encoding ropes --target ort": "expected a known name, got 'ropes'; did you mean rope?",
    "--encoding rope:thata=1 --target ort": "did you mean theta",
    "--encoding rope:theta=1,theta=2 --target ort": "name=value, each once, got 'theta=2'",
    "--target onx": "did you mean onnx",
    "--target ort --weights int3": "did you mean int8",
    "--target torchscript --weights int4": "got torchscript",
    "--target ort --dtype float16 --weights int4": "got ort in float16",
    "--target ort --cache int8": "give a sample of the model's inputs as calibrate, --calibrate",
    "--target ort --calibrate x": "got it for neither; omit calibrate, --calibrate",
    "--target ort --signature masks": "did you mean mask",
    "--encoding sinusoidal:scale=inf --target ort": "a finite number, got inf",
    "--encoding learned:offset=1e15 --target ort": "type int, got '1e15'",
    "--encoding learned:offset=1000000000000000 --target ort": "offset of at most 1048576",
    f"--encoding learned:offset={10**30} --target ort": "below 2^62",
    "--encoding floater:step=1e38 --target ort": "tables of finite numbers",
    f"--width {4 * 10**30} --target ort": "below 2^62",
    "--max-positions 1000000000000000 --target ort": (
        "expected weights and tables that fit the memory of this machine, got an allocation of"
    ),
    f"--encoding alibi --max-positions {10**30} --target ort": "below 2^62",
    f"--seed {10**30} --target ort": "seed to be 0 .. 2^63 - 1",
}


@pytest.mark.parametrize(("options", "rule"), BAD.items())
def test_bad_input_is_one_line_status_2_and_nothing_written(
    options: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([*BLOCK, *options.split(), "-o", str(tmp_path / "artefact")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("posenc: ")]
    assert len(errors) == 1 and rule in errors[0]
    assert not list(tmp_path.iterdir())


CODE = """import torch
def fails():
    return torch.zeros(2) @ torch.zeros(3)
def none(): pass
def word(): return "a"
"""
OF_CODE = {  # a name, and what is said of a file with CODE, of one that cannot be read or imported
    "posenc_code:fails": (
        "to return a model, got RuntimeError: ",
        "posenc_code.py:3: return torch.",
    ),
    "posenc_code:none": ("to return a model, got None; return a torch.nn.Module",),
    "posenc_code:word": ("to return a model, got 'a'; return",),
    "posenc_broken:model": ("can be imported, got SyntaxError: ", "(posenc_broken.py, line 1)"),
    "posenc_lacks:model": ("named 'posenc_nothing' ", "posenc_lacks.py:1: ", "; correct the code"),
    "posenc_other:model": ("No module named 'posenc_other'; run the command in its folder",),
}


@pytest.mark.parametrize(("name", "said"), OF_CODE.items())
@pytest.mark.parametrize("command", ["export {} --target ort -o new", "audit graph --reference {}"])
def test_errors_of_code_that_builds_a_model_are_one_line_with_their_place(
    command: str,
    name: str,
    said: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    files = {"code": CODE, "broken": "def f(:", "lacks": "import posenc_nothing"}
    for file, text in files.items():
        (tmp_path / f"posenc_{file}.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"posenc_{file}", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(command.format(name).split()) == 2
    (error,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("posenc: "))
    assert [words for words in said if words not in error] == []


def test_inspect_prints_the_format_of_weights_and_their_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = str(tmp_path / "artefact")
    assert main([*BLOCK, "--target", "ort", "--weights", "int4", "-o", place, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert row["passed"] and float(row["from float32"]) > 0
    assert main(["inspect", place]) == 0
    results = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "int4 in 2 matrices" in results["weights"]
    assert f"{row['from float32']} from the float32 module" in results["quality"]


INSPECT = f'{sys.executable} -m posenc_export.commands.cli inspect "$0"'  # which imports no torch
CLOSED_PIPE = f"{INSPECT} | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}"


@pytest.mark.parametrize(
    ("command", "status", "lines"),
    [(f"{INSPECT} >&-", 2, 1), (f"{INSPECT} >/dev/full", 2, 1), (CLOSED_PIPE, 0, 0)],
)
def test_output_that_cannot_be_written_is_a_one_line_error_and_a_closed_pipe_is_not(
    command: str, status: int, lines: int, unverified: str
) -> None:
    whole = ["bash", "-c", command, unverified]
    done = subprocess.run(whole, stderr=subprocess.PIPE, text=True)
    assert done.returncode == status and len(done.stderr.splitlines()) == lines, done.stderr


def test_the_help_has_four_groups_and_examples_that_the_parser_takes(
    capsys: pytest.CaptureFixture,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0 and max(map(len, shown.splitlines())) <= 100
    assert re.findall(r"^(\w+):$", shown, re.M) == ["make", "check", "run", "look", "examples"]
    examples = re.findall(r"^  posenc (.*?)(?:  .*)?$", shown, re.M)
    assert len(examples) == 5
    for example in examples:
        arguments = shlex.split(example.partition(" > ")[0])
        parser_of(arguments[:1]).parse_args(arguments)


def test_a_listing_of_all_has_one_line_each(capsys: pytest.CaptureFixture) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    begins = [lines.index(name) for name in ("encodings", "targets", "presets")]
    assert begins[1] - begins[0] == len(KNOWN) + 3 and begins[2] - begins[1] == len(TARGETS) + 3
    assert "NAME of an encoding" in lines[-1]


def test_list_names_every_encoding_with_its_hook(capsys: pytest.CaptureFixture) -> None:
    assert main(["list", "--json"]) == 0
    hooks = {row["name"]: row["hook"] for row in json.loads(capsys.readouterr().out)["encodings"]}
    assert hooks.items() >= {"rope": "rotate", "alibi": "bias", "learned": "embed"}.items()


def _answer(arguments: list[str], capsys: pytest.CaptureFixture) -> object:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_preset_goes_from_export_to_text(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = str(tmp_path / "artefact")
    export = ["export", "tiny-rope", "--target", "ort", "--verify", "quick", "-o", folder]
    (row,) = _answer(export, capsys)  # type: ignore[misc]
    assert row["passed"]
    assert _answer(["inspect", folder], capsys)["operators"]["GroupQueryAttention"] == 5  # type: ignore[index]
    begin = "import os\n\nclass Reader:\n    def __init__(self"
    generate = ["generate", folder, "--prompt", begin]
    text = _answer([*generate, "--max-tokens", "24"], capsys)
    assert bytes(text["tokens"]).decode() == text["text"] and len(text["tokens"]) == 24  # type: ignore[index]
    assert main(["generate", folder, "--prompt", "x" * 5000, "--max-tokens", "1"]) == 2
    assert "a prompt of 1 .. 4096 tokens, got 5000; change its length" in capsys.readouterr().err
    assert main(["generate", folder, "--prompt", "x", "--provider", "cuda"]) == 2
    assert "got cuda" in capsys.readouterr().err


HIDDEN = """
import sys
for name in ("torch", "onnx", "onnx_ir", "onnxscript"):
    sys.modules[name] = None
from posenc_export.commands.cli import main, parser_of
assert main(["generate", sys.argv[1], "--prompt", "def f(x):", "--max-tokens", "5"]) == 0
"""


def test_a_command_imports_only_its_own_part() -> None:
    program = (
        "import sys; from posenc_export.commands.cli import main; main(['generate', '--help'])"
    )
    check = (
        "others = {'torch', 'onnxruntime', 'matplotlib', 'posenc_export.benchmark', "
        "'posenc_export.commands.bench'}; "
        "sys.exit(str(others & {*sys.modules} or ''))"
    )
    command = [sys.executable, "-c", f"try:\n {program}\nexcept SystemExit:\n {check}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "--max-tokens" in ended.stdout and not ended.stderr.strip()


EARLY = {
    "block --target onx": "did you mean onnx",
    "tiny-rop --target ort": "did you mean tiny-rope",
    "block --encoding ropee --target ort": "did you mean rope? posenc list shows all names",
    "block --width 13 --target ort": "width to be divisible by heads, got 13 and 8; give --head",
    "json --target ort": "got the Python module json; run the command in its folder with json:NAME",
}


def test_an_export_is_refused_before_torch_is_imported_where_it_can_be(tmp_path: Path) -> None:
    calls = [["export", *options.split(), "-o", "a"] for options in EARLY]
    program = (
        "import sys; from posenc_export.commands.cli import main; sys.exit(str([main(call) for "
        f"call in {calls}] + ['torch' in sys.modules]))"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    *lines, statuses = ended.stderr.splitlines()
    assert statuses == str([*[2] * len(EARLY), False])
    assert all(rule in line for rule, line in zip(EARLY.values(), lines, strict=True))


@pytest.fixture(scope="module")
def unverified(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a decoder that was exported without a certificate."""
    folder = str(tmp_path_factory.mktemp("unverified") / "Köln")
    assert main(["export", "tiny-alibi", "--target", "ort", "--no-verify", "-o", folder]) == 0
    return folder


def test_a_decoder_generates_where_neither_torch_nor_onnx_can_be_imported(unverified: str) -> None:
    command = [sys.executable, "-c", HIDDEN, unverified]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def test_a_terminal_of_ascii_shows_the_codes_of_other_characters(unverified: str) -> None:
    program = [sys.executable, "-m", "posenc_export"]
    command = [*program, "generate", unverified, "--prompt", "# déjà", "--max-tokens", "2"]
    done = subprocess.run(command, env={**os.environ, **ASCII}, capture_output=True, check=True)
    assert rb"# d\xe9j\xe0" in done.stdout and rb"K\udcc3\udcb6ln" in done.stderr


def test_text_of_an_artefact_without_a_certificate_comes_with_a_line_on_stderr(
    unverified: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["generate", unverified, "--prompt", "x", "--max-tokens", "1"]) == 0
    said = "posenc: .* has no passed certificate: .*; run posenc verify .*\n"
    assert re.fullmatch(said, capsys.readouterr().err)


@pytest.mark.parametrize("what", [[], ["encodings"], ["targets"], ["presets"], ["rope_yarn"]])
def test_a_listing_fits_100_columns(what: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["list", *what]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and max(map(len, lines)) <= 100


MISSPELLED = {
    "list zzzzz": "expected one of encodings, targets, presets or an encoding, got 'zzzzz'; posenc",
    "export json:zzzzz --target ort -o x": "in json, got no name zzzzz; give the name of one, "
    "such as detect_encoding, dump, dumps, load, loads",
    "list rope_yarm": "got 'rope_yarm'; did you mean rope_yarn?",
    "plot ropee": "got 'ropee'; did you mean rope?",
    "plot cosin": "got 'cosin'; posenc list shows all names",
    "export block --encoding ropee --target ort -o x": "did you mean rope? posenc list shows all",
    "bench tiny-rope --runtime transformer": "got 'transformer'; did you mean transformers?",
    "export mygpt.py:build --target ort -o x": "write mygpt:build, and run the command in its",
    "bench tiny-rop": "in it, got no folder of this name; did you mean tiny-rope?",
    "plot rope:thet=3": "got 'thet'; did you mean theta?",
    "export org/name-1B --target ort -o x": (
        "got 'org/name-1B'; give one that exists, or download the model first: hf download "
        "org/name-1B --local-dir name-1B"
    ),
    "inspect hf://org/name/q4.gguf": "meant, hf download org/name q4.gguf --local-dir name",
    "generate org/name --prompt x": (
        "got 'org/name'; give one that exists, or download the model first: hf download "
        "org/name --local-dir name"
    ),
    "export ./missing --target ort -o x": "got './missing'; give one that exists",
}


@pytest.mark.parametrize(("command", "named"), MISSPELLED.items())
def test_an_unknown_name_is_refused_with_the_nearest_name(
    command: str, named: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(command.split()) == 2
    assert named in capsys.readouterr().err


# Calls of the public functions with values of another type, and what is said of them.
CALLS = {
    "load(3)": "artefact: expected a path, as text or pathlib.Path, got 3",
    "load('tiny-rope', digest=3)": "expected digest 3, got",
    "verify('tiny-rope', quick='yes')": "verify: expected quick to be True or False, got 'yes'",
    "verify('tiny-rope', tolerance='x')": "tolerance to be above 0 and below 1, got 'x'; omit it",
    "draw('rope', 'alibi')": "expected a View of sizes, got 'alibi'; give several encodings as one",
    "draw({})": "expected an encoding as a name or a dict with a name, or a list of them, got {}",
    "draw(['rope', 3])": "a name or a dict with a name, or a list of them, got 3; see posenc list",
}


@pytest.mark.parametrize(("call", "said"), CALLS.items())
def test_a_value_of_another_type_is_refused_in_one_sentence(call: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        eval(f"posenc_export.{call}")


PARSED = {
    "exprot": "did you mean export?",
    "export block --target ort -o x --widht 5": (
        "posenc export: unrecognized arguments: --widht 5; did you mean --width?; see posenc export"
    ),
    "bench folder --context 128": "did you mean --contexts?",  # which is no abbreviation
    "export block --max-positions 1e12 --target ort -o nowhere": "a whole number, got '1e12'",
    "serve tiny-rope --port 80a": "--port: expected a whole number of at least 0, got '80a'; see",
    "serve tiny-rope --rows 0": "--rows: expected a whole number of at least 1, got '0'; see",
    "serve tiny-rope --threads x": "--threads: expected a whole number of at least 1, got 'x'",
    "generate tiny-rope --prompt x --max-tokens 0": "--max-tokens: expected a whole number of",
    "chat tiny-rope --context -1": "--context: expected a whole number of at least 1, got '-1'",
    "study rope --length 4": "--length: expected a whole number of at least 8, got '4'",
    "bench a b --contexts 16 128": "arguments: 128; numbers of an option are joined by commas, as",
    "bench tiny-rope --contexts 16;64": "expected whole numbers with commas between, or none",
}


@pytest.mark.parametrize(("command", "said"), PARSED.items())
def test_what_the_parser_refuses_is_one_line_and_status_2(
    command: str, said: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(command.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and said in line


TWO = ("onnx", "ort")
# What is said of files that are no model to export, no artefact or no folder for one.
FILES = {
    "export theirs.onnx --target ort -o x": "file theirs.onnx; posenc audit compares an exported",
    "export own.py --target ort -o x": "file own.py; run the command in its folder with own:",
    "export made/ort --target ort -o x": "an artefact already; posenc inspect prints what it holds",
    "export block --target ort -o own.py/x": "own.py, which is a file; choose another name",
    "verify a.gguf": "export the file first: posenc export a.gguf --target ort -o ARTEFACT",
    "inspect made": "posenc.json in it, got none; give one of its subfolders onnx, ort",
    "inspect made/ort": "got deeper nesting than can be read",
}


@pytest.mark.parametrize(("command", "said"), FILES.items())
def test_a_file_or_folder_of_another_kind_is_refused_with_what_it_is_for(
    command: str, said: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("theirs.onnx", "own.py", "a.gguf", *(f"made/{t}/posenc.json" for t in TWO)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("[" * 100000)
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_inspect_shows_encoding_sizes_and_positions_within_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = str(tmp_path / "artefact")
    rope = ["--encoding", "rope:theta=500000", "--target", "ort", "--no-verify"]
    assert main([*BLOCK, *rope, "-o", folder]) == 0
    capsys.readouterr()
    assert main(["inspect", folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "encoding     rope:theta=500000.0" in lines and "positions    0 .. 63" in lines
    sizes = "width 64, heads 4, kv heads 4, head size 16, a step reads 16384 weights"
    assert f"sizes        {sizes}" in lines
    assert max(map(len, lines)) <= 100


def test_a_cell_that_is_not_finite_is_shown_as_nan() -> None:
    certificate = {"cells": {"a": 1e-7, "b": 1e300}, "tolerance": 1e-5, "passed": False}
    assert summary(certificate)["worst error"] == "NaN"


PUBLIC = """
from posenc_export import Manifest, Model, Session, load, verify
model = load("folder")
reveal_type(model)
reveal_type(model.session())
reveal_type(verify)
"""


@pytest.mark.exhaustive
def test_the_top_level_package_is_typed(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(PUBLIC)
    environment = {**os.environ, "MYPYPATH": str(Path(__file__).parents[2])}
    options = "--config-file= --ignore-missing-imports --follow-imports=silent"
    command = [sys.executable, "-m", "mypy", *options.split(), "--cache-dir", str(tmp_path)]
    command.append("client.py")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert re.findall(r"Revealed type is \"([\w.]+)\"", done.stdout) == [
        "posenc_export.runtime.session.model.Model",
        "posenc_export.runtime.session.session.Session",
    ]


def test_a_verification_of_ort_cuda_on_the_cpu_says_that_nothing_ran_on_cuda(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    small = "--width 16 --heads 2 --max-positions 32 --verify quick --target ort-cuda"
    folder = str(tmp_path / "artefact")
    assert main(["export", "block", "--encoding", "rope", *small.split(), "-o", folder]) == 0
    assert main(["verify", str(tmp_path / "artefact"), "--provider", "cpu", "--quick"]) == 0
    said = "passed (values on the CPU only; nothing ran on CUDA)\n"
    assert capsys.readouterr().out.endswith(said)


def test_a_check_that_failed_is_named_with_its_first_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    whole = verify_command.verify

    def failing(*arguments: Any, **named: Any) -> Any:
        proof = whole(*arguments, **named)
        proof["checks"]["numbers"]["failures"] = {"layers.0.weight": "expected 1, got 2"}
        return {**proof, "passed": False}

    monkeypatch.setattr(verify_command, "verify", failing)
    assert main(["verify", "tiny-rope", "--quick", "--no-record"]) == 1
    assert "check numbers: layers.0.weight: expected 1, got 2\n" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_python_m_posenc_export_is_the_command(option: str) -> None:
    command = [sys.executable, "-m", "posenc_export", option]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == f"posenc {__version__}\n"


def test_export_verify_and_inspect_count_the_same_cells_and_export_prints_commands_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*BLOCK, "--target", "ort", "--verify", "quick", "-o", "made&kept"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = int(lines[1].split()[2])
    looked, verify, inspect, bench = map(shlex.split, lines[lines.index("next:") + 1 :])
    assert bench == ["posenc", "bench", "made&kept"]
    assert main([*verify[1:], "--quick"]) == 0
    assert f", {cells} cells, " in capsys.readouterr().out.splitlines()[-1]
    assert main(inspect[1 : inspect.index(">")]) == 0
    compile(capsys.readouterr().out, inspect[-1], "exec")
    assert main(looked[1:]) == 0
    assert f"cells {cells} (quick)" in capsys.readouterr().out


def test_a_block_takes_no_text_and_no_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([*BLOCK, "--target", "ort", "--no-verify", "-o", str(tmp_path / "a")]) == 0
    assert main(["generate", str(tmp_path / "a"), "--prompt", "x"]) == 2
    assert "posenc inspect --runtime prints a program that runs it" in capsys.readouterr().err
    session = posenc_export.load(tmp_path / "a").session()
    for tokens in (np.array([[1, 2]]), [[1, 2]]):
        with pytest.raises(ValueError, match="this model reads hidden_states, not token ids"):
            session.prefill(tokens)
