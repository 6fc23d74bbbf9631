"""GGUF files are read as the models that they were written from."""

import re
import struct
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from gguf import GGMLQuantizationType as Types  # noqa: E402

from posenc_export.models.gguf.blocks import TYPES, GGUFMatrix  # noqa: E402
from posenc_export.models.gguf.checkpoint import (
    GGUFCheckpoint,  # noqa: E402
    read_parts,  # noqa: E402
)
from posenc_export.models.pretrained import from_pretrained  # noqa: E402
from tests.models import gguf_files  # noqa: E402

NORMS_MOVED = 2.0**-22  # 1 is added to these norms and subtracted again, in float32
KINDS = (
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
DOWN, TABLE, QUERIES = (
    f"model.model.{name}.weight"
    for name in ("layers.0.mlp.down_proj", "embed_tokens", "layers.0.self_attn.q_proj")
)


@pytest.mark.parametrize("name", gguf_files.MODELS)
def test_a_gguf_file_gives_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    peer = gguf_files.made(name)
    peer.save_pretrained(tmp_path / "folder")
    gguf_files.write(name, peer, tmp_path / "model.gguf")
    wanted, result = (from_pretrained(tmp_path / place) for place in ("folder", "model.gguf"))
    _same(result, wanted, NORMS_MOVED if name.startswith("gemma") else 0.0)
    # Beyond the trained length of LongRoPE, from which on transformers has the long factors, too.
    ids = torch.randint(3, 64, (2, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = peer(ids, use_cache=False).logits
    assert result.max_positions == 256
    torch.testing.assert_close(result(ids), logits, rtol=0, atol=1e-5)


def test_a_file_gives_hidden_states_without_its_head(
    tmp_path: Path,
) -> None:
    peer = gguf_files.made("stablelm")
    gguf_files.write("stablelm", peer, tmp_path / "model.gguf")
    result, ids = from_pretrained(tmp_path / "model.gguf", head=False), torch.arange(3, 40)[None]
    with torch.no_grad():
        states = peer.base_model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(result(ids), states, rtol=0, atol=1e-5)


def _same(found: Any, wanted: Any, error: float) -> None:
    parameters = dict(wanted.named_parameters())
    assert {
        name: (one - parameters[name]).abs().max().item() <= error
        for name, one in found.named_parameters()
    } == dict.fromkeys(parameters, True)
    assert all(torch.isfinite(one).all() for one in parameters.values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_read_as_the_library_gguf_reads_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wanted = gguf_files.write("llama wide", gguf_files.made("llama wide"), path, Types[kind])
    results = {name: one.detach().numpy() for name, one in from_pretrained(path).named_parameters()}
    assert read_parts(path)[0].tensors[0].tensor_type.name == kind
    assert np.array_equal(results[TABLE], wanted["token_embd.weight"]) and np.array_equal(
        results[DOWN], wanted["blk.0.ffn_down.weight"]
    )
    turned = wanted["blk.0.attn_q.weight"].reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    assert np.array_equal(results[QUERIES], turned)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_codes_scales_and_offsets_of_the_same_weights(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wanted = gguf_files.write("llama wide", gguf_files.made("llama wide"), path, Types[kind])
    tensor = next(
        tensor for tensor in read_parts(path)[0].tensors if tensor.name == "blk.0.ffn_down.weight"
    )
    blocks, weights = (
        GGUFMatrix(tensor).blocks(),
        wanted["blk.0.ffn_down.weight"].reshape(256, 8, 32),
    )
    assert blocks is not None
    offsets = np.zeros_like(blocks.scales) if blocks.offsets is None else blocks.offsets
    assert np.abs(blocks.codes * blocks.scales[..., None] + offsets[..., None] - weights).max() <= (
        0 if blocks.offsets is None else 2.0**-22 * np.abs(weights).max()
    )
    half = 1 << (blocks.bits - 1)
    assert -half <= blocks.codes.min() and blocks.codes.max() < half


def test_a_file_in_parts_is_read_whole(tmp_path: Path) -> None:
    peer, first, second = (
        gguf_files.made("llama"),
        tmp_path / "a-00001-of-00002.gguf",
        tmp_path / "a-00002-of-00002.gguf",
    )
    gguf_files.write("llama", peer, tmp_path / "whole.gguf")
    gguf_files.write(
        "llama", peer, first, metadata={"split.count": 2}, only=lambda name: "blk.1." not in name
    )
    gguf_files.write(
        "llama", peer, second, metadata={"split.count": 2}, only=lambda name: "blk.1." in name
    )
    _same(from_pretrained(first), from_pretrained(tmp_path / "whole.gguf"), 0.0)
    assert "expected the first of 2 files" in _refusal(second)
    second.unlink()
    assert "a file a-00002-of-00002.gguf" in _refusal(first)


def _refusal(path: Path) -> str:
    with pytest.raises(ValueError) as refused:
        from_pretrained(path)
    message = str(refused.value)
    assert (
        re.match(r"(checkpoint|gguf)( \S+)?: expected .*, got .*; ", message)
        and "\n" not in message
    )
    return message


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    gguf_files.write(
        "llama",
        gguf_files.made("llama"),
        tmp_path / "model.gguf",
        metadata={"tokenizer.ggml.model": "none"},
    )
    return tmp_path / "model.gguf"


def test_a_file_that_ends_early_is_refused_in_one_line(llama: Path) -> None:
    content = llama.read_bytes()
    for length in (*range(0, 1500, 13), 2000, 4000, len(content) // 2, len(content) - 1):
        llama.write_bytes(content[:length])
        assert "complete GGUF file" in _refusal(llama)


def test_an_unknown_type_of_tensor_is_refused_in_one_line(llama: Path) -> None:
    content = llama.read_bytes()
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    assert content[at : at + 4] == struct.pack("<I", 0)
    llama.write_bytes(content[:at] + struct.pack("<I", 999) + content[at + 4 :])
    assert (
        "expected tensor token_embd.weight to have a type that the library gguf knows, got 999"
        in _refusal(llama)
    )


def test_a_wrong_count_is_refused_without_reading_for_long(llama: Path) -> None:
    content = llama.read_bytes()
    for at in (8, 16):  # tensors, metadata
        llama.write_bytes(content[:at] + struct.pack("<Q", 1 << 62) + content[at + 8 :])
        assert "expected at most" in _refusal(llama)


CHANGED: Dict[str, Any] = {
    "an unknown architecture": (
        b"llama",
        b"lamma",
        "expected general.architecture to be one of llama, .* got 'lamma'; did you mean llama",
    ),
    "an unknown key": (
        b"llama.feed_forward_length",
        b"llama.feed_forward_lengtj",
        "feed_forward_length to be an integer above 0, got None",
    ),
    "a key that is not read": (
        b"llama.attention.value_length",
        b"llama.attention.valve_length",
        "got also attention.valve_length",
    ),
    "an unknown tensor": (
        b"blk.1.ffn_up.weight",
        b"blk.1.ffn_ub.weight",
        "got no blk.1.ffn_up.weight",
    ),
    "other factors": (
        struct.pack("<f", 8.0),
        struct.pack("<f", 7.0),
        "expected rope_freqs.weight to be factors of Llama 3's scaling",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_cannot_be_read_is_refused_by_name(case: str, llama: Path) -> None:
    old, new, message = CHANGED[case]
    content = llama.read_bytes()
    assert old in content
    llama.write_bytes(content.replace(old, new))
    assert re.search(message, _refusal(llama))


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_files.write("llama", gguf_files.made("llama"), path, metadata={"feed_forward_length": 100})
    assert (
        "expected blk.0.ffn_gate.weight with sizes [100, 64] by the metadata, got [96, 64]"
        in _refusal(path)
    )


def test_factors_of_1_scale_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GGUFCheckpoint, "_read", lambda self, name: np.ones(8, np.float32))
    assert GGUFCheckpoint(llama).config.keys().isdisjoint({"rope_scaling", "rope_parameters"})
