"""Encodings of scores compared with independent implementations."""

from typing import Any

import numpy as np
import pytest
import torch

from posenc_export import encodings
from posenc_export.shared.numerics import tolerance, worst_error

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def test_swin_bias_is_that_of_transformers() -> None:
    from transformers.models.swin.modeling_swin import SwinRelativePositionBias

    theirs = SwinRelativePositionBias(4, (3, 5))
    torch.nn.init.normal_(theirs.relative_position_bias_table)
    ours: Any = encodings.build(
        {"name": "swin", "rows": 3, "columns": 5}, encodings.Geometry(64, 4, 16, 15, False)
    )
    ours.table.weight.data = theirs.relative_position_bias_table.data
    places = torch.arange(15)[None]
    assert torch.equal(ours.bias(places, places), theirs())


def projected(x: Any, *parts: Any) -> Any:
    """Heads [B,S,4,16] of tokens x [B,S,64] by linear layers."""
    return [part(x).view(*x.shape[:2], 4, 16) for part in parts]


def attend(ours: Any, q: Any, k: Any, v: Any, states: Any = (), causal: bool = False) -> Any:
    """Queries, keys and values [B,S,H,D] to [B,S,H*D]."""
    tokens = q.size(1)
    places = torch.arange(tokens).expand(q.size(0), -1)
    mask = torch.full((1, 1, tokens, tokens), -torch.inf if causal else 0.0).triu(1)
    seen = encodings.Seen(k.transpose(1, 2), v.transpose(1, 2), mask, places, places)
    return ours.rescore(q, seen, ours.score_scale(q.size(3)), list(states))


def resized(table: torch.Tensor, side: int) -> torch.Tensor:
    """Return a table of offsets for another side, as the documentation of the encoding says."""
    return torch.nn.functional.interpolate(table.T[None], 2 * side - 1, mode="linear")[0].T


@pytest.mark.parametrize("trained", [(5, 7), (3, 9)], ids=["own grid", "resized"])
def test_decomposed_2d_is_the_attention_of_sam(trained: Any) -> None:
    from transformers.models.sam.configuration_sam import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamVisionAttention

    torch.manual_seed(1)
    theirs = SamVisionAttention(SamVisionConfig(hidden_size=64, num_attention_heads=4), 14).eval()
    for name, side in zip(("rel_pos_h", "rel_pos_w"), trained, strict=True):
        setattr(theirs, name, torch.nn.Parameter(torch.randn(2 * side - 1, 16)))
    ours: Any = encodings.build(
        {"name": "decomposed_2d", "rows": 5, "columns": 7},
        encodings.Geometry(64, 4, 16, 35, False, 4),
    )
    ours.of_rows.data, ours.of_columns.data = (
        resized(table.data, side) for table, side in ((theirs.rel_pos_h, 5), (theirs.rel_pos_w, 7))
    )
    x = torch.randn(2, 5, 7, 64)
    with torch.no_grad():
        expected = theirs(x)[0]
        q, k, v = theirs.qkv(x).view(2, 35, 3, 4, 16).unbind(2)
        y = theirs.proj(attend(ours, q, k, v)).view(2, 5, 7, 64)
    assert worst_error(y.numpy(), expected.numpy()) <= tolerance("float32", 1, 64)


def _conformer(kind: str, **settings: int) -> Any:
    """Attention of wav2vec2-BERT with position_embeddings_type `kind`, and its positions [1,N,E] of
    40 tokens.
    """
    from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as theirs
    from transformers.models.wav2vec2_bert.configuration_wav2vec2_bert import Wav2Vec2BertConfig

    config = Wav2Vec2BertConfig(
        hidden_size=64, num_attention_heads=4, position_embeddings_type=kind, **settings
    )
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    attention = theirs.Wav2Vec2BertSelfAttention(config).eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    waves = theirs.Wav2Vec2BertRelPositionalEmbedding(config)(torch.zeros(1, 40, 64))
    return attention, waves if kind == "relative" else None


@pytest.mark.parametrize("kind", ["relative", "relative_key"])
def test_attention_of_conformers_is_transformer_xl_or_shaw(kind: str) -> None:
    limits = {"left_max_position_embeddings": 9, "right_max_position_embeddings": 3}
    theirs, waves = _conformer(kind, **limits)
    spec = {"name": "shaw", "left": 9, "right": 3, "values": "plain"}
    spec = {"name": "transformer_xl"} if kind == "relative" else spec
    ours: Any = encodings.build(spec, encodings.Geometry(64, 4, 16, 64, False, 4))
    if kind == "relative":
        ours.u, ours.v = theirs.pos_bias_u, theirs.pos_bias_v
        # Sines and cosines alternate there, and stand in halves here.
        halves = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
        ours.weight.data = theirs.linear_pos.weight.data[:, halves].view(4, 16, 64)
    else:
        ours.keys = theirs.distance_embedding.weight
    x = torch.randn(2, 40, 64)
    with torch.no_grad():
        expected = theirs(x, relative_position_embeddings=waves)[0]
        heads = projected(x, theirs.linear_q, theirs.linear_k, theirs.linear_v)
        y = theirs.linear_out(attend(ours, *heads))
    assert worst_error(y.numpy(), expected.numpy()) <= tolerance("float32", 1, 64)


