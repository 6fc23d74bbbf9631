"""Pictures of artefacts: what they draw is what the trained module computes."""

import json
import shutil
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.export.trained_numbers import with_trained_encodings
from posenc_export.models.config import StackConfig
from posenc_export.models.placed import placed
from posenc_export.models.presets import load_preset, seeded
from posenc_export.shared.preset_folders import preset_folder
from tests.tiny import VARIANTS, decoder

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
from posenc_export.catalogue.of_models import subjects  # noqa: E402
from posenc_export.catalogue.plots import View, draw, draw_all  # noqa: E402

VIEW = View(distance=40, positions=24)
pytestmark = pytest.mark.xdist_group("pictures of models")


def _drawn(figure: Any) -> List[np.ndarray]:
    """Return all numbers that a figure shows."""
    results = []
    for axes in figure.axes:
        results += [np.asarray(line.get_xydata()) for line in axes.lines] + [
            np.asarray(image.get_array()) for image in axes.images
        ]
    return results


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = _drawn(one), _drawn(other)
    return len(ours) == len(theirs) > 0 and all(
        np.array_equal(*pair) for pair in zip(ours, theirs, strict=True)
    )


def _mixed() -> StackConfig:
    """Return a decoder with learned rows on tokens, and two kinds of layers with other
    encodings.
    """
    config = decoder("t5")
    (layer,) = config.layers.values()
    kinds = {
        name: replace(layer, attention=replace(layer.attention, encodings=specs))
        for name, specs in {"a": (VARIANTS["t5"],), "b": (VARIANTS["shaw"],)}.items()
    }
    return replace(
        config,
        tokens=replace(config.tokens, encodings=(VARIANTS["learned"],)),
        layers=kinds,
        order=("a", "b", "a", "b"),
    )


@pytest.fixture(scope="module")
def trained() -> Any:
    """A model whose encodings have other numbers than a new one, and in each layer of one kind
    other numbers.
    """
    model = seeded(_mixed())
    with torch.no_grad():
        for index, each in enumerate(placed(model)):
            for weight in each.encoding.parameters():
                weight.mul_(1 + index).add_(0.125)
    return model


@pytest.fixture(scope="module")
def folder(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made") / "mixed"
    export(trained, "ort", place, verify=False)
    return place


@pytest.mark.parametrize("name", ["small-t5", "small-fire", "tiny-alibi"])
def test_the_picture_of_a_preset_is_that_of_its_module(name: str) -> None:
    place, model = preset_folder(name), load_preset(name)
    assert place is not None
    assert _equal(
        draw_all(subjects(with_trained_encodings(place), name), VIEW),
        draw_all(subjects(model, name), VIEW),
    )


def test_the_picture_of_a_preset_is_that_of_its_trained_encoding_by_name() -> None:
    place = preset_folder("small-t5")
    assert place is not None and _equal(
        draw_all(subjects(with_trained_encodings(place), "small-t5"), VIEW),
        draw({"name": "t5"}, VIEW),
    )


def test_each_different_encoding_of_an_artefact_is_drawn_as_the_module_computes_it(
    trained: Any, folder: Path
) -> None:
    result = subjects(with_trained_encodings(folder), "mixed")
    assert [subject.title for subject in result] == [
        "learned (mixed, tokens)",
        "t5 (mixed, layers 0, 2)",
        "shaw (mixed, layer 1 of layers 1, 3)",
    ]
    figure = draw_all(result, VIEW)
    assert _equal(figure, draw_all(subjects(trained, "mixed"), VIEW)) and not _equal(
        figure, draw_all(subjects(seeded(_mixed()), "mixed"), VIEW)
    )


def test_one_layer_is_drawn_with_its_own_numbers(folder: Path) -> None:
    model = with_trained_encodings(folder)
    (first,), (last,) = subjects(model, "mixed", 1), subjects(model, "mixed", 3)
    assert last.title == "shaw (mixed, layer 3 of layers 1, 3)" and not _equal(
        draw_all([first], VIEW), draw_all([last], VIEW)
    )


def test_one_large_number_of_a_table_does_not_hide_the_others() -> None:
    model = seeded(decoder("learned"))
    with torch.no_grad():
        placed(model)[0].encoding.table.weight[3, 5] = 1000.0
    image = draw_all(subjects(model, "outlier"), VIEW).axes[0].images[0]
    assert image.get_array().max() == 1000 and image.get_clim()[1] < 1


def test_a_picture_ends_with_the_range_of_the_artefact() -> None:
    model = seeded(decoder("t5", max_positions=30))
    (axes,) = draw_all(subjects(model, "short"), VIEW).axes
    assert axes.lines[0].get_xdata().max() == 29


def test_plot_draws_an_artefact_and_names_what_it_shows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["plot", str(folder), "--distance", "9", "-o", str(tmp_path / "a.svg"), "--json"]) == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert [spec["name"] for spec in shown["encodings"]] == ["learned", "t5", "shaw"] and shown[
        "artefact"
    ] == str(folder)
    assert "shaw (mixed, layer 1 of layers 1, 3)" in (tmp_path / "a.svg").read_text()


def test_a_dollar_in_the_name_of_a_folder_is_drawn_as_it_is(folder: Path, tmp_path: Path) -> None:
    named = tmp_path / "5$ {$"
    shutil.copytree(folder, named)
    picture = tmp_path / "a.svg"
    assert main(["plot", str(named), "--distance", "9", "-o", str(picture)]) == 0
    assert "shaw (5$ {$, layer 1 of layers 1, 3)" in picture.read_text()


REFUSED = {
    "a layer that it lacks": (
        ["FOLDER", "--layer", "4"],
        "plot: expected layer 0 .. 3 of mixed, got 4; choose one in that range",
    ),
    "a head size": (
        ["FOLDER", "--head-size", "8"],
        "plot: expected no --head-size with an artefact, which has its own, got 8; leave it out",
    ),
    "a layer of an encoding": (
        ["rope", "--layer", "0"],
        "plot: expected --layer with the folder of an artefact, got the encoding rope; leave "
        "it out",
    ),
    "a name of nothing": (
        ["nothing"],
        "expected the name of an encoding or a preset, or the folder of an artefact, got "
        "'nothing'; posenc list shows the names",
    ),
    "a preset": (["small-t6"], "got 'small-t6'; did you mean small-t5?"),
    "a folder without an artefact": (
        ["FOLDER/.."],
        "expected posenc.json in it, got none; give one of its subfolders mixed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED[case]
    assert (
        main(
            [
                "plot",
                *(word.replace("FOLDER", str(folder)) for word in arguments),
                "-o",
                str(tmp_path / "none.png"),
            ]
        )
        == 2
    )
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_model_without_positions_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="plot: expected a model with encodings of positions, got none in plain; posenc "
        "inspect prints its layers",
    ):
        subjects(seeded(decoder("nope")), "plain")
