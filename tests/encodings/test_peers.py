"""Encodings compared with independent implementations."""

from typing import Any

import pytest
import torch

from posenc_export import encodings
from tests.encodings.test_peers_of_scores import attend, projected

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def _build(name: str, causal: bool = True, **parameters: Any) -> Any:
    torch.manual_seed(0)
    return encodings.build(
        {"name": name, **parameters}, encodings.Geometry(64, 4, 32, 4096, causal, 4)
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("buckets", "max_distance"), [(32, 128), (64, 256), (16, 50), (36, 50), (72, 50), (72, 100)]
)
def test_t5_buckets_are_those_of_transformers(
    causal: bool, buckets: int, max_distance: int
) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    encoding = _build("t5", causal, buckets=buckets, max_distance=max_distance)
    ahead = torch.arange(-100000, 1 if causal else 100001)
    expected = T5Attention._relative_position_bucket(ahead, not causal, buckets, max_distance)
    index = (
        (-ahead).clamp(0, max_distance)
        if causal
        else ahead.clamp(-max_distance, max_distance) + max_distance
    )
    assert torch.equal(encoding.of_distance[index], expected)


@pytest.mark.parametrize(("span", "max_relative"), [(32, 128), (256, 512), (16, 100)])
def test_deberta_log_buckets_are_those_of_transformers(span: int, max_relative: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    encoding = _build("deberta", span=span, max_relative=max_relative)
    behind = torch.arange(-3 * max_relative, 3 * max_relative + 1)
    expected = (make_log_bucket_position(behind, span, max_relative).long() + span).clamp(
        0, 2 * span - 1
    )
    assert torch.equal(
        encoding.of_distance[behind.clamp(-max_relative, max_relative) + max_relative], expected
    )


@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["c2p"], ["p2c"]])
def test_deberta_scores_are_those_of_transformers(terms: Any) -> None:
    from transformers.models.deberta_v2 import DebertaV2Config
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    config = DebertaV2Config(
        hidden_size=64, num_attention_heads=4, attention_head_size=16, relative_attention=True,
        position_buckets=8, max_relative_positions=20, pos_att_type=terms, share_att_key=False,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = DisentangledSelfAttention(config).eval()
    one = {"terms": terms[0]} if len(terms) == 1 else {}
    ours: Any = encodings.build(
        {"name": "deberta", "span": 8, "max_relative": 20, **one},
        encodings.Geometry(64, 4, 16, 64, False, 4),
    )
    if "c2p" in terms:
        ours.of_keys.load_state_dict(theirs.pos_key_proj.state_dict())
    if "p2c" in terms:
        ours.of_queries.load_state_dict(theirs.pos_query_proj.state_dict())
    x, table = torch.randn(1, 30, 64), torch.randn(16, 64)
    ours.table.data = table
    with torch.no_grad():
        expected = theirs(x, torch.ones(1, 1, 30, 30).long(), rel_embeddings=table)[0]
        q, k, v = projected(x, theirs.query_proj, theirs.key_proj, theirs.value_proj)
        places = torch.arange(30)[None]
        carried = ours.observe(x, k, places, torch.zeros(1).long(), [])
        y = attend(ours, q, k, v, carried)
    assert torch.allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("pretrained", [[0, 0], [3, 4]])
def test_swin_v2_bias_is_that_of_transformers(pretrained: Any) -> None:
    from transformers.models.swinv2 import Swinv2Config
    from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

    theirs = Swinv2SelfAttention(
        Swinv2Config(), dim=64, num_heads=4, window_size=(5, 5), pretrained_window_size=pretrained
    ).eval()
    rows, columns = pretrained
    sizes = f"rows=5,columns=5,pretrained_rows={rows},pretrained_columns={columns}"
    ours: Any = encodings.build(
        encodings.parse(f"swin_v2:hidden=512,{sizes}"), encodings.Geometry(64, 4, 16, 25, False)
    )
    first, _, second = theirs.continuous_position_bias_mlp
    ours.first.load_state_dict(first.state_dict())
    ours.second.load_state_dict(second.state_dict())
    table = theirs.continuous_position_bias_mlp(theirs.relative_coords_table).view(-1, 4)
    expected = 16 * torch.sigmoid(
        table[theirs.relative_position_index.view(-1)].view(25, 25, 4).permute(2, 0, 1)
    )
    places = torch.arange(25)[None]
    assert torch.allclose(ours.bias(places, places)[0], expected, atol=1e-5)


FACTORS = {
    "short_factor": [1.0 + k / 7 for k in range(16)],
    "long_factor": [1.0 + k / 3 for k in range(16)],
}
# Parameters of transformers, max_position_embeddings of transformers, and our parameters.
GROWN = {
    "rope_dynamic": (
        {"rope_type": "dynamic", "factor": 3.0},
        200,
        {"factor": 3.0, "original_max_positions": 200},
    ),
    "rope_longrope": (
        {"rope_type": "longrope", "original_max_position_embeddings": 200, **FACTORS},
        40000,
        {"original_max_positions": 200, **FACTORS},
    ),
}


def _rotation_of_llama(name: str) -> Any:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters, longest, _ = GROWN[name]
    given = {"rope_theta": 10000.0, **parameters}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    config = LlamaConfig(**sizes, max_position_embeddings=longest, rope_parameters=given)
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("length", [150, 200, 201, 1000])
@pytest.mark.parametrize("name", GROWN)
def test_keys_turned_for_a_query_match_transformers(name: str, length: int) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    spec, geometry = (
        {"name": name, **GROWN[name][2]},
        encodings.Geometry(128, 4, 32, 40000, True, 4),
    )
    theirs, ours = _rotation_of_llama(name), encodings.build(spec, geometry)
    places = torch.arange(length)[None]
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 4, length, 32)
    cos, sin = theirs(torch.zeros(1), places)
    of_q, of_k = apply_rotary_pos_emb(q, k, cos, sin)
    expected = torch.softmax(of_q[:, :, -1:] @ of_k.transpose(2, 3) / 32**0.5, dim=-1) @ v
    queries, keys = ours.rotate(q.transpose(1, 2), k.transpose(1, 2), places)
    mask = torch.zeros(1, 1, 1, length)
    seen = encodings.Seen(keys.transpose(1, 2), v, mask, places[:, -1:], places)
    y = ours.rescore(queries[:, -1:], seen, ours.score_scale(32), [])
    # transformers rounds angles to float32.
    most = 2e-6 + length * 2.0**-23
    assert torch.allclose(y.view(4, 32), expected[0, :, 0], rtol=0, atol=most)


def test_temperature_in_steps_is_that_of_llama_4() -> None:
    from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

    config = Llama4TextConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        num_hidden_layers=4, floor_scale=5, attn_scale=0.7, use_qk_norm=False
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    theirs = Llama4TextAttention(config, 3).eval()
    for part in theirs.parameters():
        torch.nn.init.normal_(part, std=0.2)
    x, mask = torch.randn(1, 30, 64), torch.full((30, 30), -torch.inf).triu(1)[None, None]
    ours: Any = encodings.build(
        {"name": "logn", "form": "steps", "temperature": 0.7, "period": 5},
        encodings.Geometry(64, 4, 16, 64, True, 4),
    )
    with torch.no_grad():
        expected = theirs(
            x, position_embeddings=(torch.zeros(1), torch.zeros(1)), attention_mask=mask
        )[0]
        q, k, v = projected(x, theirs.q_proj, theirs.k_proj, theirs.v_proj)
        q, k = ours.rotate(q, k, torch.arange(30)[None])
        y = theirs.o_proj(attend(ours, q, k, v, causal=True))
    assert torch.allclose(y, expected, atol=1e-5)