def test_infused_attention_matches_attention_over_tokens_with_added_positions() -> None:
    from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

    ours: Any = encodings.build({"name": "infused"}, encodings.Geometry(16, 1, 16, 64, False, 1))
    rows = torch.zeros(64, 16)
    theirs = torch.nn.MultiheadAttention(16, 1, bias=False, batch_first=True)
    x = torch.randn(1, 30, 16)
    places = torch.arange(30)[None]
    with torch.no_grad():
        create_sinusoidal_embeddings(64, 16, rows)
        for weight in (*theirs.in_proj_weight.chunk(3), theirs.out_proj.weight):
            weight.copy_(torch.eye(16))
        expected = theirs(x + rows[:30], x + rows[:30], x, need_weights=False)[0]
        q, k = ours.rotate(x.unsqueeze(2), x.unsqueeze(2), places)
        y = attend(ours, q, k, x.unsqueeze(2))
    assert worst_error(y.numpy(), expected.numpy()) <= tolerance("float32", 1, 64)


def test_curves_of_inkling_are_those_of_transformers() -> None:
    from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

    torch.manual_seed(1)
    theirs, relative = InklingRelativeLogits(5, 9), torch.randn(1, 30, 4, 5)
    torch.nn.init.normal_(theirs.proj)
    ours: Any = encodings.build(
        {"name": "inkling", "basis": 5, "extent": 9, "scores": "by_size"},
        encodings.Geometry(64, 4, 16, 64),
    )
    ours.table.data = theirs.proj.data
    places, mask = torch.arange(30), torch.full((30, 30), -torch.inf).triu(1)
    q, k, v = torch.randn(3, 1, 30, 4, 16)
    with torch.no_grad():
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / 16
        shares = torch.softmax(scores + theirs(relative, places, places) + mask, dim=-1)
        y = attend(ours, q, k, v, [relative.transpose(1, 2)], causal=True)
    expected = (shares @ v.transpose(1, 2)).transpose(1, 2).flatten(2)
    assert worst_error(y.numpy(), expected.numpy()) <= tolerance("float32", 1, 64)


# Positions of the queries of a chunk for keys of the same chunk, of the one before, and of earlier
# ones, with a trained length of 10, chunks of 6 tokens and a local window of 4: the sequences of
# the code of the paper (3.2), which end at the trained length.
DUAL_CHUNK = ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 10], [10] * 6)


def test_dual_chunk_has_the_published_distances_and_the_temperature_of_vllm() -> None:
    sizes = {"chunk_size": 10, "local_size": 4, "original_max_positions": 20}
    ours: Any = encodings.build({"name": "dual_chunk", **sizes}, encodings.Geometry(64, 4, 16, 64))
    q, k, v = torch.randn(3, 1, 40, 4, 16, generator=torch.Generator().manual_seed(1))
    places, mask = torch.arange(40)[None], torch.full((1, 1, 40, 40), -torch.inf).triu(1)
    of_q, of_k = ours.rotate(q, k, places)
    y = attend(ours, of_q, of_k, v, causal=True)
    chunks, within = np.divmod(np.arange(40), 6)
    apart = np.clip(chunks[:, None] - chunks, 0, 2)
    distances = np.array(DUAL_CHUNK)[apart, within[:, None]] - within
    turns = np.exp(1j * distances[..., None] * 10000.0 ** (-np.arange(8) / 8))
    of_q, of_k = (x[0, ..., :8].numpy() + 1j * x[0, ..., 8:].numpy() for x in (q, k))
    scores = 0.25 * np.einsum("ihd,jhd,ijd->hij", of_q, of_k.conj(), turns).real
    # The factors of queries and of keys at the end of a prompt of that many tokens
    factors = np.clip(0.1 * np.log(np.arange(1, 41) / 20) + 1, 1, None)
    weights = np.exp(scores * factors[:, None] ** 2 + mask[0].numpy())
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("hij,jhd->ihd", weights, v[0].numpy()).reshape(1, 40, 64)
    assert worst_error(y.numpy(), expected) <= tolerance("float32", 1, 64)


def test_dual_chunk_is_rope_within_the_first_chunk() -> None:
    geometry, places = encodings.Geometry(64, 4, 16, 96), torch.arange(96)[None]
    q, k, v = torch.randn(3, 1, 96, 4, 16)
    outputs = []
    for name in ("dual_chunk", "rope"):
        ours: Any = encodings.build({"name": name}, geometry)
        outputs.append(attend(ours, *ours.rotate(q, k, places), v, causal=True))
    assert worst_error(outputs[0].numpy(), outputs[1].numpy()) <= tolerance("float32", 1, 64)


@pytest.mark.parametrize(("heads", "max_bias"), [(1, 8), (4, 8), (6, 8), (12, 16), (20, 4)])
def test_alibi_of_mpt_has_the_slopes_of_the_paper_in_their_order(heads: int, max_bias: int) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = build_mpt_alibi_tensor(heads, 40, max_bias)
    ours: Any = encodings.build(
        {"name": "alibi", "max_bias": float(max_bias)}, encodings.Geometry(24, heads, 8, 64)
    )
    assert worst_error(
        ours.bias(torch.tensor([[39]]), torch.arange(40)[None])[0].numpy(), theirs.numpy()
    ) <= tolerance("float32", 1, 64)
