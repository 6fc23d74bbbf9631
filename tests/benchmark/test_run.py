"""Whole runs with contestants that only sleep: turns, life cycle of the workers, refusals."""

import itertools
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from posenc_export.benchmark import machine, measurement, run, workers
from posenc_export.benchmark.workers import Worker, started
from posenc_export.export.describe import describe as described
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests

ONE = {"contexts": (16,), "prompts": (), "rounds": 1, "seconds": 0.05}  # a row
FAKE = [sys.executable, str(Path(__file__).parent / "fake_worker.py")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Function that writes an artefact folder with a manifest and a graph that is never opened."""
    monkeypatch.setattr(workers, "COMMAND", FAKE)
    small = {"WORKING_SETS": (1 << 16,), "DURATION": 0.001, "TIMES": 1}
    for name, value in small.items():
        monkeypatch.setattr(machine, name, value)

    def make(name, target="ort", width=32, cached=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").write_bytes(b"")
        block = block_config(width, 4, 128, encoding={"name": "nope"}, causal=cached)
        entry = {"model.onnx": files.entry(tmp_path / name / "model.onnx")}
        manifest = described(seeded(block), target, "positions")
        manifests.write(manifest.replace(files=entry), tmp_path / name)
        return tmp_path / name

    return make


def alive(pid):
    """Return whether a process is running and not a zombie."""
    return state(pid) not in ("", "Z")


def state(pid):
    """Return the letter of a process's state, empty if there is none."""
    path = Path(f"/proc/{pid}/stat")
    return path.read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] if path.exists() else ""


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """Function that returns the process ids of the workers and their children after loading."""
    monkeypatch.setenv("FAKE_WORKER_PIDS", str(tmp_path / "pids"))
    return lambda: [int(line) for line in (tmp_path / "pids").read_text(encoding="ascii").split()]


def test_every_contestant_has_a_row_per_context_and_phase(folder):
    lines = []
    how = {"contexts": (16, 64, 4096), "rounds": 2, "seconds": 0.2, "progress": lines.append}
    report = run([folder("a"), folder("slow", "onnx")], ("eager",), **how)
    axes = ("decode", "prefill"), (16, 64), ("eager", "nope-ort", "nope-onnx")
    rows = {(row.phase, row.tokens, row.contestant) for row in report.rows}
    assert rows == {*itertools.product(*axes)}
    assert any("load nope-onnx" in line for line in lines)


def test_the_slower_contestant_is_found(folder):
    report = run([folder("slow"), folder("a")], contexts=(16,), rounds=3, seconds=0.3)
    medians = [(row.contestant, row.median_seconds) for row in report.rows if row.phase == "decode"]
    assert [name for name, _ in medians] == ["nope-ort in a", "nope-ort in slow"]  # fastest first
    assert medians[1][1] > 2.0 * medians[0][1]


def test_a_range_shorter_than_the_default_contexts_is_one(folder, monkeypatch):
    monkeypatch.setattr(measurement, "CONTEXTS", (512, 1024))
    report = run([folder("a")], rounds=1, seconds=0.05)
    assert {row.tokens for row in report.rows} == {128}  # max_positions


def test_prompts_and_contexts_are_measured(folder):
    report = run([folder("a")], contexts=(16, 32), prompts=(64,), rounds=1, seconds=0.05)
    rows = [(row.phase, row.tokens) for row in report.rows]
    assert rows == [("decode", 16), ("decode", 32), ("prefill", 64)]


def test_a_model_without_a_cache_is_measured_only_at_prefill(folder):
    report = run([folder("a", cached=False)], contexts=(16, 32), rounds=1, seconds=0.05)
    assert [(row.phase, row.tokens) for row in report.rows] == [("prefill", 16), ("prefill", 32)]


def test_tokens_per_second_count_every_row_of_the_batch(folder, monkeypatch):
    monkeypatch.setenv("FAKE_WORKER_BATCH", "3")
    report = run([folder("a")], contexts=(16,), batch=3, rounds=1, seconds=0.05)
    tokens = [row.tokens_per_second * row.median_seconds for row in report.rows]
    assert tokens == pytest.approx([3, 48])


def test_a_report_names_model_artefact_and_digest(folder):
    report = run([folder("a")], **ONE)
    (each,) = report.contestants
    assert (each.contestant, each.model) == ("nope-ort", "nope block 32 0.00M")
    assert each.artefact.endswith("/a")
    # That of a folder with the same content.
    assert each.artefact_digest == manifests.read(folder("again")).digest


def test_the_limits_of_the_machine_are_measured_in_the_same_run(folder):
    limits = run([folder("a")], **ONE).limits
    assert [each.bytes for each in limits.read] == list(machine.WORKING_SETS)
    assert limits.read[0].read_bytes_per_second > 0


def test_workers_are_stopped_between_their_turns(folder):
    given = {"runtime": "artefact", "folder": str(folder("a")), "provider": "cpu"}
    with started(["a", "b"], 1) as pair:
        for worker in pair:
            worker.ask("load", **given, threads=1, batch=1)
        time.sleep(0.05)
        assert [state(worker.child.pid) for worker in pair] == ["T", "T"]


def test_workers_and_their_children_are_gone_after_a_run_an_error_and_an_interrupt(folder, pids):
    def interrupt(line):
        if line.startswith("decode"):
            raise KeyboardInterrupt

    run([folder("a")], ("eager",), contexts=(16,), rounds=1, seconds=0.05)
    rule = "nope-ort in fails: expected load to succeed, got 'the fake fails as told'"
    with pytest.raises(ValueError, match=f"benchmark {rule}"):
        run([folder("b"), folder("fails")], contexts=(16,))
    with pytest.raises(KeyboardInterrupt):
        run([folder("c")], contexts=(16,), progress=interrupt)
    time.sleep(0.05)
    assert len(pids()) >= 8
    assert not any(map(alive, pids()))


def test_the_error_about_a_dead_worker_has_its_last_line_of_output(folder):
    said = r"benchmark nope-ort: .*exit code 7 \(the fake dies as told\)"
    with pytest.raises(ValueError, match=said):
        run([folder("dies")], contexts=(16,))


def test_a_worker_that_does_not_answer_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.2)
    monkeypatch.setattr(workers, "COMMAND", [sys.executable, "-c", "import time; time.sleep(60)"])
    with closing(Worker("mute", 1)) as worker, pytest.raises(ValueError, match="got no reply"):
        worker.ask("load")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"runtimes": ("jax",)}, "runtime to be one of eager, transformers, .*, got 'jax'"),
        ({"contexts": (4096,)}, "at most max_positions, 128 tokens, got 4096"),
        ({"contexts": (1,)}, "at least 2 tokens, got 1"),
        ({"rounds": 0}, "rounds, batch and seconds above 0"),
        ({"batch": 0}, "rounds, batch and seconds above 0"),
        ({"contexts": (), "prompts": ()}, "a context or a prompt to measure, got none"),
    ],
)
def test_options_are_refused(folder, options, rule):
    with pytest.raises(ValueError, match=rule):
        run([folder("a")], **options)


def test_folders_of_two_models_have_rows_that_name_them(folder):
    pair = [folder("a"), folder("b", width=64)]
    report = run(pair, **ONE)
    assert {row.model for row in report.rows} == {"nope block 32 0.00M", "nope block 64 0.02M"}


def test_the_caller_imports_no_runtime_and_no_plots():
    code = (
        "import sys, posenc_export.benchmark.measurement; "
        "sys.exit(str({'torch', 'onnxruntime', 'matplotlib'} & {*sys.modules} or ''))"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert not ended.stderr.strip()
