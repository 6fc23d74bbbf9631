"""A distribution of its own, built and installed beside the package: what it offers is equal to what the package has."""

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
from posenc_export.cli import main
from posenc_export.export import verify
from posenc_export.testing import check_encoding

pytest.importorskip("setuptools", reason="setuptools builds the distribution")
pytestmark = pytest.mark.xdist_group("distribution")  # one worker builds it
TOP, HERE = Path(__file__).parents[2], Path(__file__).parent
BLOCK = ["export", "block", "--width", "48", "--heads", "6", "--kv-heads", "3", "--head-size", "16", "--max-positions", "64", "--target", "ort"]
HIDDEN = "import sys; sys.modules['torch'] = None; from posenc_export.cli import main; sys.exit(main(['verify', sys.argv[1], '--json']))"


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it is installed in, on no path yet."""
    source, target = tmp_path_factory.mktemp("source") / "dist", tmp_path_factory.mktemp("installed")
    shutil.copytree(HERE / "dist", source)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q"]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(source)], check=True)
    return target


@pytest.fixture
def installed(distribution: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(distribution))
    return distribution


def _proved_elsewhere(folder: Path) -> Any:
    """The proof of a process that has neither torch nor the distribution."""
    environment = {**os.environ, "PYTHONPATH": str(TOP)}
    done = subprocess.run([sys.executable, "-c", HIDDEN, str(folder)], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def artefact(distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the encoding, exported by the command."""
    folder = tmp_path_factory.mktemp("cosine") / "artefact"
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(str(distribution))
        assert main([*BLOCK, "--encoding", "cosine:period=20", "-o", str(folder)]) == 0
    return folder


def test_an_installed_encoding_is_proved_in_another_process_without_its_package(artefact: Path) -> None:
    assert _proved_elsewhere(artefact)["passed"]


def test_an_installed_encoding_is_built_again_and_proved_against_its_module(artefact: Path, installed: Path) -> None:
    assert verify(artefact)["passed"]


def test_an_installed_function_is_exported_and_proved_in_another_process(installed: Path, tmp_path: Path) -> None:
    assert main([*BLOCK, "--encoding", "slow", "-o", str(tmp_path / "artefact")]) == 0
    assert _proved_elsewhere(tmp_path / "artefact")["passed"]


def test_an_artefact_names_the_package_and_inspect_prints_it(artefact: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(artefact)]) == 0
    assert ["package", "cosine, from posenc-mine 1.2.3"] in [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]


def test_building_again_without_the_package_names_it(artefact: Path) -> None:
    with pytest.raises(ValueError, match=r"encoding cosine: expected posenc-mine 1\.2\.3, .* got no such encoding; install posenc-mine"):
        verify(artefact)


def test_list_has_what_is_installed_and_says_of_the_rest_why_not(installed: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["encodings"]}
    assert (rows["cosine"]["hook"], rows["cosine"]["parameters"], rows["cosine"]["package"]) == ("bias", "period=24", "posenc-mine 1.2.3")
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
def test_an_installed_encoding_passes_the_checks_for_authors_on_every_target(name: str, installed: Path) -> None:
    assert all(certificate["passed"] for certificate in check_encoding(encodings.KNOWN[name])["targets"].values())


REFUSED = {
    "absent": "entry point absent = posenc_mine.absent:Absent of posenc-mine 1.2.3 to be importable, got ModuleNotFoundError",
    "failing": "to be importable, got RuntimeError: no licence for this machine; repair or uninstall posenc-mine",
    "period": "expected a subclass of posenc_export.encodings.PositionEncoding, got an object of int",
    "alibi": "encoding alibi: expected one encoding of that name, got one from each of this package and posenc-mine 1.2.3; rename one",
    "cosin": "expected name to be one of",
    "cosine:perod=3": "expected parameter to be one of period, got 'perod'",
    "cosine:period=1.5": "expected period of type int, got '1.5'",
    "cosine:period=1": "cosine: expected a period of at least 2 tokens, got 1",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_cannot_be_used_is_one_line_and_status_2(spec: str, installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([*BLOCK, "--encoding", spec, "-o", str(tmp_path / "artefact")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and REFUSED[spec] in errors[0] and not list(tmp_path.iterdir())


def test_what_is_broken_does_not_touch_what_does_not_use_it(distribution: Path) -> None:
    """In a new process: what is made when a module is imported is made beside the entry points."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOP), str(distribution)])}
    program = "from posenc_export import load_preset; print(type(load_preset('small-alibi').attentions()[0].encoding).__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "posenc_export.encodings.alibi"


def test_a_module_of_the_distribution_is_exported_and_proved_in_another_process(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "artefact"
    assert main(["export", "posenc_mine.tagger:trained", "--target", "ort", "-o", str(folder)]) == 0
    assert _proved_elsewhere(folder)["passed"] and verify(folder, importlib.import_module("posenc_mine.tagger").trained())["passed"]
    assert load(folder).manifest.packages["slow"].version == "1.2.3"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("posenc_mine.taggers:trained", "expected a module posenc_mine.taggers that can be imported, got No module named"),
        ("posenc_mine.tagger:untrained", "expected a function untrained without arguments in posenc_mine.tagger, got None"),
        ("posenc_mine.cosine:CosineOracle", "in posenc_mine.cosine, got missing a required argument: 'period'; write one"),
        ("posenc_mine.tagger:torch", "expected a function torch without arguments"),
    ],
)
def test_a_function_that_gives_no_model_is_one_line_and_status_2(model: str, message: str, installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", model, "--target", "ort", "-o", str(tmp_path / "artefact")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and message in errors[0] and not list(tmp_path.iterdir())
