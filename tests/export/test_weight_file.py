"""The temporary files of an export: arrays mapped from them, and models whose weights are."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from posenc_export.export import weight_file
from posenc_export.export.quantization.rounding import rounded
from posenc_export.export.sources import Sources
from posenc_export.export.weight_file import LEAST, MAPS, in_file, is_mapped
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.models.stack import Stack

pytestmark = pytest.mark.skipif(
    not MAPS.exists(), reason="elsewhere than on Linux arrays stay in memory"
)
DECODER = decoder_config(
    64, 2, 64, block_config(width=32, heads=2, max_positions=64, encoding={"name": "rope"})
)


def test_arrays_of_every_size_and_order_keep_their_content(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    written = [
        random.standard_normal(shape).astype(np.float32)
        for shape in ((512, 513), (1 << 18,), (700, 3, 500))
    ]
    written += [written[0].T, (100 * written[2]).astype(np.int8)]
    kept = [in_file(tmp_path, one) for one in written]
    assert all(
        one.nbytes < LEAST or mapped for one, mapped in zip(kept, is_mapped(kept), strict=True)
    )
    for one, other in zip(kept, written, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_a_kept_array_can_be_written(tmp_path: Path) -> None:
    kept = in_file(tmp_path, np.zeros(LEAST, np.int8))
    kept[5:9] = 7
    assert kept.sum() == 28


def test_small_arrays_stay_in_memory_and_no_file_is_left(tmp_path: Path) -> None:
    small, large = np.ones(8, np.float32), np.ones(LEAST, np.float32)
    assert in_file(tmp_path, small) is small
    assert in_file(tmp_path, large) is not large and not list(tmp_path.iterdir())


def test_a_disk_that_is_full_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("wb")  # noqa: SIM115 - closed by in_file
    monkeypatch.setattr(weight_file.tempfile, "TemporaryFile", lambda dir: full)
    with pytest.raises(OSError, match="No space left"):
        in_file(tmp_path, np.ones(LEAST, np.float32))


def test_an_owned_model_moves_to_the_file_with_equal_and_still_tied_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_file, "LEAST", 1)
    model, same = seeded(DECODER), seeded(DECODER)
    sources = Sources(model, owned=True)
    sources.keep_in(tmp_path)
    assert sources.model is model and isinstance(model, Stack)
    assert all(is_mapped(model.parameters()))
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), same.parameters(), strict=True)
    )
    assert model.head.linear.weight is model.tokens.embedding.weight  # type: ignore[union-attr]


def test_a_model_that_is_not_owned_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_file, "LEAST", 1)
    model = seeded(DECODER)
    Sources(model).keep_in(tmp_path)
    assert not any(is_mapped(model.parameters()))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_that_are_rounded_into_the_file_are_those_rounded_in_memory(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_file, "LEAST", 1)
    model = seeded(DECODER)
    kept, plain = rounded(model, weights, keep=partial(in_file, tmp_path)), rounded(model, weights)
    assert list(kept.weights) == list(plain.weights)
    assert all(is_mapped(codes.codes for _, codes in kept.weights.values()))
    assert all(
        torch.equal(one, other)
        for one, other in zip(kept.model.parameters(), plain.model.parameters(), strict=True)
    )
    assert all(is_mapped([kept.model.get_parameter(name)]) for name in kept.weights)
    assert not any(is_mapped(model.parameters()))  # the model itself is not modified
