"""`posenc bench`: its arguments, output, files and exit status, without measurements."""

import json
import sys

import pytest

from posenc_export import benchmark
from posenc_export.commands import cli
from tests.benchmark import rows


@pytest.fixture
def asked(monkeypatch):
    """Arguments of the calls of the benchmark."""
    calls = []

    def run(folders, **options):
        calls.append({"folders": [str(folder) for folder in folders], **options})
        return rows.report([rows.row("ort", [1e-3] * 4), rows.row("onnx", [2e-3] * 4)])

    monkeypatch.setattr(benchmark, "run", run)
    return calls


def test_options_reach_the_measurement(asked, capsys):
    given = (
        "--contexts 16,64 --prefill 128 --batch 4 --threads 3 --rounds 5 --seconds 2 "
        "--runtime eager --runtime genai --baseline eager"
    ).split()
    assert cli.main(["bench", "a", "b", *given]) == 0
    (call,) = asked
    del call["progress"]
    assert call.pop("command").startswith("posenc")
    numbers = {
        "contexts": (16, 64),
        "prompts": (128,),
        "batch": 4,
        "threads": 3,
        "rounds": 5,
        "seconds": 2.0,
    }
    assert call == {
        "folders": ["a", "b"],
        "runtimes": ("eager", "genai"),
        "baseline": "eager",
        **numbers,
    }


@pytest.mark.parametrize(("given", "prompts"), [([], None), (["--prefill", "none"], ())])
def test_prompts_are_the_contexts_or_none(given, prompts, asked, capsys):
    cli.main(["bench", "a", *given])
    assert asked[0]["prompts"] == prompts and asked[0]["contexts"] is None


def test_json_is_printed_and_written(asked, capsys, tmp_path):
    path = tmp_path / "new" / "report.json"
    assert cli.main(["bench", "a", "--json", "-o", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(path.read_text(encoding="utf-8"))
    assert [row["contestant"] for row in printed["rows"]] == ["ort", "onnx"]


def test_a_report_replaces_reports_and_no_other_file(asked, capsys, tmp_path):
    written = [("-o", tmp_path / "a.json"), ("--html", tmp_path / "a.html")]
    for option, path in written * 2:
        assert cli.main(["bench", "a", option, str(path)]) == 0
    contents = [path.read_bytes() for _, path in written]
    for option, path in zip(
        ("-o", "--html"), (tmp_path / "a.html", tmp_path / "a.json"), strict=True
    ):
        assert cli.main(["bench", "a", option, str(path)]) == 2
        assert (
            f"expected a file that is new, empty or written by posenc bench, got {path}, "
            "which holds something else"
        ) in capsys.readouterr().err
    assert [path.read_bytes() for _, path in written] == contents and len(asked) == 4


def test_a_report_is_not_written_into_an_artefact(asked, capsys, tmp_path):
    (tmp_path / "posenc.json").write_text("{}")
    for option in ("-o", "--html"):
        assert cli.main(["bench", "a", option, str(tmp_path / "report")]) == 2
        assert "outside any artefact" in capsys.readouterr().err
    assert asked == [] and [path.name for path in tmp_path.iterdir()] == ["posenc.json"]


def test_a_missing_matplotlib_names_the_extra(asked, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "a", "--html", str(tmp_path / "page.html")]) == 2
    assert "pip install 'posenc-export[report]'" in capsys.readouterr().err and asked == []


REFUSED = [(["-o", "."], "got ., which is no file")]


@pytest.mark.parametrize(("given", "rule"), REFUSED)
def test_options_are_refused_before_anything_is_measured(given, rule, asked, capsys):
    assert cli.main(["bench", "a", *given]) == 2
    assert rule in capsys.readouterr().err and asked == []
