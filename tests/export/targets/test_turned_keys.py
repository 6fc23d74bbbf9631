"""Keys that are turned further for queries beyond a length, by standard operators and inside an
operator: calls within it, beyond it, and both.
"""

from pathlib import Path
from typing import Any, Dict

import msgspec
import pytest

from posenc_export import block_config, load
from posenc_export.export import export
from posenc_export.export.bounds import accuracy_of
from posenc_export.models.presets import seeded
from posenc_export.runtime import Session
from tests.export.batches import check_rewind, worst_of_batch
from tests.kernels.calls import built

TRAINED, STEPS, MOST = 20, 4, 138
CALLS = {
    "within": (5, 12),
    "rows that cross during decode": (TRAINED - 3, TRAINED - 1),
    "a row on each side": (TRAINED + 2, 3),
    "up to the end of a cache": (MOST - STEPS, 3),
}
HEADS: Dict[str, Dict[str, Any]] = {
    "whole heads": {"width": 64},
    "pairs that are side by side": {"width": 64, "layout": "interleaved"},
    "a part of each head": {"width": 48, "rotary": 8},
    "rounded as in transformers": {"width": 64, "numerics": "transformers"},
    "with a window": {"width": 64, "sees": {"name": "window", "size": 12}},
    "of biased projections": {"width": 64, "projection": {"name": "grouped", "bias": True}},
}


def _block(width: int, sees: Any = None, projection: Any = None, **options: Any) -> Any:
    config = block_config(
        width,
        4,
        MOST,
        encoding={
            "name": "rope_dynamic",
            "original_max_positions": TRAINED,
            "factor": 4.0,
            **options,
        },
        kv_heads=2,
    )
    given = {
        name: value
        for name, value in {"sees": sees, "projection": projection}.items()
        if value is not None
    }
    return seeded(
        msgspec.structs.replace(
            config, attention=msgspec.structs.replace(config.attention, **given)
        )
    )


@pytest.mark.parametrize("target", ["ort", pytest.param("ort-native", marks=built)])
@pytest.mark.parametrize(
    "heads",
    [
        name if name == "a part of each head" else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in HEADS
    ],
)
def test_outputs_agree_with_float64(heads: str, target: str, tmp_path: Path) -> None:
    block = _block(**HEADS[heads])
    manifest = export(block, target, tmp_path / "artefact", verify=False)
    model = load(tmp_path / "artefact", provider="cpu", threads=1)
    for calls, lengths in CALLS.items():
        assert (
            worst_of_batch(block, model.session(), lengths, STEPS)
            <= accuracy_of(block, manifest).tolerance
        ), calls


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact of one block."""
    folder = tmp_path_factory.mktemp("turned") / "ort"
    export(_block(64), "ort", folder, verify=False)
    return folder


def _session(folder: Path) -> Session:
    return load(folder, provider="cpu", threads=1).session()


@pytest.mark.xdist_group("turned")
def test_a_row_that_is_rewound_into_the_trained_length_continues_as_if_it_had_never_left_it(
    exported: Path,
) -> None:
    check_rewind(_session(exported), 64, TRAINED)
