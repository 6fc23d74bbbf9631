"""Ratios and headlines of artificial samples."""

import numpy as np
import pytest

from posenc_export.benchmark.ratios import headlines, ratio
from tests.benchmark.rows import row


def noisy(median, seed, rounds=10):
    """Timings of a machine on which other processes make half of the samples several times
    slower.
    """
    return list(median * np.random.default_rng(seed).lognormal(sigma=1.5, size=rounds))


def test_the_interval_has_the_true_ratio_in_19_of_20_runs():
    runs = [ratio(noisy(2.0, 2 * seed, 20), noisy(1.0, 2 * seed + 1, 20)) for seed in range(200)]
    assert 0.90 <= np.mean([each.low <= 2.0 <= each.high for each in runs]) <= 0.99


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
    rows = [
        row("ort", [1.0] * 5),
        row("onnx", [1.2] * 5),
        row("eager", [1.7, 0.12, 1.5, 0.12, 1.5]),
    ]
    rows.append(row("few", [1.0] * 4))  # too few for a ratio
    assert headlines(rows) == [
        f"{AT} ort: onnx 1.20 (1.20 .. 1.20), eager no clear difference (0.12 .. 1.7)."
    ]


def test_a_headline_has_the_ratios_at_the_smallest_and_the_largest_number_of_tokens():
    def measured(*times):
        return [
            row(name, [seconds] * 5, tokens=tokens)
            for tokens, pair in zip((128, 256, 512), times, strict=True)
            for name, seconds in zip(("ort", "onnx", "genai"), (*pair, pair[0]), strict=True)
        ]

    rows, equal = measured((1e-3, 2e-3), (1e-3, 9e-3), (1e-3, 4e-3)), "(1.00 .. 1.00)"
    start = "Decode at 128 and 512 cached tokens, time relative to"
    assert headlines(rows) == [
        f"{start} ort: genai no clear difference {equal} and no clear difference {equal}, "
        "onnx 2.00 (2.00 .. 2.00) and 4.00 (4.00 .. 4.00)."
    ]
    ratios = "0.500 (0.500 .. 0.500) and 0.250 (0.250 .. 0.250)"
    assert headlines(rows, "onnx") == [f"{start} onnx: ort {ratios}, genai {ratios}."]
