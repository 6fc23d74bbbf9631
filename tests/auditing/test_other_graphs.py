"""Programs of torch.export, and graphs that this package exports: right ones, and ones of another
model than that of the reference.
"""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations import executorch

from bench.audit_exporters import Wrapper
from posenc_export import audit, export_model, from_pretrained
from tests.auditing import families
from tests.auditing.graphs import model_of


def test_a_program_of_torch_export_is_audited(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    model.config.rope_parameters["rope_theta"] = 1000.0
    model.save_pretrained(tmp_path / "another")
    ids, positions = torch.randint(3, 61, (2, 9)), torch.arange(9).expand(2, 9).clone()
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(
        Wrapper(model), (ids, torch.ones_like(ids), positions), dynamic_shapes=(axes, axes, axes)
    )
    torch.export.save(exported, tmp_path / "model.pt2")
    result = audit(tmp_path / "model.pt2", tmp_path / "checkpoint", quick=True)
    assert result.right, result.sentence
    result = audit(tmp_path / "model.pt2", tmp_path / "another", quick=True)
    assert result.cause == "theta" and "10000 and not 1000" in result.sentence, result.sentence


@pytest.mark.parametrize("window", [8, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_a_program_with_a_static_cache_in_its_buffers_is_audited(
    window: int, tmp_path: Path
) -> None:
    model = model_of("mistral", sliding_window=window)
    model.generation_config = transformers.GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        cache_config={"batch_size": 1, "max_cache_len": 64},
    )
    model_of("mistral").save_pretrained(tmp_path / "checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = executorch.convert_and_export_with_cache(model)
        torch.export.save(exported, tmp_path / "model.pt2")
    result = audit(tmp_path / "model.pt2", tmp_path / "checkpoint")
    ran = [cell.name for cell in result.cells if cell.status != "not possible"]
    assert "batch 1, start 0: steps" in ran and result.right == (window == 8), result.sentence
    if window != 8:
        assert "from position 8 on" in result.sentence
        repeat = tmp_path / "repeat.py"
        repeat.write_text(result.program, "utf-8")
        ended = subprocess.run([sys.executable, repeat], capture_output=True, text=True)
        assert ended.returncode == 1 and "tolerance" in ended.stdout, ended.stderr


class Masked(torch.nn.Module):
    """Attention of one head with a mask [B,1,S,S] of numbers that are added to scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        return self.head(x + (x @ x.mT / 4 + attention_mask[:, 0]).softmax(-1) @ x)


def test_a_program_in_bfloat16_is_audited(tmp_path: Path) -> None:
    def reference(ids: torch.Tensor) -> torch.Tensor:
        later = torch.ones(len(ids), 1, ids.shape[1], ids.shape[1]).triu(1)
        return Masked()(ids, -1e30 * later)

    ids, mask, dynamic = torch.ones(2, 9).long(), torch.zeros(2, 1, 9, 9), torch.export.Dim.DYNAMIC
    axes = ({0: dynamic, 1: dynamic}, {0: dynamic, 2: dynamic, 3: dynamic})
    module, inputs = Masked().bfloat16(), (ids, mask.bfloat16())
    exported = torch.export.export(module, inputs, dynamic_shapes=axes)
    torch.export.save(exported, tmp_path / "model.pt2")
    result = audit(tmp_path / "model.pt2", reference, quick=True)
    assert result.right and max(cell.error for cell in result.cells) > 1e-4, result.sentence


SLOTS = 48


class Stacked(torch.nn.Module):
    """A decoder with one input for all of its static caches [2 layers,B,H,M,D], and a float mask
    [B,1,S,M].
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, position_ids, cache_position, past_key_values):  # type: ignore[no-untyped-def]
        written = []

        class Static(transformers.DynamicCache):
            def update(self, keys: Any, values: Any, layer: int, *more: Any, **named: Any) -> Any:
                new = zip(past_key_values[2 * layer : 2 * layer + 2], (keys, values), strict=True)
                pair = [old.index_copy(2, cache_position, tokens) for old, tokens in new]
                written.extend(pair)
                return pair

        logits = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=Static()
        ).logits
        return logits, torch.stack(written)


def test_a_stacked_static_cache_and_a_mask_of_four_dimensions_are_understood(
    tmp_path: Path,
) -> None:
    model = model_of("llama", tmp_path)
    axes = {
        "input_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 2: "sequence"},
        "position_ids": {0: "batch", 1: "sequence"},
        "cache_position": {0: "sequence"},
        "past_key_values": {1: "batch"},
    }
    positions = torch.arange(5, 8)
    inputs = (
        torch.randint(3, 61, (2, 3)), torch.zeros(2, 1, 3, SLOTS), positions.expand(2, 3).clone(),
        positions, torch.randn(4, 2, 2, SLOTS, 8),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Stacked(model), inputs, str(tmp_path / "model.onnx"), dynamo=False,
            input_names=[*axes], output_names=["logits", "present"], dynamic_axes=axes,
        )  # fmt: skip
    result = audit(tmp_path / "model.onnx", tmp_path / "checkpoint")
    assert result.right and {cell.status for cell in result.cells} == {"right"}, result.sentence
    assert "of fixed size 48" in next(r["meaning"] for r in result.inputs if "past" in r["name"])


def test_long_factors_at_every_length_are_named(tmp_path: Path) -> None:
    families.save("phi3", tmp_path / "checkpoint")
    long = from_pretrained(tmp_path / "checkpoint")
    export_model(long, "onnx", tmp_path / "long", verify=False)
    result = audit(tmp_path / "long" / "model.onnx", tmp_path / "checkpoint")
    assert result.cause == "long factors always", result.sentence


def test_calls_that_an_operator_does_not_take_are_no_fault(tmp_path: Path) -> None:
    model_of("llama", tmp_path)
    folder = tmp_path / "checkpoint"
    export_model(from_pretrained(folder), "ort", tmp_path / "ort", verify=False)
    result = audit(tmp_path / "ort" / "model.onnx", folder)
    assert result.right, result.sentence
    limited = [cell.name for cell in result.cells if cell.message.endswith("for one row only")]
    assert limited == ["batch 3, start 0: chunks of 5"]
