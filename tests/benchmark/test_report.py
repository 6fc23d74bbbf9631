"""A report as JSON, as a table and as an HTML page."""

import base64
import json
import re

import msgspec
import pytest

from posenc_export.benchmark import page
from posenc_export.benchmark.report import Report, duration
from tests.benchmark import rows

LIMIT = {"least_bytes": 4_000_000, "read_bytes_per_second": 1e10, "share_of_limit": 0.4}


@pytest.fixture
def report():
    """A report of two contestants at two numbers of tokens; the second one takes twice as long."""
    samples = {"fast": [9e-5, 1e-4, 1e-4, 1e-4, 12e-5]}
    samples["slow <&>"] = [2 * seconds for seconds in samples["fast"]]
    return rows.report(
        rows.row(name, seconds, phase, tokens, **limit)
        for phase, limit in (("decode", LIMIT), ("prefill", {}))
        for tokens in (128, 1024)
        for name, seconds in samples.items()
    )


def test_json_reads_back_as_the_same_report(report):
    content = json.loads(json.dumps(report.to_json()))
    assert content.pop("headlines") == report.headlines
    assert msgspec.convert(content, Report) == report


def test_the_table_is_plain_text(report):
    text = report.table()
    assert text.isascii() and "busy" not in text
    numbers = r"200 us +188 us +224 us +5000 +2.00 \(2.00 .. 2.00\) +40% +5"
    assert re.search(rf"^decode +1024 +slow <&> +rope 2x64 0.06M +{numbers}$", text, re.M)


def test_the_ratio_is_blank_with_few_rounds():
    text = rows.report([rows.row("ort", [1e-3] * 4)]).table()
    numbers = r"1.00 ms +1.00 ms +1.00 ms +1000 +4"
    assert re.search(rf"^decode +1024 +ort +rope 2x64 0.06M +{numbers}$", text, re.M)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234, "1.23 s"), (0.0123, "12.3 ms"), (8.2e-05, "82.0 us"), (4e-7, "0.40 us")],
)
def test_a_duration_has_the_largest_unit_in_which_it_is_at_least_1(seconds, text):
    assert duration(seconds) == text


def test_the_page_loads_nothing_and_names_no_path(report):
    text = page.render(report)
    sources = re.findall(r'\bsrc="([^"]*)"', text)
    begin, elsewhere = "data:image/svg+xml;base64,", r"/home|/work|/tmp|\\Users"
    assert len(sources) == 3 and all(source.startswith(begin) for source in sources)
    drawn = [base64.b64decode(source.split(",")[1]).decode() for source in sources]
    drawn = [re.sub(r'xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>', "", image) for image in drawn]
    for part in (re.sub(r'src="[^"]*"', "", text), *drawn):
        tags = part.replace("</", "<").replace("/>", ">")
        assert not re.search(rf"https?:|//|<script|<link|@import|\bsrc=|{elsewhere}", tags)


def test_a_dollar_in_a_name_is_drawn_as_it_is():
    name = "5$ {$"
    result = rows.report([rows.row(name, [1e-3] * 5, tokens=tokens) for tokens in (128, 1024)])
    plots = re.findall(r'base64,([^"]*)', page.render(result))
    assert len(plots) == 1 and name in base64.b64decode(plots[0]).decode()


def test_the_page_begins_with_the_model_and_the_result_and_marks_a_busy_machine_once():
    times = {"ort": [1e-3, 1.1e-3, 1e-3, 1e-3, 1.2e-3], "onnx": [2e-3, 2.1e-3, 2e-3, 2e-3, 2.2e-3]}
    each = [(tokens, *one) for tokens in (128, 1024) for one in times.items()]
    each = [rows.row(name, samples, tokens=tokens) for tokens, name, samples in each]
    result = rows.report(each, other_cores=1.25)
    text = page.render(result)
    head = re.sub("<[^>]*>", " ", text[text.index("<h1>") : text.index("<table>")])
    title = "posenc benchmark of rope 2x64 0.06M".split()
    assert head.split()[: len(title)] == title
    assert "Decode at 128 and 1024 cached tokens, time relative to ort: onnx 2.00 (" in head
    assert text.count('class="mark"') == 1 and text.count("other processes used") == 1


def test_a_contestant_has_one_colour_in_the_table_and_in_all_plots():
    result = rows.report(
        rows.row(name, [1e-3] * 5, phase, tokens)
        for tokens in (128, 1024)
        for phase, names in (("decode", "ab"), ("prefill", "ba"))
        for name in names
    )
    text = page.render(result)
    of_table = {*re.findall(r'background:(#\w+)"></span>([^<]*)<', text)}
    assert of_table == {(page.COLOURS[0], "a"), (page.COLOURS[1], "b")}
    drawn = [base64.b64decode(source).decode() for source in re.findall(r'base64,([^"]*)', text)]
    assert len(drawn) == 2
    for plot in drawn:
        named = re.findall(r'<text style="[^"]*fill: (#\w+)[^"]*"[^>]*>([ab])<', plot)
        assert {*named} == of_table


def test_the_table_of_the_page_is_in_the_order_of_speed_with_intervals_and_without_empty_columns(
    report,
):
    each = [rows.row("a", [4e-3, 4e-3, 4e-3, 6e-3, 4e-3]), rows.row("b", [1e-3] * 5)]
    result = rows.report(each, other_cores=1.25)
    text, others = page.render(result), page.render(report)
    body = text[text.index("<table>") :]
    assert re.findall(r'"></span>([^<]*)<', body) == ["b", "a"]
    assert '4.00 ms<div class="note">x 4.0 (4.0 .. 6.0)</div>' in body
    assert not [part for part in ("perplexity", "<img", "bands") if part in text]
    busy = (
        "Measured on a busy machine: other processes used 1.2 cores. Threads of torch wait for "
        "free cores with OMP_WAIT_POLICY=PASSIVE."
    )
    assert "bands hold" in others and f'<span class="mark">{busy}</span>' in text
    assert "Column of limit: the bytes" not in text and "Column of limit: the bytes" in others


def test_times_that_vary_by_more_than_3_are_marked_and_one_thread_is_named():
    result = rows.report(
        [rows.row("ort", [1e-3] * 5), rows.row("eager", [1e-3, 1e-3, 9e-2, 9e-2, 9e-2])]
    )
    text = result.table()
    assert re.search(r"eager .* ~ 90.0 ms .* 90 \(1.0 .. 90\) +5$", text, re.M)
    assert "~ 1.00 ms" not in text
    said = "~ marks times whose 90th percentile is more than 3 times the 10th, and whose ratio "
    assert f"{said}is uncertain; --threads 1 needs only one free core." in text
    rendered = page.render(result)
    assert "~ 90.0 ms" in rendered and "--threads 1" in rendered
    assert "marks times" not in rows.report([rows.row("ort", [1e-3] * 5)]).table()
