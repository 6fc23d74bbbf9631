"""`posenc bench`: its arguments, output, files and exit status, without measurements."""

import json

import pytest

from posenc_export import benchmark, cli
from posenc_export.benchmark.report import Report
from tests.benchmark import rows


@pytest.fixture
def asked(monkeypatch):
    """Arguments of the calls of the benchmark, which reports disturbed samples for the last contestant."""
    calls = []

    def run(folders, **options):
        calls.append({"folders": [str(folder) for folder in folders], **options})
        return rows.report([rows.row("ort", [1e-3] * 4), rows.row("onnx", [2e-3] * 4, rounds_disturbed=[1])])

    monkeypatch.setattr(benchmark, "run", run)
    return calls


def test_options_reach_the_measurement(asked, capsys):
    given = "--contexts 16,64 --prefill 128 --batch 4 --threads 3 --rounds 5 --seconds 2 --different-models --runtime eager --runtime genai".split()
    assert cli.main(["bench", "a", "b", *given]) == 0
    (call,) = asked
    del call["progress"]
    numbers = {"contexts": (16, 64), "prompts": (128,), "batch": 4, "threads": 3, "rounds": 5, "seconds": 2.0}
    assert call == {"folders": ["a", "b"], "runtimes": ("eager", "genai"), "different_models": True, "providers": (), **numbers}


@pytest.mark.parametrize(("given", "prompts"), [([], None), (["--prefill", "none"], ())])
def test_prompts_are_the_contexts_or_none(given, prompts, asked, capsys):
    cli.main(["bench", "a", *given])
    assert asked[0]["prompts"] == prompts and len(asked[0]["contexts"]) >= 5  # enough for a curve


def test_json_is_printed_and_written(asked, capsys, tmp_path):
    path = tmp_path / "new" / "report.json"
    assert cli.main(["bench", "a", "--json", "-o", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(path.read_text(encoding="utf-8"))
    assert [row.contestant for row in Report.from_json(printed).rows] == ["ort", "onnx"]


@pytest.mark.parametrize(("given", "status"), [([], 0), (["--fail-on-disturbed"], 1)])
def test_disturbed_samples_fail_only_with_the_option(given, status, asked, capsys):
    assert cli.main(["bench", "a", *given]) == status


REFUSED = [
    (["--contexts", "16;64"], "expected contexts as whole numbers"),
    (["--prefill", "x"], "give --prefill 128"),
    (["-o", "."], "got ., which is no file"),
]


@pytest.mark.parametrize(("given", "rule"), REFUSED)
def test_options_are_refused_before_anything_is_measured(given, rule, asked, capsys):
    assert cli.main(["bench", "a", *given]) == 2
    assert rule in capsys.readouterr().err and asked == []
