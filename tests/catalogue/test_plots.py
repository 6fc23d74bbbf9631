"""Pictures: every encoding has one, it is drawn without warnings, and the command writes it."""

import cmath
import math
from pathlib import Path
from typing import Any

import pytest

from posenc_export import encodings
from posenc_export.catalogue.picture_weights import TABLES, build_for_picture
from posenc_export.catalogue.plots import View, draw
from posenc_export.commands import cli
from posenc_export.encodings import REGISTRY, Geometry
from posenc_export.shared.numerics import tolerance

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.mark.parametrize("name", REGISTRY)
def test_an_encoding_has_a_picture_with_content_in_every_panel(name: str) -> None:
    figure = draw({"name": name}, View(distance=31, head_size=16, positions=32))
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert panels and all(axes.lines or axes.images or axes.collections for axes in panels)


def test_encodings_are_drawn_side_by_side_with_a_title_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot", "rope", "alibi", "t5"]) == 0
    assert capsys.readouterr().out == "rope-alibi-t5.png\n" and Path("rope-alibi-t5.png").exists()
    specs = [{"name": "rope"}, {"name": "alibi"}]
    columns = draw(specs).subfigs
    assert [column.get_suptitle() for column in columns] == ["rope", "alibi"]
    alone = [[axes.get_title() for axes in draw(spec).axes] for spec in specs]
    assert [[axes.get_title() for axes in column.axes] for column in columns] == alone


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plot_replaces_its_own_pictures_and_no_other_file(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, drawn = tmp_path / f"mine{suffix}", tmp_path / f"drawn{suffix}"
    mine.write_bytes(b"mine")
    assert [
        cli.main(["plot", "alibi", "--distance", "7", "-o", str(path)])
        for path in (drawn, drawn, mine)
    ] == [0, 0, 2]
    assert (
        "plot: expected a file that is new, empty or written by posenc plot, got"
        in capsys.readouterr().err
        and mine.read_bytes() == b"mine"
    )


def test_plot_refuses_another_kind_of_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plot", "rope", "-o", "rope.gif"]) == 2
    assert "expected a file ending in .png or .svg, got 'rope.gif'" in capsys.readouterr().err


def _panel(figure: Any, title: str) -> Any:
    return next(axes for axes in figure.axes if title in axes.get_title())


def test_the_bound_of_rope_starts_at_distance_0_and_names_the_given_theta() -> None:
    axes = _panel(draw({"name": "rope", "theta": 1000.0}, View(distance=40, head_size=16)), "bound")
    named = [line.get_label() for line in axes.lines]
    assert named == ["1000 (this one)", "10000", "500000"] and all(
        line.get_ydata()[0] == 1 and len(line.get_ydata()) == 41 for line in axes.lines
    )


def test_the_bound_of_rope_agrees_with_its_definition() -> None:
    line = _panel(draw({"name": "rope"}, View(distance=9, head_size=8)), "bound").lines[0]
    turns = [cmath.exp(9j * 10000.0 ** (-2 * k / 8)) for k in range(4)]
    expected = sum(abs(sum(turns[:j])) for j in range(1, 5)) / (1 + 2 + 3 + 4)
    assert abs(line.get_ydata()[9] - expected) <= tolerance("float32", 1, 8)


def test_inner_products_of_a_sinusoid_are_the_same_curve_at_every_position() -> None:
    lines = _panel(draw({"name": "sinusoidal"}, View(positions=32)), "inner products").lines
    curves = [dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in lines]
    shared = set(curves[0]) & set(curves[1]) & set(curves[2])
    assert len(shared) == 16 and all(
        abs(curve[d] - curves[0][d]) <= tolerance("float32", 1, 64)
        for curve in curves
        for d in shared
    )


@pytest.mark.parametrize(("name", "count"), [("mrope", [8, 12, 12]), ("rope_axial", [16, 16])])
def test_rotations_of_grids_show_the_pairs_of_each_axis(name: str, count: list[int]) -> None:
    lines = _panel(draw({"name": name}, View(distance=15)), "by pair and axis").lines
    assert [len(line.get_xdata()) for line in lines] == count


def test_mixed_rotations_are_drawn_as_maps_around_the_query() -> None:
    view = View(distance=15, head_size=16)
    encoding, _, _ = build_for_picture({"name": "rope_2d"}, view.geometry)
    map_of_head = _panel(draw({"name": "rope_2d"}, view), "head 0").images[0].get_array()
    rows, columns = encoding.along.value[:, 0].detach().double().numpy()
    expected = sum(math.cos(3 * a - 2 * b) for a, b in zip(rows, columns, strict=True)) / len(rows)
    assert map_of_head[16, 16] == map_of_head.max() == 1 and abs(
        map_of_head[19, 14] - expected
    ) <= tolerance("float32", 1, 16)


@pytest.mark.parametrize("name", ["pope", "rope_2d"])
def test_scores_are_drawn_highest_at_the_query(name: str) -> None:
    values = (
        _panel(draw({"name": name}, View(distance=31)), "score of equal vectors")
        .lines[0]
        .get_ydata()
    )
    assert values.argmax() == 0


def test_a_convolution_adds_the_same_to_all_tokens_beyond_its_filter() -> None:
    entries = _panel(draw({"name": "conditional_conv"}), "by position").images[0].get_array()
    assert (
        entries.shape[1] == 32
        and abs(entries[:, 3:] - entries[:, 3:4]).max() == 0
        and abs(entries[:, 2] - entries[:, 3]).max() > 0
    )


@pytest.mark.parametrize("name", REGISTRY)
def test_the_title_names_the_drawn_weights_of_encodings_that_have_weights(name: str) -> None:
    encoding, _, said = build_for_picture({"name": name}, Geometry(16, 2, 16, 64))
    assert bool(said) == bool(list(encoding.parameters()))


def test_plot_takes_distance_head_size_and_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(
            [
                *"plot rope --distance 12 --head-size 8 --positions 16 -o".split(),
                str(tmp_path / "rope.png"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert cli.main(["plot", "rope", "--distance", "0", "-o", str(tmp_path / "none.png")]) == 2
    assert (
        "plot: expected distance 1 .. 65536, got 0; choose one in that range"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "none.png").exists()


def test_every_table_that_pictures_fill_is_a_parameter_of_its_encoding() -> None:
    for name, tables in TABLES.items():
        encoding = encodings.build({"name": name}, Geometry(16, 2, 16, 64))
        assert set(tables) <= dict(encoding.named_parameters()).keys()
