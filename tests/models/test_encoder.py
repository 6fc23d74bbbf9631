"""The encoder against BERT of transformers, weights copied, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch

from posenc_export.export.describe import eager
from posenc_export.models.config import AttentionConfig, EncoderConfig
from posenc_export.models.encoder import Encoder
from posenc_export.models.presets import seeded
from posenc_export.numerics import tolerance, worst_error
from posenc_export.runtime import Model
from posenc_export.runtime.torch_graph import TorchGraph
from tests.tiny import encoder


def _of_bert(theirs: Any) -> Encoder:
    c = theirs.config
    block = AttentionConfig(
        c.hidden_size, c.num_attention_heads, c.max_position_embeddings, encoding={"name": "learned"}, qkv_bias=True, output_bias=True, causal=False
    )  # fmt: skip
    ours = Encoder(EncoderConfig(c.vocab_size, c.num_hidden_layers, c.intermediate_size, block, c.type_vocab_size, c.layer_norm_eps)).eval()
    table, w = theirs.embeddings, {}
    w["embedding"], w["segments"], w["encoding.table"], w["norm"] = table.word_embeddings, table.token_type_embeddings, table.position_embeddings, table.LayerNorm
    for index, layer in enumerate(theirs.encoder.layer):
        here = f"layers.{index}."
        w[here + "attention.output"], w[here + "attention_norm"] = layer.attention.output.dense, layer.attention.output.LayerNorm
        w[here + "mlp.up"], w[here + "mlp.down"], w[here + "mlp_norm"] = layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm
        joined, parts = torch.nn.Linear(c.hidden_size, 3 * c.hidden_size), (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value)
        joined.weight.data, joined.bias.data = torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])
        w[here + "attention.qkv"] = joined
    for name, module in w.items():
        ours.get_submodule(name).load_state_dict(module.state_dict())
    return ours


def test_hidden_states_are_those_of_bert_with_segments_and_padding() -> None:
    bert = pytest.importorskip("transformers.models.bert.modeling_bert", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 40}
    theirs = bert.BertModel(bert.BertConfig(**sizes)).eval()
    for name, part in theirs.named_parameters():
        torch.nn.init.normal_(part, mean=float("LayerNorm.weight" in name), std=0.3)
    ids, types, mask = torch.randint(61, (3, 20)), torch.randint(2, (3, 20)), torch.ones(3, 20, dtype=torch.int64)
    mask[1, 15:], mask[2, 7:] = 0, 0
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask, token_type_ids=types).last_hidden_state
    module, manifest = eager(_of_bert(theirs))
    actual = Model(TorchGraph(module, manifest)).session().prefill(ids.numpy(), attention_mask=mask.numpy(), token_types=types.numpy())
    seen = mask.bool().numpy()
    assert worst_error(actual[seen], expected.numpy()[seen]) <= tolerance("float32", 2, 96)


def test_segments_change_what_comes_out_and_are_first_where_not_given() -> None:
    module, manifest = eager(seeded(encoder("alibi")))
    session, ids = Model(TorchGraph(module, manifest)).session(), np.arange(12)[None]
    plain = session.prefill(ids)
    assert np.array_equal(plain, session.prefill(ids, token_types=np.zeros((1, 12), np.int64)))
    assert worst_error(session.prefill(ids, token_types=np.full((1, 12), 2)), plain) > 1e-3


@pytest.mark.parametrize(
    ("types", "message"),
    [(np.full((1, 12), 3), "token_types is 0 .. 2, got 3"), (np.zeros((1, 11), np.int64), "token_types is"), (np.zeros((1, 12)), "whole numbers, got .* float64")],
)
def test_segments_that_do_not_fit_are_refused(types: np.ndarray, message: str) -> None:
    module, manifest = eager(seeded(encoder("alibi")))
    with pytest.raises(ValueError, match=message):
        Model(TorchGraph(module, manifest)).session().prefill(np.arange(12)[None], token_types=types)


def test_what_needs_a_cache_or_a_vocabulary_is_refused() -> None:
    module, manifest = eager(seeded(encoder("alibi")))
    session, ids = Model(TorchGraph(module, manifest)).session(), np.arange(12)[None]
    session.prefill(ids)
    for call, message in (
        (lambda: session.step(ids[:, 0]), "a step needs what is cached"),
        (lambda: session.rewind(1), "a rewind needs what is cached"),
        (lambda: list(session.generate(ids, 2)), "generate takes a decoder, got kind encoder"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("variant", ["input_rnn", "conditional_conv", "fire", "cope", "fox"])
def test_encodings_that_look_back_only_are_refused_by_name(variant: str) -> None:
    with pytest.raises(ValueError, match="works in causal attention, got bidirectional"):
        Encoder(encoder(variant))


def test_an_encoder_is_not_causal() -> None:
    with pytest.raises(ValueError, match="sees both ways"):
        EncoderConfig(61, 2, 40, AttentionConfig(48, 4, 64))
