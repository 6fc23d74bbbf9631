"""A few mutations, and tests that tests.fuzz.mutations detects planted faults. For many
mutations: `python -m tests.fuzz.mutations`.
"""

import os
import time
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from posenc_export.export import export
from posenc_export.models.presets import seeded
from tests.fuzz import mutations
from tests.fuzz.judge import DISPROVED, PROVED, Judge
from tests.fuzz.mutations import REFUSED, Case
from tests.tiny import block

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.xdist_group("mutations"),  # one worker, which exports for them once
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    for target in ("ort", "torchscript"):
        export(seeded(block("nope", max_positions=64)), target, folder / target, verify=False)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("resealed", [False, True], ids=["sealed", "resealed"])
@pytest.mark.parametrize("target", ["ort", "torchscript"])
def test_mutations_are_refused_in_one_line_or_load_without_harm(
    target: str, resealed: bool, made: Dict[str, Path]
) -> None:
    report = mutations.run(made[target], [Case(1, number, resealed) for number in range(40)])
    assert not report.findings, report.findings
    assert report.counts[REFUSED] + report.counts[PROVED] + report.counts[DISPROVED] == 40
    assert report.counts[REFUSED] == 40 or resealed


def test_a_mutation_is_the_same_each_time(made: Dict[str, Path], tmp_path: Path) -> None:
    for number in range(10):
        edits = [
            Case(3, number, True).write(made["ort"], tmp_path / name) for name in ("one", "other")
        ]
        assert edits[0] == edits[1]
        assert mutations._content(tmp_path / "one") == mutations._content(tmp_path / "other")


def _refuse(line: str) -> None:
    raise ValueError(line)


FAULTS: Dict[str, Callable[[], Any]] = {
    "crash: the process ended with 7": lambda: os._exit(7),
    "hangs": lambda: time.sleep(60),
    "raised KeyError": lambda: {}["states"],
    "raised ValueError: 'artefact x: two": lambda: _refuse("artefact x: two\nlines"),
    "raised ValueError: 'what a library": lambda: _refuse("what a library says"),
    "os.system": lambda: os.system("true"),
    "opened /etc/passwd": lambda: Path("/etc/passwd").read_bytes(),
}


@pytest.mark.parametrize("expected", FAULTS)
def test_a_planted_fault_of_loading_is_found(
    expected: str, made: Dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def loaded(*_: Any, **__: Any) -> None:
        calls.append(1)
        if len(calls) == 2:  # after a mutation
            FAULTS[expected]()

    monkeypatch.setattr(mutations, "Judge", lambda source: lambda folder: PROVED)
    monkeypatch.setattr(mutations, "load", loaded)
    report = mutations.run(
        made["ort"],
        [Case(1, number, True) for number in range(4)],
        keep=tmp_path / "kept",
        limit=1.0,
    )
    assert [finding.case.number for finding in report.findings][:1] == [1]
    assert report.findings[0].outcome.startswith(expected)
    assert sum(report.counts.values()) == 4
    assert (tmp_path / "kept" / "ort-1-1").is_dir()


def test_verification_that_passes_other_numbers_is_found(
    made: Dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge(made["ort"])
    assert judge(made["ort"]) == PROVED
    export(seeded(block("nope", max_positions=64), seed=1), "ort", tmp_path / "other", verify=False)
    assert judge(tmp_path / "other") == "verification passes an artefact that gives other numbers"
    for name in ("model.onnx", "model.onnx.data", "posenc.json"):
        (tmp_path / "other" / name).write_bytes((made["ort"] / name).read_bytes())
    mutations.reseal(tmp_path / "other")
    assert judge(tmp_path / "other") == DISPROVED  # the reference belongs to another artefact


def test_a_mutation_that_loads_with_its_old_hashes_is_found(
    made: Dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations, "load", lambda *_, **__: None)
    assert (
        mutations.run(made["ort"], [Case(1, 0, False)]).findings[0].outcome
        == "loaded although a hash differs"
    )
