"""A graph is compared with a module and a function as with a checkpoint; encoders as decoders."""

import warnings
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import pytest
import torch
import transformers

from posenc_export import audit, export_model
from posenc_export.auditing.facts import UNSTATED
from posenc_export.auditing.reference import Called, open_reference
from tests.auditing import families
from tests.auditing.graphs import model_of, right


@pytest.mark.parametrize("kind", ["module", "function", "last token"])
def test_every_kind_of_reference_finds_the_graph_right(kind: str) -> None:
    model = model_of("llama")
    result = audit(
        right("llama") / "right.onnx",
        {
            "module": model,
            "function": lambda ids: model(ids).logits,
            "last token": lambda ids: model(ids).logits[:, -1:],
        }[kind],
        quick=True,
    )
    assert result.right and any(cell.status == "right" for cell in result.cells), result.sentence


@pytest.mark.parametrize("words", [range(32), [7]])  # which of them earlier tokens see
def test_a_reference_that_is_not_causal_is_refused_as_such(words: Sequence[int]) -> None:
    def reference(ids: torch.Tensor) -> torch.Tensor:
        seen = torch.isin(ids, torch.tensor(words)) * ids
        return model_of("llama")(ids).logits + seen.sum(1)[:, None, None]

    with pytest.raises(ValueError, match="expected a causal reference, got one whose earlier"):
        audit(right("llama") / "right.onnx", reference, quick=True)


class Shifted(torch.nn.Embedding):
    """Each token and the one before."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        return x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def test_states_of_fixed_size_are_read_as_replaced_by_every_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Shifted(32, 32)
    export_model(module, "onnx", tmp_path / "a", max_positions=64)
    result = audit(tmp_path / "a" / "model.onnx", module, quick=True)
    assert result.right and "states that every call replaces" in result.sentence
    assert "replaced by every call" in str(result.inputs)


@pytest.mark.parametrize("family", ["llama", "bloom", "falcon", "llama4_text"])
def test_other_starts_are_compared_if_transformers_computes_them(
    family: str, tmp_path: Path
) -> None:
    theirs = Called(families.save(family, tmp_path), 32, 0)
    ours = open_reference(tmp_path, False, 32, 0)
    tokens = np.arange(3, 39)[None]
    expected = theirs.outputs(tokens, 476)
    error = np.abs(ours.outputs(tokens, 476) - expected).max() / np.abs(expected).max()
    assert ours.facts.starts == (error < 1e-4)


class Placed(torch.nn.Embedding):
    """Tokens with a table of as many positions as it has rows."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + super().forward(torch.arange(ids.shape[1]))


@pytest.mark.parametrize("positions", [7, 40, 64, 5000])
def test_a_module_is_compared_up_to_as_many_tokens_as_it_takes(positions: int) -> None:
    assert Called(Placed(positions, 8), 5, 0).facts.positions == min(positions, UNSTATED)


def test_another_checkpoint_is_wrong_from_the_first_token() -> None:
    result = audit(right("llama") / "right.onnx", model_of("llama", seed=2), quick=True)
    assert result.verdict == "wrong" and result.cause == "everywhere", result.sentence


class Encoder(torch.nn.Module):
    """An encoder as graphs of others call it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class Unmasked(Encoder):
    """An encoder that sees padding."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (
            super().forward(input_ids, torch.ones_like(attention_mask))
            + 0 * attention_mask[..., None]
        )


@pytest.mark.parametrize("kind", [Encoder, Unmasked])
def test_an_encoder_that_sees_padding_is_wrong_in_padded_rows(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "checkpoint")
    inputs = (torch.randint(0, 61, (2, 7)), torch.ones(2, 7, dtype=torch.int64))
    axes = {0: "batch", 1: "sequence"}
    names = ["input_ids", "attention_mask"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            kind(model),
            inputs,
            str(tmp_path / "model.onnx"),
            dynamo=False,
            input_names=names,
            output_names=["last_hidden_state"],
            dynamic_axes=dict.fromkeys([*names, "last_hidden_state"], axes),
        )
    result = audit(tmp_path / "model.onnx", tmp_path / "checkpoint")
    assert result.cause == ("behind" if kind is Unmasked else ""), result.sentence
