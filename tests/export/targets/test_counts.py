"""Counts of CoPE on target `ort`: the last keys are counted, and all keys where the counts of
the last ones do not reach the end of the table.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from posenc_export import block_config, load
from posenc_export.export import export
from posenc_export.export.expected import accuracy_of
from posenc_export.export.targets.content import KEYS_PER_ROW
from posenc_export.models.presets import seeded
from tests.export.batches import worst_of_batch

ROWS, WIDTH = 3, 32
LENGTHS = (
    4 * KEYS_PER_ROW * ROWS,
    40,
    3,
)  # of the rows of a batch: beyond the keys that are counted first, a little beyond, and below


@pytest.mark.parametrize("open_gates", [True, False])
@pytest.mark.parametrize(
    "signature", ["positions", pytest.param("mask", marks=pytest.mark.exhaustive)]
)
def test_scores_are_exact_whether_or_not_the_last_keys_reach_the_largest_count(
    open_gates: bool, signature: str, tmp_path: Path
) -> None:
    block: Any = seeded(
        block_config(
            WIDTH, 2, 256, encoding={"name": "cope", "positions": ROWS}, kv_heads=1, qkv_bias=True
        )
    )
    with (
        torch.no_grad()
    ):  # products of queries and keys are about 12, or -12: gates of nearly 1, or nearly 0
        block.attention.projection.qkv.bias[:WIDTH] = 2.0
        block.attention.projection.qkv.bias[WIDTH : WIDTH + WIDTH // 2] = (
            1.5 if open_gates else -1.5
        )
    manifest = export(block, "ort", tmp_path / "artefact", signature=signature, verify=False)
    session = load(tmp_path / "artefact", provider="cpu", threads=1).session()
    assert (
        worst_of_batch(block, session, LENGTHS, steps=4, chunk=50)
        <= accuracy_of(block, manifest).tolerance
    )


@pytest.mark.parametrize("head_size", [4, 10, 20])
def test_heads_that_caches_widen_are_counted_by_their_own_numbers(
    head_size: int, tmp_path: Path
) -> None:
    encoding = {"name": "cope", "positions": ROWS}
    block: Any = seeded(block_config(2 * head_size, 2, 256, encoding=encoding, kv_heads=1))
    manifest = export(block, "ort", tmp_path / "artefact", verify=False)
    session = load(tmp_path / "artefact", provider="cpu", threads=1).session()
    accuracy = accuracy_of(block, manifest)
    assert worst_of_batch(block, session, LENGTHS, steps=2, chunk=50) <= accuracy.tolerance


def test_a_bias_closes_no_gate(tmp_path: Path) -> None:
    config = block_config(WIDTH, 2, 64, encoding={"name": "alibi"})
    both = [{"name": "alibi"}, {"name": "cope", "positions": ROWS}]
    block = seeded(replace(config, attention=replace(config.attention, encodings=both)))
    certificate = export(block, "onnx", tmp_path / "artefact", verify="quick").certificate
    assert certificate is not None and certificate["passed"]  # the oracle is among its cells
