"""Verdicts on artificial samples."""

import pytest

from posenc_export.benchmark.verdicts import verdicts
from tests.benchmark.rows import row


def test_a_verdict_names_the_faster_contestant_with_ratio_and_spread():
    (verdict,) = verdicts([row("onnx", [2.0, 2.0, 2.2, 2.0]), row("ort", [1.0, 1.0, 1.0, 1.0])])
    assert (verdict.fastest, verdict.following) == ("ort", "onnx")
    assert verdict.text == "decode at 1024 cached tokens: ort is 2.00 times as fast as onnx; the spread is 2.00 to 2.14"


def test_a_difference_within_the_spread_is_no_difference():
    (verdict,) = verdicts([row("ort", [1.0, 1.1, 1.0, 1.1]), row("genai", [1.1, 1.0, 1.1, 1.05])])
    assert "no difference beyond the spread between ort and genai; the spread is 0.92 to 1.10" in verdict.text


def test_drift_of_both_contestants_does_not_hide_a_difference():
    (verdict,) = verdicts([row("ort", [1.0, 2.0, 3.0, 4.0]), row("onnx", [1.1, 2.2, 3.3, 4.4])])
    assert "ort is 1.10 times as fast as onnx; the spread is 1.10 to 1.10" in verdict.text


@pytest.mark.parametrize("number", [0, 1])
def test_disturbed_rounds_of_either_contestant_do_not_count(number):
    rows = [row("ort", [1.0] * 4), row("onnx", [2.0] * 4)]
    times = [rows[number].samples_seconds[0] * 1.9, *rows[number].samples_seconds[1:]]
    rows[number] = row(rows[number].contestant, times, rounds_disturbed=[0])
    (verdict,) = verdicts(rows)
    assert (verdict.ratio.low, verdict.ratio.high, verdict.ratio.samples) == (2.0, 2.0, 3)


def test_two_undisturbed_rounds_are_too_few_for_a_verdict():
    (verdict,) = verdicts([row("ort", [1.0] * 4, rounds_disturbed=[0]), row("onnx", [2.0] * 4, rounds_disturbed=[3])])
    assert verdict.ratio is None and verdict.text.endswith("no verdict between ort and onnx, because fewer than 3 rounds were undisturbed")


def test_a_contestant_alone_has_no_verdict():
    assert verdicts([row("ort", [1.0] * 4)]) == []


def test_each_phase_and_number_of_tokens_has_its_verdict():
    rows = [row(name, [time] * 4, phase, tokens) for phase in ("decode", "prefill") for tokens in (16, 64) for name, time in (("ort", 1.0), ("onnx", 2.0))]
    assert [(each.phase, each.tokens) for each in verdicts(rows)] == [("decode", 16), ("decode", 64), ("prefill", 16), ("prefill", 64)]
