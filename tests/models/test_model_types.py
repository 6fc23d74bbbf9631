"""The program that tries every model type of transformers says what it found."""

import json
from pathlib import Path
from typing import Any

import pytest

from posenc_export.export import read_module

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from bench import model_types  # noqa: E402
from bench.small_models import LAYERS, TRAINED, small  # noqa: E402
from tests.cases import choice  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # transformers warns about deprecated configurations


def test_a_small_model_has_its_limits_below_the_tokens_that_are_tried() -> None:
    config = small("olmo3", transformers.AutoModelForCausalLM).config
    assert config.max_position_embeddings == TRAINED < model_types.TOKENS
    assert config.sliding_window < TRAINED and len(set(config.layer_types)) == 2
    assert config.num_hidden_layers == LAYERS


def test_a_table_of_positions_holds_the_tokens_that_are_tried() -> None:
    model = small("opt", transformers.AutoModelForCausalLM)
    assert model.config.max_position_embeddings > model_types.TOKENS


def test_a_type_without_small_sizes_is_told_from_one_that_is_refused() -> None:
    tasks = {"causal": "gemma4_assistant", "ctc": "wav2vec2"}
    found = [model_types.tried(task, name, ()) for task, name in tasks.items()]
    assert [row.verdict for row in found] == ["no small configuration", "refused"]
    assert found[1].why.startswith("checkpoint: expected Wav2Vec2ForCTC to read input_ids")


def test_a_type_is_tried_in_a_process_of_its_own_with_a_limit_of_time() -> None:
    row = model_types.in_child("causal", "llama", (), seconds=0.0, memory=64)
    assert row.verdict == "refused" and row.why == "over 0 s"
    assert row.version == transformers.__version__


READ = [("starcoder2", ()), ("lfm3", ("onnx",))]  # with a filter before attention


@pytest.mark.parametrize(("name", "targets"), choice(READ, READ[:1]))
def test_a_type_that_is_read_is_exact_in_all_calls(name: str, targets: tuple[str, ...]) -> None:
    row = model_types.tried("causal", name, targets)
    assert row.verdict == "exact" and row.error < 1e-5 < row.size
    assert row.targets == targets


def test_calls_that_differ_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_module.as_model

    def of_other_weights(published: Any) -> Any:
        for parameter in published.parameters():
            parameter.data = 1.5 * parameter.data
        return read(published)

    monkeypatch.setattr(read_module, "as_model", of_other_weights)
    row = model_types.tried("causal", "starcoder2", ())
    assert row.verdict == "wrong" and row.error > 0.01 * row.size > 0


ROWS = [
    model_types.Row("causal", "llama", "exact", 3e-6, 2.0, "", ("ort",), 4.0),
    model_types.Row("causal", "granite", "wrong", 0.5, 2.0),
    model_types.Row("masked", "reformer", "refused", why="a | b", version="5.24.0"),
]


def test_the_page_counts_results_and_has_a_line_for_each_type() -> None:
    page = model_types.page(ROWS, "5.24.0")
    assert ": 2 with 5.23.0, 1 with 5.24.0)" in page
    assert "| causal | 2 | 1 | 0 | 0 | 1 |" in page and "| masked | 1 | 0 | 1 | 0 | 0 |" in page
    assert "| causal | `llama` | exact | 3e-06 of 2.0 |  |" in page
    assert "| causal | `granite` | wrong | 5e-01 of 2.0 |  |" in page
    assert "| masked | `reformer` | refused |  | a \\| b |" in page


def test_results_are_kept_line_by_line_and_the_last_of_a_type_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    again = ROWS[0]._replace(verdict="wrong")
    path.write_text("".join(json.dumps(row) + "\n" for row in (*ROWS, again)))
    rows = model_types.read_rows(path)
    assert rows["causal", "llama"].verdict == "wrong" and len(rows) == 3
