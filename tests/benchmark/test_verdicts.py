"""Verdicts on artificial samples."""

import numpy as np
import pytest

from posenc_export.benchmark.verdicts import headlines, ratio, verdicts
from tests.benchmark.rows import row


def noisy(median, seed, rounds=10):
    """Timings of a machine on which other processes make half of the samples several times
    slower.
    """
    return list(median * np.random.default_rng(seed).lognormal(sigma=1.5, size=rounds))


def test_equal_contestants_rarely_have_a_difference():
    results = [
        verdict
        for seed in range(100)
        for verdict in verdicts(
            [row("ort", noisy(1.0, 2 * seed)), row("genai", noisy(1.0, 2 * seed + 1))]
        )
    ]
    assert len(results) == 100 and sum("times as fast" not in verdict for verdict in results) >= 85


def test_the_largest_possible_difference_is_rounded_up():
    (verdict,) = verdicts(
        [row("ort", [1.0, 1.081, 1.0, 1.0, 1.0]), row("genai", [1.0, 1.0, 1.0, 1.085, 1.0])]
    )
    assert verdict.endswith("no difference larger than 9 % between ort and genai")


def test_the_interval_has_the_true_ratio_in_19_of_20_runs():
    runs = [ratio(noisy(2.0, 2 * seed, 20), noisy(1.0, 2 * seed + 1, 20)) for seed in range(200)]
    assert 0.90 <= np.mean([each.low <= 2.0 <= each.high for each in runs]) <= 0.99


def test_a_verdict_compares_the_fastest_with_every_other_contestant():
    others = [
        row("eager", [30.0, 20.0, 28.0, 9.0, 28.0]),
        row("onnx", [1.1, 1.1, 1.1, 1.1, 1.2]),
        row("few", [40.0] * 4),
    ]
    assert verdicts([row("ort", [1.0] * 5), *others])[0].endswith(
        ": ort is 1.10 (1.10 .. 1.20) times as fast as onnx and 28 (9.0 .. 30) times as fast "
        "as eager"
    )
    (equal,) = verdicts(
        [row("ort", [1.0] * 5), row("genai", [1.0, 1.0, 1.0, 1.049, 1.0]), others[1]]
    )
    assert equal.endswith(
        "no difference larger than 5 % between ort and genai; ort is 1.10 (1.10 .. 1.20) "
        "times as fast as onnx"
    )


def test_each_phase_and_number_of_tokens_has_its_verdict():
    rows = [
        row(name, [time] * 5, phase, tokens)
        for phase in ("decode", "prefill")
        for tokens in (16, 64)
        for name, time in (("ort", 1.0), ("onnx", 2.0))
    ]
    wanted = [
        "decode at 16 cached",
        "decode at 64 cached",
        "prefill at 16 tokens",
        "prefill at 64 tokens",
    ]
    assert [
        result[: len(start)] for result, start in zip(verdicts(rows), wanted, strict=True)
    ] == wanted


AT = "Decode at 1024 cached tokens, time relative to"


@pytest.mark.parametrize(
    ("seconds", "baseline", "expected"),
    [
        ({"onnx": 2.0, "ort": 1.0}, "", f"{AT} ort: onnx 2.00 (2.00 .. 2.00)."),
        ({"onnx": 2.0, "ort": 1.0}, "onnx", f"{AT} onnx: ort 0.500 (0.500 .. 0.500)."),
        (
            {f"c{n}": float(n) for n in range(1, 7)},
            "c2",
            f"{AT} c2: c1 0.500 (0.500 .. 0.500), c3 1.50 (1.50 .. 1.50), c4 2.00 (2.00 .. 2.00), "
            "c5 2.50 (2.50 .. 2.50), c6 3.00 (3.00 .. 3.00).",
        ),
    ],
)
def test_a_headline_names_every_contestant_relative_to_the_baseline(seconds, baseline, expected):
    rows = [row(name, [time * 1e-3] * 5) for name, time in seconds.items()]
    assert headlines(rows, baseline) == [expected]


def test_a_ratio_whose_interval_includes_1_is_not_stated_as_fact() -> None:
    """The time of eager is 0.12 to 1.7 times that of ort, with a median of 1.5."""
    rows = [
        row("ort", [1.0] * 5),
        row("onnx", [1.2] * 5),
        row("eager", [1.7, 0.12, 1.5, 0.12, 1.5]),
    ]
    (verdict,), (headline,) = verdicts(rows), headlines(rows)
    assert verdict.endswith(
        ": undecided, the times of ort and eager vary too much; ort is 1.20 (1.20 .. 1.20) times "
        "as fast as onnx"
    )
    assert headline == (
        f"{AT} ort: onnx 1.20 (1.20 .. 1.20), eager undecided (the times vary too much)."
    )


def test_the_fastest_of_three_is_the_one_that_no_other_beats_round_by_round() -> None:
    rows = [
        row("ort", [*[1.0] * 5, 3.0, *[9.0] * 5]),
        row("onnx", [*[1.1] * 5, 2.9, *[9.9] * 5]),
        row("eager", [*[0.9] * 5, 3.1, *[8.0] * 5]),
    ]
    assert "eager is 1.11 (1.11 .. 1.12) times as fast as ort and" in verdicts(rows)[0]


def test_a_verdict_is_undecided_where_the_headline_is() -> None:
    rows = [
        row("ort", [1e-3, 9e-3, 1e-3, 9e-3, 1e-3]),
        row("onnx", [9e-3, 1e-3, 9e-3, 1e-3, 1e-3]),
        row("eager", [1.0] * 5),
    ]
    (verdict,), (headline,) = verdicts(rows), headlines(rows)
    assert verdict.startswith(
        "decode at 1024 cached tokens: undecided, the times of ort and onnx vary too much; ort is "
    )
    assert "onnx undecided (the times vary too much)" in headline and "%" not in verdict


def test_a_headline_over_several_numbers_of_tokens_has_the_ranges_of_ratios():
    def measured(*pairs):
        return [
            row(name, [seconds] * 5, tokens=tokens)
            for tokens, pair in zip((128, 512), pairs, strict=True)
            for name, seconds in zip(("ort", "onnx", "genai"), (*pair, pair[0]), strict=True)
        ]

    start = "Decode 128 to 512 cached tokens, time relative to ort:"
    equal = "genai 1.00 (no clear difference)"
    assert headlines(measured((1e-3, 2e-3), (1e-3, 4e-3))) == [
        f"{start} {equal}, onnx 2.00 to 4.00."
    ]
    assert headlines(measured((1e-3, 2e-3), (3e-3, 1e-3)), "ort") == [
        f"{start} {equal}, onnx 0.333 to 2.00."
    ]
