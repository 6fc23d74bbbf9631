"""Keys that are turned further for queries beyond a length, on target `ort`: calls within it, beyond it, and both."""

from pathlib import Path
from typing import Any, Dict, Sequence

import msgspec
import numpy as np
import pytest

from posenc_export import block_config, load
from posenc_export.export import describe, export
from posenc_export.export.targets.turned_blocks import BLOCK
from posenc_export.models.presets import seeded
from posenc_export.numerics import worst_error
from posenc_export.runtime import Session

TRAINED, STEPS = 20, 4
CALLS = {
    "within": (5, 12),
    "beyond, with no whole block": (33, 26),
    "rows that cross during decode": (TRAINED - 3, TRAINED - 1),
    "a row on each side": (2 * BLOCK + 6, 8),
    "whole blocks": (BLOCK - 2, BLOCK + 1),
    "a whole block more during decode": (2 * BLOCK - 2, 3 * BLOCK - 1),
}
HEADS: Dict[str, Dict[str, Any]] = {
    "rotated by the operator": {"width": 64},
    "pairs that are side by side": {"width": 64, "layout": "interleaved"},
    "rotated before it": {"width": 48, "rotary": 8},
    "rounded as in transformers": {"width": 64, "numerics": "transformers"},
    "with a window": {"width": 64, "sees": {"name": "window", "size": 12}},
}


def _block(width: int, sees: Any = None, **options: Any) -> Any:
    config = block_config(width, 4, 4 * BLOCK, encoding={"name": "rope_dynamic", "original_max_positions": TRAINED, "factor": 4.0, **options}, kv_heads=2)
    attention = config.attention if sees is None else msgspec.structs.replace(config.attention, sees=sees)
    return seeded(msgspec.structs.replace(config, attention=attention))


@pytest.mark.parametrize("heads", HEADS)
def test_outputs_agree_with_float64(heads: str, tmp_path: Path) -> None:
    block = _block(**HEADS[heads])
    manifest = export(block, "ort", tmp_path / "artefact", verify=False)
    model = load(tmp_path / "artefact", provider="cpu", threads=1)
    for calls, lengths in CALLS.items():
        assert _worst(block, model.session(), lengths) <= describe.bound_of(block, manifest), calls


def _worst(block: Any, session: Session, lengths: Sequence[int]) -> float:
    """Return the worst error of a batch with prompts of these lengths, followed by STEPS steps."""
    width = block.config.width
    x = [np.random.default_rng(row).standard_normal((length + STEPS, width), dtype=np.float32) for row, length in enumerate(lengths)]
    outputs = session.prefill([row[:-STEPS] for row in x])
    steps = np.stack([session.step(np.stack([row[index - STEPS] for row in x])) for index in range(STEPS)], axis=1)
    found = [np.concatenate((outputs[row][: len(given) - STEPS], steps[row])) for row, given in enumerate(x)]
    return max(worst_error(ours, block.exact(given, range(len(given)), range(len(given)))) for ours, given in zip(found, x, strict=True))
