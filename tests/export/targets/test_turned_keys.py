"""Rotations that change at a length. rope_dynamic turns cached keys further for queries beyond it,
by standard operators and inside an operator; rope_longrope caches keys in two rotations. Calls
within the length, beyond it, and both.
"""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from posenc_export import block_config, load
from posenc_export.export import export
from posenc_export.export.expected import accuracy_of
from posenc_export.models.presets import seeded
from tests.export.batches import check_rewind, worst_of_batch
from tests.kernels.calls import built

TRAINED, STEPS = 20, 4
MOST = {"rope_dynamic": 138, "rope_longrope": 64}  # positions; 138 slots are no whole blocks
HEADS: dict[str, dict[str, Any]] = {
    "whole heads": {"width": 64},
    "a part of each head": {"width": 48, "rotary": 8},
    "with a window": {"width": 64, "sees": {"name": "window", "size": 12}},
    "pairs that are side by side": {"width": 64, "layout": "interleaved"},
    "of biased projections": {"width": 64, "projection": {"name": "grouped", "bias": True}},
}
QUICK = (("rope_dynamic", "a part of each head"), ("rope_longrope", "whole heads"))


def _block(name: str, width: int, rotary: int = 0, **options: Any) -> Any:
    spec: dict[str, Any] = {"name": name, "original_max_positions": TRAINED}
    if name == "rope_dynamic":
        spec["factor"] = 4.0
    else:
        spec["long_factor"] = [1.0 + pair for pair in range((rotary or width // 4) // 2)]
    spec |= {"rotary": rotary} if rotary else {}
    spec |= {key: options.pop(key) for key in ("layout",) if key in options}
    config = block_config(width, 4, MOST[name], encoding=spec, kv_heads=2)
    return seeded(replace(config, attention=replace(config.attention, **options)))


def _cases() -> list[Any]:
    cases = [("rope_dynamic", heads, target) for heads in HEADS for target in ("ort", "ort-native")]
    cases += [("rope_longrope", heads, "ort") for heads in list(HEADS)[:3]]
    return [
        pytest.param(
            *case,
            marks=[
                *([] if case[:2] in QUICK else [pytest.mark.exhaustive]),
                *([built] if case[2] == "ort-native" else []),
            ],
        )
        for case in cases
    ]


@pytest.mark.parametrize(("name", "heads", "target"), _cases())
def test_outputs_agree_with_float64(name: str, heads: str, target: str, tmp_path: Path) -> None:
    block = _block(name, **HEADS[heads])
    manifest = export(block, target, tmp_path / "artefact", verify=False)
    model = load(tmp_path / "artefact", provider="cpu", threads=1)
    calls = {
        "within": (5, 12),
        "beyond": (40, 33),
        "both in one row": (30, 30),
        "rows that cross during decode": (TRAINED - 3, TRAINED - 1),
        "a row on each side": (TRAINED + 2, 3),
        "up to the end of a cache": (MOST[name] - STEPS, 3),
    }
    for call, lengths in calls.items():
        for chunk in (None, 16):
            worst = worst_of_batch(block, model.session(), lengths, STEPS, chunk=chunk)
            assert worst <= accuracy_of(block, manifest).tolerance, call


@pytest.mark.xdist_group("turned")
@pytest.mark.parametrize("name", MOST)
def test_a_row_that_is_rewound_into_the_length_continues_as_if_it_had_never_left_it(
    name: str, tmp_path: Path
) -> None:
    export(_block(name, 64), "ort", tmp_path / "artefact", verify=False)
    model = load(tmp_path / "artefact", provider="cpu", threads=1)
    check_rewind(model.session(), 64, TRAINED)
    if name == "rope_longrope":
        # GroupQueryAttention, which reads no slot after a row, has one head size for both caches.
        sizes = {
            state.past: (state.axes[-1], state.reads_hidden) for state in model.manifest.states
        }
        assert sizes == {f"past_key_values.0.{name}": (32, False) for name in ("key", "value")}
