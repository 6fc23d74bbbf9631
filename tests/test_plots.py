"""Pictures: every encoding has one, drawn without complaint, and the command writes it."""

from pathlib import Path

import pytest

from posenc_export import cli
from posenc_export.catalogue.pages import page
from posenc_export.encodings import REGISTRY
from posenc_export.encodings.base import Geometry

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
SMALL = Geometry(width=16, heads=2, head_size=16, max_positions=300)


@pytest.mark.parametrize("name", REGISTRY)
def test_an_encoding_has_a_picture_with_content_in_every_panel(name: str) -> None:
    from posenc_export.catalogue.plots import draw

    figure = draw({"name": name}, SMALL)
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert panels and all(axes.lines or axes.images or axes.collections for axes in panels)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_page_states_formula_hook_and_source(name: str) -> None:
    text = page(name, [{"encoding": name, "model": "decoder", "target": "ort", "tolerance": 1e-5, "full": 1e-6}])
    assert text.startswith(f"# {name}\n") and "Hook:" in text and "```" in text and "| ort | 1.0e-06 | 1.0e-05 |" in text


def test_plot_writes_the_file_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rope.svg"
    assert cli.main(["plot", "rope:theta=500000", "-o", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path) and path.read_text().startswith("<?xml")


def test_plot_refuses_another_kind_of_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plot", "rope", "-o", "rope.gif"]) == 2
    assert "expected a file ending in .png or .svg, got 'rope.gif'" in capsys.readouterr().err
