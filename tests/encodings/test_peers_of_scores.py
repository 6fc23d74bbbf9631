"""Encodings of scores compared with independent implementations."""

from typing import Any

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


@pytest.mark.parametrize(("heads", "max_bias"), [(4, 8), (6, 8), (12, 16), (20, 4)])
def test_alibi_of_mpt_has_the_slopes_of_the_paper_in_their_order(heads: int, max_bias: int) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = build_mpt_alibi_tensor(heads, 40, max_bias)
    ours: Any = encodings.build(
        {"name": "alibi", "max_bias": float(max_bias)}, encodings.Geometry(24, heads, 8, 64)
    )
    assert worst_error(
        ours.bias(torch.tensor([[39]]), torch.arange(40)[None])[0].numpy(), theirs.numpy()
    ) <= tolerance("float32", 1, 64)


def test_alibi_added_before_the_scale_is_that_of_falcon() -> None:
    from transformers.models.falcon.modeling_falcon import (
        FalconAttention,
        FalconConfig,
        build_alibi_tensor,
    )

    config = FalconConfig(
        hidden_size=64, num_attention_heads=4, alibi=True, multi_query=False, attention_dropout=0.0
    )
    torch.manual_seed(1)
    theirs, x = FalconAttention(config, 0).eval(), torch.randn(1, 30, 64)
    with torch.no_grad():
        alibi = build_alibi_tensor(torch.ones(1, 30), 4, torch.float32)
        mask = torch.full((30, 30), -1e9).triu(1)[None, None]
        expected = theirs(x, alibi, mask)[0]
        q, k, v = theirs._split_heads(theirs.query_key_value(x))
        ours: Any = encodings.build(
            {"name": "alibi", "added": "before"}, encodings.Geometry(64, 4, 16, 64)
        )
        places = torch.arange(30)[None]
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / 4 + ours.bias(places, places) + mask
        y = theirs.dense(
            (torch.softmax(scores, dim=-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2)
        )
    assert worst_error(y.numpy(), expected.numpy()) <= tolerance("float32", 1, 64)


def test_shaw_of_sinusoids_is_nezha() -> None:
    nezha = pytest.importorskip(
        "transformers.models.deprecated.nezha.modeling_nezha", reason="NEZHA was in transformers 4"
    )
    config = nezha.NezhaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64, max_relative_position=7,
        attention_probs_dropout_prob=0.0
    )  # fmt: skip
    torch.manual_seed(1)
    theirs, x = nezha.NezhaSelfAttention(config).eval(), torch.randn(1, 30, 64)
    ours: Any = encodings.build(
        {"name": "shaw", "left": 7, "right": 7, "table": "sinusoidal"},
        encodings.Geometry(64, 4, 16, 64, False, 4),
    )
    with torch.no_grad():
        expected = theirs(x)[0]
        q, k, v = (part(x).view(1, 30, 4, 16) for part in (theirs.query, theirs.key, theirs.value))
        places, mask = torch.arange(30)[None], torch.zeros(1, 1, 30, 30)
        y = ours.rescore(q, k.transpose(1, 2), v.transpose(1, 2), mask, places, places, 0.25, [])
    assert worst_error(y.numpy(), expected.numpy()) <= tolerance("float32", 1, 64)


@pytest.mark.parametrize("table", ["sinusoidal", "trained"])
def test_infused_attention_matches_attention_over_tokens_with_added_positions(table: str) -> None:
    from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

    ours: Any = encodings.build(
        {"name": "infused", "table": table}, encodings.Geometry(16, 1, 16, 64, False, 1)
    )
    rows = torch.zeros(64, 16)
    theirs = torch.nn.MultiheadAttention(16, 1, bias=False, batch_first=True)
    x = torch.randn(1, 30, 16)
    places = torch.arange(30)[None]
    with torch.no_grad():
        create_sinusoidal_embeddings(64, 16, rows)
        rows = rows if table == "sinusoidal" else ours.table.weight
        for weight in (*theirs.in_proj_weight.chunk(3), theirs.out_proj.weight):
            weight.copy_(torch.eye(16))
        expected = theirs(x + rows[:30], x + rows[:30], x, need_weights=False)[0]
        q, k = ours.rotate(x.unsqueeze(2), x.unsqueeze(2), places)
        y = ours.rescore(
            q,
            k.transpose(1, 2),
            x.unsqueeze(1),
            torch.zeros(1, 1, 30, 30),
            places,
            places,
            ours.score_scale(16),
            [],
        )
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
    places, mask = torch.arange(30)[None], torch.full((30, 30), -torch.inf).triu(1)[None, None]
    q, k, v = torch.randn(3, 1, 30, 4, 16)
    with torch.no_grad():
        shares = torch.softmax(
            q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / 16
            + theirs(relative, places[0], places[0])
            + mask,
            dim=-1,
        )
        y = ours.rescore(
            q,
            k.transpose(1, 2),
            v.transpose(1, 2),
            mask,
            places,
            places,
            ours.score_scale(16),
            [relative.transpose(1, 2)],
        )
    assert worst_error(
        y.view(1, 30, 4, 16).numpy(), (shares @ v.transpose(1, 2)).transpose(1, 2).numpy()
    ) <= tolerance("float32", 1, 64)
