"""Inputs as exporters name them are understood."""

from pathlib import Path
from typing import Mapping

import numpy as np
import onnx
import pytest

from posenc_export.auditing.facts import Facts
from posenc_export.auditing.graph import SLOTS, Graph
from posenc_export.auditing.inputs import Value, interface_of
from posenc_export.auditing.plan import plan
from posenc_export.auditing.session import ForeignSession, NotPossible, feeds_of

# As onnxruntime-genai's builder writes a decoder: the head size of caches is symbolic.
BUILDER = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
decoder (
    float[batch_size, sequence_length, 64] hidden_states,
    int64[batch_size, total_sequence_length] attention_mask,
    float[batch_size, 2, past_sequence_length, kv_cache_dim] past_key_values_0_key,
    float[batch_size, 2, past_sequence_length, kv_cache_dim] past_key_values_0_value
) => (
    float[batch_size, sequence_length, 32] hidden,
    float[batch_size, 2, total_sequence_length, kv_cache_dim] present_0_key,
    float[batch_size, 2, total_sequence_length, kv_cache_dim] present_0_value
)
<float[batch_size, sequence_length, 32] attended, int64[1] axis = {1}, int64[1] less = {1}>
{
    tokens = ReduceSum <keepdims = 0> (attention_mask, axis)
    last = Sub (tokens, less)
    seqlens = Cast <to = 6> (last)
    shape = Shape <start = 1> (attention_mask)
    scalar = Squeeze (shape)
    total = Cast <to = 6> (scalar)
    attended, present_0_key, present_0_value = com.microsoft.GroupQueryAttention <
        num_heads = 4, kv_num_heads = 2, scale = 0.25, local_window_size = 8,
        sliding_window_cache = KEEPS
    > (hidden_states, , , past_key_values_0_key, past_key_values_0_value, seqlens, total)
    hidden = Identity (attended)
}
"""


@pytest.mark.parametrize(("keeps", "slots"), [(0, 0), (1, SLOTS)])
def test_caches_of_the_builder_have_a_head_size(keeps: int, slots: int, tmp_path: Path) -> None:
    text = BUILDER.replace("KEEPS", str(keeps))
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    graph = Graph(tmp_path / "model.onnx")
    read = interface_of(graph.inputs, graph.outputs, counts_rows=True)
    assert [(cache.slots, cache.past.axes[3], cache.capacity) for cache in read.caches] == [
        (2, 8, slots)
    ] * 2
    assert read.padding == "right"


@pytest.mark.parametrize("caches", ["past_key_values", "cache"])  # to 5.23, and from 5.24
def test_inputs_of_transformers_exporter_are_understood(caches: str) -> None:
    past, present = f"input.{caches}.layers.0.", f"output.{caches}.layers.0."
    inputs = [
        Value("input_ids", "int64", ("s44", "s70")),
        Value(f"{past}keys", "float32", ("s44", 2, "s36", 16)),
        Value(f"{past}values", "float32", ("s44", 2, "s36", 16)),
        Value(f"{past}_sliding_window_tensor", "int64", ()),
    ]
    outputs = [
        Value("logits", "float32", ("s44", "s70", 61)),
        Value(f"{present}values", "float32", ("s44", 2, "s36 + s70", 16)),
        Value(f"{present}keys", "float32", ("s44", 2, "s36 + s70", 16)),
    ]
    read = interface_of(inputs, outputs, unread=[inputs[3].name])
    assert [cache.present for cache in read.caches] == [outputs[2].name, outputs[1].name]
    ones = np.ones((2, 3), bool)
    feeds = feeds_of(read, ones.astype(np.int64), ones, ones, np.zeros(2, np.int64))
    assert feeds[inputs[3].name].shape == () and feeds[inputs[3].name] == 0


def test_sizes_written_as_names_are_numbers_and_copied_inputs_are_unread(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    graph (int64[batch, length] input_ids, int64 window, float[batch, x2, past, x16] past_keys)
    => (int64[batch, length] logits, int64 same, float[batch, 2, past, 16] present_keys)
    {
        logits = Neg (input_ids)
        same = Identity (window)
        present_keys = Neg (past_keys)
    }
    """
    model = onnx.parser.parse_model(text)
    for axis in (1, 3):
        dimension = model.graph.input[2].type.tensor_type.shape.dim[axis]
        dimension.dim_param = dimension.dim_param[1:]
    onnx.save(model, tmp_path / "model.onnx")
    graph = Graph(tmp_path / "model.onnx")
    assert graph.inputs[2].axes == ("batch", 2, "past", 16)
    assert graph.unread == {"window"}


@pytest.mark.parametrize("positions", [False, True])
def test_slots_of_a_graph_without_positions_are_not_moved(positions: bool) -> None:
    names = ["input_ids", "attention_mask", *(["position_ids"] if positions else [])]
    inputs = [Value(name, "int64", ("batch", "length")) for name in names]
    cache = Value("past_key_values.0.key", "float32", ("batch", 1, "past", 2))
    outputs = [Value("logits", "float32", ("batch", "length", 5)), Value("present.0.key", "", ())]

    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        tokens, past = feeds["input_ids"], feeds[cache.name]
        new = np.zeros((len(tokens), 1, tokens.shape[1], 2), np.float32)
        logits = np.zeros((*tokens.shape, 5), np.float32)
        return {"logits": logits, "present.0.key": np.concatenate((past, new), axis=2)}

    session = ForeignSession(run, interface_of([*inputs, cache], outputs))
    session.prefill(np.ones((2, 6), np.int64))
    session.rewind(2)  # of all rows: no slot moves
    if positions:
        session.rewind([1, 0])
        assert session.valid.tolist() == [[False, True, True, True], [True] * 4]
    else:
        with pytest.raises(NotPossible, match="none can be moved"):
            session.rewind([1, 0])


class _Longer:
    """A reference whose angles change behind 16 tokens."""

    facts = Facts(5, 5, 0, 64, True, {"original 16": 16}, 1e-6, 2, whole=16)

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        return np.zeros((*tokens.shape, 5), np.float32)


def test_rows_on_both_sides_of_an_original_length_are_not_compared() -> None:
    inputs = [Value(name, "int64", ("b", "s")) for name in ("input_ids", "attention_mask")]
    read = interface_of(inputs, [Value("logits", "float32", ("b", "s", 5))])
    names = [cell.name for cell in plan(read, _Longer(), quick=False)[0]]
    assert "batch 1, start 0: rows padded behind" in names
    assert "batch 3, start 0: rows padded behind" not in names
