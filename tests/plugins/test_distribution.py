"""Encodings of a separate distribution have the same features as built-in ones. The distribution
is built and installed for these tests.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posenc_export import encodings, load
from posenc_export.commands.cli import main
from posenc_export.export import verify
from posenc_export.testing import check_encoding

pytest.importorskip("setuptools", reason="setuptools builds the distribution")
pytestmark = pytest.mark.xdist_group("distribution")  # one worker builds it
TOP, HERE = Path(__file__).parents[2], Path(__file__).parent
BLOCK = (
    "export block --width 48 --heads 6 --kv-heads 3 --head-size 16 --max-positions 64 --target ort"
).split()
HIDDEN = (
    "import sys; sys.modules['torch'] = None; from posenc_export.commands.cli import main; "
    "sys.exit(main(['verify', sys.argv[1], '--json']))"
)


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the distribution is installed, not yet on the path."""
    source = tmp_path_factory.mktemp("source") / "dist"
    target = tmp_path_factory.mktemp("installed")
    shutil.copytree(HERE / "dist", source)
    offline = "--no-deps --no-build-isolation --no-index --disable-pip-version-check -q".split()
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(source)],
        check=True,
    )
    return target


@pytest.fixture
def installed(distribution: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(distribution))
    return distribution


def _proved_elsewhere(folder: Path) -> Any:
    """Verify an artefact in a process that has neither torch nor the distribution."""
    return json.loads(_printed(TOP, HIDDEN, str(folder)))


def _printed(path: object, *program: str) -> str:
    """Run a program with a path of modules, and return what it prints."""
    how: Any = {"capture_output": True, "text": True, "check": True}
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return str(subprocess.run([sys.executable, "-c", *program], env=environment, **how).stdout)


@pytest.fixture(scope="module")
def artefact(distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artefact of the encoding, exported by the command."""
    folder = tmp_path_factory.mktemp("cosine") / "artefact"
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(str(distribution))
        assert main([*BLOCK, "--encoding", "cosine:period=20", "-o", str(folder)]) == 0
    return folder


def test_an_installed_encoding_is_verified_in_another_process_without_its_package(
    artefact: Path,
) -> None:
    assert _proved_elsewhere(artefact)["passed"]


def test_an_installed_encoding_is_rebuilt_and_verified_against_its_module(
    artefact: Path, installed: Path
) -> None:
    assert verify(artefact)["passed"]


def test_an_installed_function_is_exported_and_verified_in_another_process(
    installed: Path, tmp_path: Path
) -> None:
    assert main([*BLOCK, "--encoding", "slow", "-o", str(tmp_path / "artefact")]) == 0
    assert _proved_elsewhere(tmp_path / "artefact")["passed"]


def test_an_artefact_names_the_package_and_inspect_prints_it(
    artefact: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["inspect", str(artefact)]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["package", "cosine, from posenc-mine 1.2.3"] in lines


def test_the_error_about_rebuilding_without_the_package_names_it(artefact: Path) -> None:
    said = r"expected posenc-mine 1\.2\.3, .* got no such encoding; install posenc-mine"
    with pytest.raises(ValueError, match=f"encoding cosine: {said}"):
        verify(artefact)


def test_list_shows_installed_encodings_and_why_others_cannot_be_used(
    installed: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["encodings"]}
    cosine = {"hook": "bias", "parameters": "period=24", "package": "posenc-mine 1.2.3"}
    assert rows["cosine"].items() >= cosine.items()
    assert rows["slow"]["source"] == "A slow decay, as one function (made for these tests)."
    refused = {name for name, row in rows.items() if row["source"].startswith("refused: ")}
    assert refused == {"absent", "failing", "period", "alibi"} and rows["rope"]["package"] == "-"


@pytest.mark.parametrize("spec", ["cosine:period=40", "slow"])
def test_an_installed_encoding_is_plotted(spec: str, installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main(["plot", spec, "-o", str(tmp_path / "picture.svg")]) == 0
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["cosine", "slow"])
def test_an_installed_encoding_passes_the_checks_for_authors_on_every_target(
    name: str, installed: Path
) -> None:
    certificates = check_encoding(encodings.KNOWN[name])["targets"].values()
    assert all(certificate["passed"] for certificate in certificates)


REFUSED = {
    "absent": (
        "entry point absent = posenc_mine.absent:Absent of posenc-mine 1.2.3 to be importable, "
        "got ModuleNotFoundError"
    ),
    "failing": (
        "to be importable, got RuntimeError: no licence for this machine; repair or uninstall "
        "posenc-mine"
    ),
    "period": "expected a subclass of posenc_export.encodings.PositionEncoding, got an object of "
    "int",
    "alibi": (
        "encoding alibi: expected one encoding of that name, got one from each of this package "
        "and posenc-mine 1.2.3; rename one"
    ),
    "cosin": "expected a known name, got 'cosin'; did you mean cosine?",
    "cosine:perod=3": "expected parameter to be one of period, got 'perod'",
    "cosine:period=1.5": "expected period of type int, got '1.5'",
    "cosine:period=1": "cosine: expected a period of at least 2 tokens, got 1",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_an_unusable_encoding_is_one_line_and_status_2(
    spec: str, installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([*BLOCK, "--encoding", spec, "-o", str(tmp_path / "artefact")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and REFUSED[spec] in errors[0] and not list(tmp_path.iterdir())


def test_a_broken_entry_point_does_not_affect_commands_that_do_not_use_it(
    distribution: Path,
) -> None:
    """Run in a new process, because encodings are registered when modules are imported."""
    program = (
        "from posenc_export import load_preset; "
        "print(type(load_preset('small-alibi').attentions()[0].encoding).__module__)"
    )
    printed = _printed(f"{TOP}{os.pathsep}{distribution}", program)
    assert printed.strip() == "posenc_export.encodings.alibi"


def test_a_module_of_the_distribution_is_exported_and_verified_in_another_process(
    installed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "artefact"
    options = ["--target", "ort", "-o", str(folder), "--max-positions", "64"]
    assert main(["export", "posenc_mine.tagger:trained", *options]) == 0
    assert _proved_elsewhere(folder)["passed"]
    assert verify(folder, importlib.import_module("posenc_mine.tagger").trained()[0])["passed"]
    assert load(folder, provider="cpu").manifest.packages == {}  # the graph is all it needs


@pytest.mark.parametrize(("model", "message"), [
    ("posenc_mine.taggers:trained",
        "expected a module posenc_mine.taggers that can be imported, got ModuleNotFoundError: No"),
    ("posenc_mine.tagger:untrained",
        "expected a model or a function without arguments in posenc_mine.tagger, got no "
        "name untrained; did you mean trained?"),
    ("posenc_mine.cosine:CosineOracle",
        "expected a model or a function without arguments in posenc_mine.cosine, got <class"),
    ("posenc_mine.tagger:torch",
        "expected a model or a function without arguments in posenc_mine.tagger, got <module"),
])  # fmt: skip
def test_a_function_that_returns_no_model_is_one_line_and_status_2(
    model: str, message: str, installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["export", model, "--target", "ort", "-o", str(tmp_path / "artefact")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and message in errors[0] and not list(tmp_path.iterdir())
