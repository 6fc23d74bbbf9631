"""Keys in two rotations on target `ort`: calls whose queries are all near, all far, and both."""

from pathlib import Path
from typing import Any, Dict

import msgspec
import pytest

from posenc_export import block_config, load
from posenc_export.export import export
from posenc_export.export.bounds import accuracy_of
from posenc_export.models.presets import seeded
from tests.export.batches import check_rewind, worst_of_batch

pytestmark = pytest.mark.xdist_group("two rotations")
FIRST_FAR, STEPS = 20, 6
CALLS = {
    "near": (5, 12),
    "far": (40, 33),
    "both in one row": (30, 30),
    "a row on each side": (8, 40),
    "rows that cross during decode": (FIRST_FAR - 3, FIRST_FAR - 1),
}
HEADS: Dict[str, Dict[str, Any]] = {
    "rotated by the operator": {"width": 64},
    "rotated before it": {"width": 48, "rotary": 8},
    "with a window": {"width": 64, "sees": {"name": "window", "size": 12}},
}


def _block(width: int, rotary: int = 0, **attention: Any) -> Any:
    spec = {
        "name": "rope_longrope",
        "original_max_positions": FIRST_FAR,
        "long_factor": [1.0 + pair for pair in range((rotary or width // 4) // 2)],
    }
    config = block_config(
        width, 4, 64, encoding=spec | ({"rotary": rotary} if rotary else {}), kv_heads=2
    )
    return seeded(
        msgspec.structs.replace(
            config, attention=msgspec.structs.replace(config.attention, **attention)
        )
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact of one block."""
    folder = tmp_path_factory.mktemp("rotations") / "ort"
    export(_block(**HEADS["rotated by the operator"]), "ort", folder, verify=False)
    return folder


def _agrees(block: Any, folder: Path) -> None:
    model = load(folder, provider="cpu", threads=1)
    for calls, lengths in CALLS.items():
        worst = worst_of_batch(block, model.session(), lengths, STEPS, chunk=16)
        assert worst <= accuracy_of(block, model.manifest).tolerance, calls


def test_outputs_agree_with_float64(exported: Path) -> None:
    _agrees(_block(**HEADS["rotated by the operator"]), exported)


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", list(HEADS)[1:])
def test_outputs_of_other_heads_agree_with_float64(heads: str, tmp_path: Path) -> None:
    block = _block(**HEADS[heads])
    export(block, "ort", tmp_path / "artefact", verify=False)
    _agrees(block, tmp_path / "artefact")


def test_a_row_that_is_rewound_from_far_to_near_continues_as_if_it_had_never_been_far(
    exported: Path,
) -> None:
    check_rewind(load(exported, provider="cpu", threads=1).session(), 64, FIRST_FAR)


def test_keys_are_cached_in_both_rotations(exported: Path) -> None:
    states = load(exported, provider="cpu").manifest.states
    sizes = {state.past: (state.axes[-1], state.reads_hidden) for state in states}
    # GroupQueryAttention, which reads no slot after a row, has one head size for both caches.
    assert sizes == {f"past_key_values.0.{name}": (32, False) for name in ("key", "value")}
