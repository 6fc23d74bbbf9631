"""GGUF files are read as the models that they were written from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from gguf import GGMLQuantizationType as Types

from posenc_export.models import by_transformers
from posenc_export.models.gguf.blocks import TYPES, GGUFMatrix
from posenc_export.models.gguf.checkpoint import GGUFCheckpoint
from posenc_export.models.gguf.file import read_gguf
from posenc_export.models.pretrained import from_pretrained
from tests.models import gguf_files

KINDS = "F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
DOWN = "blk.0.ffn_down.weight"


def _loaded(path: Path, head: bool = True) -> Any:
    with GGUFCheckpoint(path) as checkpoint, torch.no_grad():
        kind = by_transformers.kind_of(checkpoint.config, head)
        model = by_transformers.load(kind, checkpoint)
    model.choose_factors()
    return model


@pytest.mark.parametrize("name", gguf_files.MODELS)
def test_a_gguf_file_gives_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    peer = gguf_files.made(name)
    gguf_files.write(name, peer, tmp_path / "model.gguf")
    # Beyond the trained length of LongRoPE, from which on transformers has the long factors, too.
    ids = torch.randint(3, 64, (2, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = peer(ids, use_cache=False).logits
        states = peer.base_model(ids, use_cache=False).last_hidden_state
    result = _loaded(tmp_path / "model.gguf")
    assert result.max_positions == 256
    torch.testing.assert_close(result(ids), logits, rtol=0, atol=1e-5)
    without_head = _loaded(tmp_path / "model.gguf", head=False)
    torch.testing.assert_close(without_head(ids), states, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_read_as_the_library_gguf_reads_it(kind: str, tmp_path: Path) -> None:
    path, peer = tmp_path / "model.gguf", gguf_files.made("llama wide")
    wanted = gguf_files.write("llama wide", peer, path, Types[kind])
    with GGUFCheckpoint(path) as checkpoint:
        shapes = {name: tuple(one.shape) for name, one in peer.named_parameters()}
        checkpoint.place(shapes, "model.")
        of_layer = "model.layers.0."
        names = ("model.embed_tokens", f"{of_layer}mlp.down_proj", f"{of_layer}self_attn.q_proj")
        table, down, queries = (checkpoint.tensor(f"{name}.weight").numpy() for name in names)
    assert read_gguf(path).tensors["token_embd.weight"].kind.name == kind
    assert np.array_equal(table, wanted["token_embd.weight"])
    assert np.array_equal(down, wanted[DOWN])
    turned = wanted["blk.0.attn_q.weight"].reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    assert np.array_equal(queries, turned)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_codes_scales_and_offsets_of_the_same_weights(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wanted = gguf_files.write("llama wide", gguf_files.made("llama wide"), path, Types[kind])
    blocks = GGUFMatrix(read_gguf(path).tensors[DOWN], np.arange(256)).blocks()
    weights, half = wanted[DOWN].reshape(256, 8, 32), 1 << (TYPES[kind][0] - 1)
    assert blocks is not None and blocks.bits == TYPES[kind][0]
    offsets = np.zeros_like(blocks.scales) if blocks.offsets is None else blocks.offsets
    error = np.abs(blocks.codes * blocks.scales[..., None] + offsets[..., None] - weights).max()
    assert error <= (0 if blocks.offsets is None else 2.0**-22 * np.abs(weights).max())
    assert -half <= blocks.codes.min() and blocks.codes.max() < half


def _parts(folder: Path) -> Path:
    """Write a model in two files, and return the first."""
    model, keys = gguf_files.made("qwen2"), {"split.count": 2}
    paths = [folder / f"a-0000{part}-of-00002.gguf" for part in (1, 2)]
    for path, is_second in zip(paths, (False, True), strict=True):

        def only(name: str, wanted: bool = is_second) -> bool:
            return ("blk.1." in name) is wanted

        gguf_files.write("qwen2", model, path, metadata=keys, only=only)
    return paths[0]


def test_a_file_in_parts_is_read_whole(tmp_path: Path) -> None:
    first, whole = _parts(tmp_path), tmp_path / "whole.gguf"
    gguf_files.write("qwen2", gguf_files.made("qwen2"), whole)
    ids = torch.arange(3, 40)[None]
    assert torch.equal(from_pretrained(first)(ids), from_pretrained(whole)(ids))


def test_a_part_that_is_missing_or_not_the_first_is_refused(tmp_path: Path) -> None:
    first = _parts(tmp_path)
    second = tmp_path / "a-00002-of-00002.gguf"
    with pytest.raises(ValueError, match=r"^gguf: expected the first of 2 files, NAME-.*, got a-0"):
        read_gguf(second)
    second.write_bytes(first.read_bytes())  # a part given twice
    with pytest.raises(ValueError, match=r"that the metadata describe, got no blk\.1\.attn"):
        from_pretrained(first)
    second.unlink()
    with pytest.raises(ValueError, match=r"expected a file a-00002-of-00002.gguf in .*, got none"):
        read_gguf(first)


CHANGED: dict[str, Any] = {
    "an unknown architecture": (
        b"qwen2",
        b"qwan2",
        r"expected general.architecture to be one of llama, .* got 'qwan2'; did you mean qwen2",
    ),
    "a missing key": (b"feed_forward_length", b"feed_forward_lengtj", "no feed_forward_length"),
    "a key that is not read": (b"value_length", b"valve_length", r"attention.valve_length, which"),
    "an unknown tensor": (b"blk.1.ffn_up.weight", b"blk.1.ffn_ub.weight", "no blk.1.ffn_up.weight"),
    "another scaling": (b"yarn", b"yarm", "'yarm' without its factors"),
    "a file of a part of a model": (b"token_embd", b"token_embe", "got no token_embd.weight; give"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_cannot_be_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    old, new, message = CHANGED[case]
    path = tmp_path / "model.gguf"
    gguf_files.write("qwen2", gguf_files.made("qwen2"), path)
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(ValueError, match=message) as refused:
        from_pretrained(path)
    assert "\n" not in str(refused.value)


REFUSED: dict[str, Any] = {
    "an adapter": ({"general.type": "adapter"}, "got general.type 'adapter'; give the file of"),
    "values of another length": ({"qwen2.attention.value_length": 8}, "value_length 8, not 16"),
    "attention in both directions": ({"qwen2.attention.causal": False}, "causal False, not True"),
    "a size of 0": ({"qwen2.attention.head_count": 0}, "integer division or modulo by zero"),
    "other sizes than those of tensors": (
        {"qwen2.feed_forward_length": 100},
        r"blk.0.ffn_\w+.weight with sizes \[.*100.*\] by the metadata, got \[.*96.*\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_of_another_model_are_refused(case: str, tmp_path: Path) -> None:
    metadata, message = REFUSED[case]
    gguf_files.write("qwen2", gguf_files.made("qwen2"), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ValueError, match=f"^gguf: expected .*{message}"):
        from_pretrained(tmp_path / "m.gguf")


@pytest.mark.parametrize("factors", [[2.0], [2.0] * 7 + [0.0], [float("nan")] * 8])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_tables_of_other_factors_are_refused(name: str, factors: Any, tmp_path: Path) -> None:
    peer = gguf_files.made(name)
    tables = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
    usual = gguf_files._tensors

    def changed(architecture: str, model: Any) -> Any:
        for tensor, numbers in usual(architecture, model):
            yield tensor, np.array(factors, np.float32) if tensor in tables else numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "_tensors", changed)
        gguf_files.write(name, peer, tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="factors of the rotation, not 8 numbers above 0"):
        from_pretrained(tmp_path / "m.gguf")
