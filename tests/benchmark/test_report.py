"""The three faces of a report."""

import json
import re
import sys

import pytest

from posenc_export.benchmark.report import Loaded, Report, Row, duration
from posenc_export.benchmark.spread import Spread


@pytest.fixture
def report():
    rows = [
        Row(phase, context, name, Spread(1e-4 * step, 0.9e-4 * step, 1.2e-4 * step, 10), float(step), moved, 1e10 if moved else None, 0.4 if moved else None, 2, 0)
        for phase, moved in (("decode", 4_000_000), ("prefill", None))
        for context in (128, 1024)
        for step, name in enumerate(("fast", "slow <&>"), 1)
    ]
    loads = [Loaded("fast", "artefact", "ort", "cpu", 0.02, 0.01, 90_000_000), Loaded("slow <&>", "eager", "ort", "cpu", 0.3, 12.0, 400_000_000)]
    return Report(loads, rows, 2, 2)


def test_json_holds_every_row_and_reads_back(report):
    content = json.loads(json.dumps(report.to_json()))
    assert [(r["phase"], r["context"], r["contestant"]) for r in content["rows"]] == [(r.phase, r.context, r.contestant) for r in report.rows]
    assert content["rows"][0]["seconds"] == {"median": 1e-4, "low": 0.9e-4, "high": 1.2e-4, "samples": 10}


def test_the_table_is_plain_text_and_counts_redone_samples(report):
    text = report.table()
    assert text.isascii()
    assert "16 disturbed samples redone" in text
    assert re.search(r"^decode +1024 +slow <&> +200 us +180 us +240 us +2.00 +4.00 MB +40% +10 +2 +0$", text, re.MULTILINE)


@pytest.mark.parametrize(("seconds", "text"), [(1.234, "1.23 s"), (0.0123, "12.3 ms"), (8.2e-05, "82.0 us"), (4e-7, "0.40 us"), (123e-6, "123 us")])
def test_a_duration_is_in_the_unit_that_suits_it(seconds, text):
    assert duration(seconds) == text


def test_the_page_loads_nothing_and_names_no_path(report, tmp_path):
    report.html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//|<script|<link|@import|\bsrc=|/home|/work|/tmp|\\Users", text.replace("</", "<"))
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', text))


def test_the_page_shows_a_plot_per_question_and_escapes_names(report, tmp_path):
    report.html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 3
    assert "slow &lt;&amp;&gt;" in text and "slow <" not in text


def test_ids_of_the_plots_do_not_clash_and_references_resolve(report, tmp_path):
    report.html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^")]*)', text)) <= set(ids)


def test_the_same_report_gives_the_same_page(report, tmp_path):
    for name in ("a", "b"):
        report.html(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_missing_matplotlib_names_the_extra(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"install posenc-export\[report\]"):
        report.html(tmp_path / "page.html")


def test_the_plot_of_shares_holds_every_contestant_from_zero_on():
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed")
    from posenc_export.benchmark.page import _shares

    axes = figure.Figure().subplots()
    for name, share in (("slow", 0.001), ("quick", 0.4)):
        _shares(axes, [Row("decode", 128, name, Spread(1e-4, 1e-4, 1e-4, 10), 1.0, 1, 1e10, share, 0, 0)], {})
    low, high = axes.get_ylim()
    assert low == 0 and high >= 40
