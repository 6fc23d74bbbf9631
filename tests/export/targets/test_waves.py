"""Products with sinusoids of consecutive keys on target `ort`: keys in one block, in several and
in a part of one, at any first position.
"""

from pathlib import Path

import numpy as np
import pytest

from posenc_export import block_config, load
from posenc_export.export import export
from posenc_export.export.expected import accuracy_of
from posenc_export.export.targets import content
from posenc_export.models.presets import seeded
from posenc_export.shared.numerics import worst_error

LENGTHS, STARTS, WIDTH, STEPS = (21, 8, 3), (0, 1000, 70), 16, 4


def test_products_are_exact_for_keys_in_several_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "BLOCK", 4)
    block = seeded(block_config(WIDTH, 2, 1024, encoding={"name": "transformer_xl"}))
    manifest = export(block, "ort", tmp_path / "artefact", verify=False)
    session = load(tmp_path / "artefact", provider="cpu", threads=1).session()
    x = [
        np.random.default_rng(row).standard_normal((length + STEPS, WIDTH), dtype=np.float32)
        for row, length in enumerate(LENGTHS)
    ]
    outputs = session.prefill([row[:-STEPS] for row in x], start=list(STARTS), chunk=3)
    steps = np.stack(
        [session.step(np.stack([row[index - STEPS] for row in x])) for index in range(STEPS)],
        axis=1,
    )
    for row, (given, start) in enumerate(zip(x, STARTS, strict=True)):
        result = np.concatenate((outputs[row][: len(given) - STEPS], steps[row]))
        positions = range(start, start + len(given))
        assert (
            worst_error(result, block.exact(given, positions, positions))
            <= accuracy_of(block, manifest).tolerance
        )
