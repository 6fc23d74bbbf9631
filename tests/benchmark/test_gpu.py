"""bench.gpu: parts in their order, results that an interruption keeps, and a rehearsal."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_page, gpu_proofs

HERE = {"device": "a device", "commit": "abc"}
Parts = dict[str, gpu.Part]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    few = {
        name: part._replace(keys=lambda name=name: [f"{name} {number}" for number in range(2)])
        for name, part in gpu.PARTS.items()
    }
    monkeypatch.setattr(gpu, "PARTS", few)
    return few


def run_until(stop: int, ran: list[tuple[str, str]]) -> gpu.Run:
    def run(part: str, key: str, seconds: float) -> list[dict[str, Any]]:
        if len(ran) == stop:
            raise KeyboardInterrupt
        ran.append((part, key))
        return [{"seconds": seconds}]

    return run


def test_parts_run_in_order_and_an_interrupted_run_continues_with_what_is_missing(
    tmp_path: Path, parts: Parts
) -> None:
    ran: list[tuple[str, str]] = []
    with pytest.raises(KeyboardInterrupt):
        gpu.measure(gpu.Results(tmp_path / "gpu.json", HERE), 25, False, run_until(5, ran))
    kept = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
    # Pieces of a part may run at the same time, and are then kept in the order in which they end.
    assert sorted((row["part"], row["piece"]) for row in kept) == sorted(ran)
    assert [row["part"] for row in kept] == [part for part, _ in ran]
    results = gpu.Results(tmp_path / "gpu.json", HERE)
    assert gpu.measure(results, 25, False, run_until(99, ran))
    assert sorted(set(ran)) == sorted(ran) and len(ran) == 2 * len(parts)
    assert list(dict.fromkeys(part for part, _ in ran)) == list(parts)


def test_no_piece_begins_after_the_time(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ran = [0.0], []
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])

    def run(part: str, key: str, seconds: float) -> list[dict[str, Any]]:
        clock[0] += 400 if part == "prompts" else 0
        ran.append(part)
        return [{"seconds": seconds}]

    assert not gpu.measure(gpu.Results(tmp_path / "gpu.json", HERE), 10, False, run)
    assert ran == ["repaired", "repaired", "prompts", "prompts"]


def test_a_piece_that_fails_is_a_row_with_the_last_line_of_its_error(tmp_path: Path) -> None:
    rows = gpu.in_process(tmp_path, True, "repaired", "no such model", 100)
    assert rows == [{"error": "KeyError: 'no such model'"}]


def test_prompts_and_steps_are_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for part, figures in (
        ("prompts", {"prompt", "after steps", "new length"}),
        ("steps", {"step"}),
    ):
        rows = list(gpu.piece(part, gpu.PARTS[part].keys()[0], tmp_path, True))
        assert rows and all(figures <= row.keys() and row["contestant"] for row in rows)
    assert (tmp_path / "int4" / "posenc.json").exists()


@pytest.mark.exhaustive
def test_a_proof_is_rehearsed(tmp_path: Path) -> None:
    (row,) = gpu.piece("repaired", gpu_proofs.REPAIRED[-1], tmp_path, True)
    assert row["passed"] and row["cells"] > 10


def test_the_page_agrees_with_the_committed_results(tmp_path: Path) -> None:
    text = gpu_page.PAGE.read_text(encoding="utf-8")
    (tmp_path / "cuda.md").write_text(text, encoding="utf-8")
    gpu_page.write(json.loads(gpu_page.RESULTS.read_text(encoding="utf-8")), tmp_path / "cuda.md")
    assert (tmp_path / "cuda.md").read_text(encoding="utf-8") == text


def test_tables_have_the_rows_of_all_devices_side_by_side(tmp_path: Path) -> None:
    page = tmp_path / "cuda.md"
    page.write_text(gpu_page.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    row = {"part": "steps", "piece": "p", "contestant": "ort-cuda", "weights": "int4", "rows": 1}
    row |= {"context": 128, "step": 5e-4, "memory": 900}
    failed = {"part": "parity", "piece": "decoders: rope", "model": "decoders: rope"}
    failed |= {"machine": 1, "passed": False, "worst": 0.5, "at": "cell", "tolerance": 1e-3}
    rows = [{**row, "machine": 0}, {**row, "machine": 1, "step": 4e-4}, failed]
    gpu_page.write({"machines": [HERE, {"device": "other"}], "rows": rows}, page)
    text = page.read_text(encoding="utf-8")
    for line in (
        "| device | a device | other |",
        "| 1 | ort-cuda | int4 | 1 | 128 | 500 | 900 | 1 |",
        "| 2 | ort-cuda | int4 | 1 | 128 | 400 | 900 | 1 |",
        "- Device 2: `decoders: rope` error 5.0e-01 in 'cell', tolerance 1.0e-03",
    ):
        assert line in text.splitlines()
