"""Edges follow from the description of a model; what no cell reaches is named."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from posenc_export.commands.cli import main
from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.export import export
from posenc_export.export.expected import edges_of
from posenc_export.models.presets import seeded
from posenc_export.runtime import verify
from posenc_export.runtime.verification import grid_inputs
from tests import tiny
from tests.traces import sources

VARIANTS: dict[str, dict[str, int]] = {
    "rope": {},
    "rope_dynamic-short": {"original length 20": 20},
    "rope_longrope-short": {"original length 20": 20},
    "rope_longrope-long": {},
    "dual_chunk": {"second chunk": 96, "end of the local window": 129, "third chunk": 192},
    "logn": {"temperature from 512": 512},
    "logn-steps": {"temperature from 6": 6},
    "shaw-bert": {"left 7": 8, "right 5": 6},
    "t5": {"last bucket": 113, "max distance": 128},
    "layout_bias-near": {
        "last bucket": 7,
        "max distance": 20,
        "last bucket of boxes": 29,
        "max distance of boxes": 90,
    },
    "wavlm-near": {"last bucket": 14, "max distance": 20},
    "deberta-v1": {"last bucket": 9, "max distance": 10},
    "inkling-near": {"extent 9": 9},
    "cope-short": {"6 counts": 6},
    "fire": {"threshold 512": 512},
    "transformer_xl-clamped": {"clamp 7": 8},
    "hierarchical-rows": {"200 rows": 200},
}
SEES = {"window": ({"size": 300}, {"window 300": 300}), "chunk": ({"size": 16}, {"chunk 16": 16})}


def _named(config: Any) -> dict[str, int]:
    return edges_of(seeded(config))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_encoding_states_where_its_formula_changes(variant: str) -> None:
    assert _named(tiny.block(variant)) == VARIANTS[variant]


@pytest.mark.parametrize("name", SEES)
def test_a_rule_of_visibility_states_where_keys_become_invisible(name: str) -> None:
    parameters, expected = SEES[name]
    config = tiny.attending(tiny.decoder("rope"), sees={"name": name, **parameters})
    assert _named(config) == expected


def test_an_edge_outside_the_range_of_positions_is_left_out() -> None:
    config = tiny.attending(tiny.decoder("rope"), sees={"name": "window", "size": 1100})
    assert _named(config) == {}


def test_the_last_bucket_of_both_directions_is_an_edge() -> None:
    assert _named(tiny.encoder("t5-near")) == {"last bucket": 7, "max distance": 20}


def test_the_edges_of_several_encodings_are_those_of_each() -> None:
    both = [tiny.VARIANTS["rope_dynamic-short"], tiny.VARIANTS["logn-steps"]]
    block = tiny.block("rope")
    config = replace(block, attention=replace(block.attention, encodings=tuple(both)))
    assert _named(config) == {"temperature from 6": 6, "original length 20": 20}


def test_positions_behind_which_float32_has_gaps_are_an_edge() -> None:
    assert _named(tiny.block("alibi", max_positions=(1 << 24) + 40)) == {"2^24": 1 << 24}


def test_an_encoding_without_edges_of_its_own_has_none() -> None:
    assert PositionEncoding().edges() == {}


@pytest.mark.parametrize("at", [8, 64, 1023])
def test_a_run_holds_two_tokens_on_either_side_of_an_edge_within_the_sequence(at: int) -> None:
    (run,) = grid_inputs.runs({"edge": at}, 1024)
    assert (run.first, run.edge, run.end) == (at - 2, at, min(at + 3, 1024))


def test_edges_with_common_neighbours_are_one_run() -> None:
    (run,) = grid_inputs.runs({"first": 10, "second": 13}, 100)
    assert (run.first, run.edge, run.end, run.names) == (8, 10, 16, ("first", "second"))


def test_a_window_that_is_too_far_is_named_as_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grid_inputs, "LONGEST", 64)
    config = tiny.attending(tiny.decoder("rope"), sees={"name": "window", "size": 300})
    manifest = export(sources(config), "ort", tmp_path / "artefact")
    unreached = {"window 300": "300, behind the 64 tokens that are read"}
    assert manifest.certificate is not None and manifest.certificate["unreached"] == unreached
    main(["inspect", str(tmp_path / "artefact")])
    assert "window 300 (300, behind the 64 tokens" in capsys.readouterr().out
    assert verify(tmp_path / "artefact", "cpu")["unreached"] == unreached


def test_a_bidirectional_model_is_read_beyond_its_reach_in_one_call(tmp_path: Path) -> None:
    config = tiny.attending(tiny.encoder("rope"), sees={"name": "near", "reach": 40})
    manifest = export(sources(config), "ort", tmp_path / "artefact")
    assert manifest.certificate is not None
    assert "one call of 105 tokens, window 41" in manifest.certificate["cells"]
    assert "one call of 105 tokens, window 41" in verify(tmp_path / "artefact", "cpu")["cells"]


def test_names_of_edges_of_ones_own_encoding_are_printable() -> None:
    class Own(PositionEncoding):
        def edges(self) -> Any:
            return {"bell \a " * 20: 5}

    model = seeded(tiny.block("rope"))
    model.attention.encoding = Own()
    (name,) = edges_of(model)
    assert name.isprintable() and len(name) <= 64
