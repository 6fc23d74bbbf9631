"""Artefacts with signature `mask` beside transformers, for masks with padding before, behind and
between the tokens of a row: with whole rows, and with a cache.
"""

import re
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import onnxruntime
import pytest
import torch

from posenc_export import from_pretrained
from posenc_export.export import export
from posenc_export.export.signatures import wrap
from posenc_export.models.whole_pass import empty_states
from posenc_export.runtime import load
from posenc_export.shared.numerics import worst_error
from tests.models.checkpoints import saved
from tests.models.patterns import ABSOLUTE, RELATIVE, tokens_of
from tests.tiny import decoder
from tests.traces import artefact, exported, sources

pytestmark = pytest.mark.xdist_group("masks")
MASKS = {
    "before": "00000011111111111111",
    "behind": "11111111111111000000",
    "between": "00111110000111011111",
}
DECODER = decoder("rope")
CALLS = {"whole": (20,), "cached": (11, *(1,) * 9)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return transformers' model with a window and the graph of its artefact."""
    place = tmp_path_factory.mktemp("masks")
    peer, folder = saved("mistral with a window", place / "checkpoint")
    export(from_pretrained(folder), "onnx", place / "a", signature="mask", verify=False)
    return peer, onnxruntime.InferenceSession(place / "a" / "model.onnx")


def _calls(mask: np.ndarray, counts: tuple[int, ...]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens of each call and the columns of the mask up to them."""
    end, tokens = 0, tokens_of(2, mask.shape[1])
    for count in counts:
        end += count
        yield tokens[:, end - count : end], mask[:, :end]


def _theirs(peer: Any, mask: np.ndarray, counts: tuple[int, ...]) -> np.ndarray:
    outputs, cache = [], None
    for tokens, seen in _calls(mask, counts):
        how: dict[str, Any] = {"attention_mask": torch.from_numpy(seen)}
        positions = (seen.cumsum(1) - 1).clip(0)[:, -tokens.shape[1] :]
        how["position_ids"] = torch.from_numpy(positions)
        with torch.no_grad():
            result = peer(torch.from_numpy(tokens), cache=cache, use_cache=True, **how)
        cache = result.cache
        outputs.append(result.logits.numpy())
    return np.concatenate(outputs, 1)


def _ours(graph: Any, mask: np.ndarray, counts: tuple[int, ...]) -> np.ndarray:
    states = {}
    for value in graph.get_inputs():
        if value.name.startswith("past"):
            sizes = [len(mask) if size == "batch_size" else size for size in value.shape]
            sizes = [0 if isinstance(size, str) else size for size in sizes]
            states[value.name] = np.zeros(sizes, np.float32)
    outputs: list[np.ndarray] = []
    for tokens, seen in _calls(mask, counts):
        results = graph.run(None, {"input_ids": tokens, "attention_mask": seen, **states})
        outputs.append(results[0])
        named = {value.name: x for value, x in zip(graph.get_outputs(), results, strict=True)}
        states = {past: named[re.sub("^past(_key_values)?", "present", past)] for past in states}
    return np.concatenate(outputs, 1)


def _mask(name: str) -> np.ndarray:
    """Return a mask [2,20] whose second row has no padding."""
    return np.stack([np.array(list(MASKS[name]), np.int64), np.ones(20, np.int64)])


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("padding", ["before", "behind"])
def test_a_mask_gives_the_logits_of_transformers(padding: str, calls: str, made: Any) -> None:
    (peer, graph), mask = made, _mask(padding)
    seen = mask == 1
    wanted = _theirs(peer, mask, CALLS[calls])[seen]
    ours = _ours(graph, mask, CALLS[calls])[seen]
    assert (np.abs(ours - wanted) <= ABSOLUTE + RELATIVE * np.abs(wanted)).all()


def test_a_graph_refuses_zeros_between_ones() -> None:
    folder = artefact(DECODER, "onnx", signature="mask")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    graph = onnxruntime.InferenceSession(folder / "model.onnx", options)
    assert np.isfinite(_ours(graph, _mask("before"), (20,))).all()
    with pytest.raises(Exception, match="attention_mask: expected no 0 between the ones of a row"):
        _ours(graph, _mask("between"), (20,))


def test_in_torch_zeros_between_ones_are_refused() -> None:
    model = sources(DECODER).model
    tokens = torch.from_numpy(tokens_of(2, 20))
    states = empty_states(model, tokens)
    with pytest.raises((IndexError, RuntimeError), match="out of range|out of bounds"):
        wrap(model, "mask")(tokens, torch.from_numpy(_mask("between")), states)


def test_a_session_refuses_zeros_between_ones(tmp_path: Path) -> None:
    session = load(exported(tmp_path / "a", decoder("rope"), "onnx"), provider="cpu").session()
    rule = "expected attention_mask without zeros between the ones of a row, got row 0 with tokens"
    with pytest.raises(ValueError, match=rule):
        session.prefill(tokens_of(2, 20), attention_mask=_mask("between"))


def test_rows_of_a_session_with_a_mask_count_tokens_after_shorter_rows(tmp_path: Path) -> None:
    folder = exported(tmp_path / "a", decoder("alibi"), "onnx", signature="mask")
    session, tokens = load(folder, provider="cpu").session(), tokens_of(2, 20)
    session.prefill([tokens[0, :6], tokens[1, :12]])
    ours = session.prefill([tokens[0, 6:14], tokens[1, 12:]])
    session.reset()
    wanted = session.prefill(tokens[:1, :14])[:, 6:]
    assert worst_error(ours[:1], wanted) <= session.manifest.reference.tolerance
