"""Sounds whose samples no token reads, though the norm over time counts them, are refused."""

from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import torch

from posenc_export.models.parts.waveform import window
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime.grids import windows

pytest.importorskip("transformers", reason="transformers is not installed")
from posenc_export.export.expected import eager_session  # noqa: E402
from tests.models import encoders  # noqa: E402

BASE = [[512, 10, 5], *[[512, 3, 2]] * 4, *[[512, 2, 2]] * 2]  # of wav2vec 2.0
LAYER = {"name": "waveform", "norm": "layer", "convolutions": BASE}
GROUP = {**LAYER, "norm": "group"}


@pytest.mark.parametrize(
    ("samples", "cut"), [(16000, 15760), (405, 400), (1039, 720), (48000, 47760)]
)
def test_samples_that_a_norm_over_time_counts_are_refused_with_the_length_to_cut_to(
    samples: int, cut: int
) -> None:
    message = rf"expected 400 \+ 320 n samples, got {samples}; cut them to {cut}$"
    with pytest.raises(ValueError, match=message):
        windows(np.zeros((1, samples)), GROUP)
    assert windows(np.zeros((1, cut)), GROUP).shape[-1] == 400


def test_windows_of_a_sound_are_those_of_its_tokens() -> None:
    sound = np.arange(2 * 16000).reshape(2, 16000)
    tokens = windows(sound, LAYER)
    assert tokens.shape == (2, 49, 400) and tokens[1, 48, 0] == 16000 + 48 * 320
    assert windows(sound[:, :404], GROUP).shape == (2, 1, 400)  # no output of a convolution more
    with pytest.raises(ValueError, match="at least 400 samples, got 399; pass a longer sound"):
        windows(sound[:, :399], LAYER)


def _compared(folder: Path, rest: int, **settings: Any) -> Tuple[np.ndarray, np.ndarray]:
    """Return the outputs of an encoder with a norm over time, and those of transformers, for a
    sound with `rest` samples after the last window.
    """
    config = encoders.described("wav2vec2")
    for key, value in settings.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    peer = encoders.randomised(encoders.built(config))
    peer.save_pretrained(folder)
    ours: Any = from_pretrained(folder, max_positions=64)
    features = ours.config.tokens.features
    size, step = window(features["convolutions"])
    draw = np.random.default_rng(0)
    sound = draw.standard_normal((1, size + 8 * step + rest)).astype(np.float32)
    tokens = windows(sound, {**features, "norm": "layer"})  # which refuses no length
    with torch.no_grad():
        theirs = peer(torch.from_numpy(sound)).last_hidden_state.numpy()
    return eager_session(ours).prefill(tokens), theirs


def _close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.shape == theirs.shape and bool(np.abs(ours - theirs).max() <= 1e-5)


GAP: Dict[str, Any] = {"conv_kernel": [10, 2, 1], "conv_stride": [5, 3, 1]}


@pytest.mark.parametrize("rest", [0, 4])
def test_lengths_that_are_not_refused_give_the_outputs_of_transformers(
    rest: int, tmp_path: Path
) -> None:
    assert _close(*_compared(tmp_path, rest))


@pytest.mark.xfail(strict=True, reason="graphs read whole windows, without the samples after them")
@pytest.mark.parametrize("rest", [5, 19])
def test_every_length_gives_the_outputs_of_transformers(rest: int, tmp_path: Path) -> None:
    assert _close(*_compared(tmp_path, rest))


def test_a_kernel_below_its_stride_is_refused_with_a_norm_over_time(tmp_path: Path) -> None:
    message = "read all 3 outputs of the first convolution, .* got 2 with .* below its stride"
    with pytest.raises(ValueError, match=message):
        _compared(tmp_path, 0, **GAP)


@pytest.mark.xfail(strict=True, raises=ValueError, reason="outputs that no token reads")
def test_a_kernel_below_its_stride_gives_the_outputs_of_transformers(tmp_path: Path) -> None:
    assert _close(*_compared(tmp_path, 0, **GAP))


def test_a_kernel_below_its_stride_without_gaps_gives_the_outputs_of_transformers(
    tmp_path: Path,
) -> None:
    for kernels, strides in (([3, 3, 2], [5, 2, 1]), ([10, 2, 4], [5, 3, 1])):
        settings = {"conv_kernel": kernels, "conv_stride": strides}
        assert _close(*_compared(tmp_path, 0, **settings))
