"""Folders of sentence-transformers: pooling, dense layers and normalization in the graph, texts
cut as that library cuts them, refusals by name.
"""

import json
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.models import text_settings
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import load
from posenc_export.runtime.artefact.tokenizer import read_tokenizer
from posenc_export.shared.numerics import tolerance, worst_error
from tests import traces
from tests.models import checkpoints
from tests.models.sentence_folders import DENSE, MOST, TEXTS, artefact, dense_weights, folder
from tests.tiny import encoder

TEXT, MODEL = "sentence_bert_config.json", "config_sentence_transformers.json"
pytest.importorskip("tokenizers", reason="tokenizers is not installed")
POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda x: x[0],
    "mean": lambda x: x.mean(0),
    "lasttoken": lambda x: x[-1],
}


def ids_of(text: str, lower: bool = False) -> Tensor:
    """Return the ids that the library gives a text: cut to MOST tokens, the special ones
    included, without padding.
    """
    words = [word.lower() if lower else word for word in text.split()]
    known = [int(word[1:]) if word.startswith("w") and word[1:].isdigit() else 3 for word in words]
    return torch.tensor([[0, *known[: MOST - 2], 2]])


def theirs(
    peer: Any,
    pooling: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor] = lambda x: x,
    lower: bool = False,
) -> np.ndarray:
    with torch.no_grad():
        hidden = [peer(ids_of(text, lower)).last_hidden_state[0] for text in TEXTS]
        return torch.stack([after(pooling(x)) for x in hidden]).numpy()


def ours(path: Path, **how: str) -> np.ndarray:
    export(from_pretrained(path), "torchscript", path / "artefact", verify=False, **how)  # type: ignore[arg-type]
    return load(path / "artefact").embed(TEXTS)


def close(actual: np.ndarray, expected: np.ndarray) -> bool:
    return worst_error(actual, expected) < tolerance("float32", 2, 48)


@pytest.mark.parametrize("name", ["cls", "lasttoken"])
def test_each_pooling_equals_its_formula_on_the_hidden_states_of_transformers(
    name: str, tmp_path: Path
) -> None:
    peer = folder(tmp_path, {"pooling_mode": name})
    assert close(ours(tmp_path), theirs(peer, POOLINGS[name]))


def test_a_dense_layer_and_normalization_follow_the_pooling(tmp_path: Path) -> None:
    peer = folder(tmp_path, {"pooling_mode_mean_tokens": True}, [DENSE, "Normalize"])
    weight, bias = dense_weights(2).values()

    def after(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(torch.tanh(weight @ x + bias), dim=0)

    together = ours(tmp_path)
    assert close(together, theirs(peer, POOLINGS["mean"], after))
    model = load(tmp_path / "artefact")
    for batch in (1, 12):  # embeddings do not depend on the texts that are read together
        assert close(model.embed(TEXTS, batch=batch), together)
    assert model.embed([]).shape == (0, 7)


def test_an_encoder_that_is_read_embeds_in_half_precision_and_for_other_loaders(
    tmp_path: Path,
) -> None:
    peer, place = folder(tmp_path, {"pooling_mode": "mean"}, ["Normalize"]), tmp_path / "half"
    model = from_pretrained(tmp_path)
    manifest = export(model, "ort", place, "mask", dtype="float16", verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    assert [value.name for value in manifest.inputs] == inputs
    sizes = json.loads((place / "config.json").read_text())
    assert (sizes["model_type"], sizes["hidden_size"], sizes["type_vocab_size"]) == ("bert", 48, 3)
    wanted = theirs(peer, POOLINGS["mean"], lambda x: torch.nn.functional.normalize(x, dim=0))
    assert np.abs(load(place).embed(TEXTS) - wanted).max() < 5e-3


def test_text_becomes_lower_case_where_the_folder_says_so(tmp_path: Path) -> None:
    peer = folder(tmp_path, {"pooling_mode": "mean"}, lower=True)
    assert close(ours(tmp_path), theirs(peer, POOLINGS["mean"], lower=True))


def test_prompts_are_put_before_texts_by_name_and_by_default(tmp_path: Path) -> None:
    folder(tmp_path, {"pooling_mode": "mean"})
    prompts = {"prompts": {"query": "w9 "}, "default_prompt_name": "query"}
    (tmp_path / MODEL).write_text(json.dumps(prompts))
    export(from_pretrained(tmp_path), "torchscript", tmp_path / "artefact", verify=False)
    model = load(tmp_path / "artefact")
    assert np.array_equal(model.embed(["w5"]), model.embed(["w5"], prompt="query"))
    with pytest.raises(ValueError, match="expected prompt to be one of query, got 'passage'"):
        model.embed(["w5"], prompt="passage")


def _rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    content = path.read_text() if path.is_file() else "{}"
    path.write_text(json.dumps(change(json.loads(content))))


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], Any]]] = {
    "left": ({"truncation_side": "left"}, {}, lambda ids: [0, *ids[2 - MOST :], 2]),
    "length": ({}, {"max_length": 6}, lambda ids: [0, *ids[:4], 2]),
    "no special tokens": ({}, {"add_special_tokens": False}, lambda ids: ids[:MOST]),
    "all": (
        {"truncation_side": "left"},
        {"max_length": 6, "add_special_tokens": False, "truncation": "longest_first"},
        lambda ids: ids[-6:],
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_texts_are_cut_and_framed_as_the_settings_of_the_folder_say(
    case: str, tmp_path: Path
) -> None:
    config, call, cut = CALLS[case]
    folder(tmp_path, {"pooling_mode": "mean"})
    _rewritten(tmp_path / "tokenizer_config.json", lambda values: {**values, **config})
    processing = {"processing_kwargs": {"text": call}}
    _rewritten(tmp_path / TEXT, lambda values: {**values, **processing})
    content = from_pretrained(tmp_path).text.tokenizer
    tokenizer = read_tokenizer(content, json.loads(content)["truncation"]["max_length"])
    assert tokenizer.encode(TEXTS[-1]).ids == cut([4 + index % 50 for index in range(30)])


BERT = {"type": "BertNormalizer", "lowercase": True, "handle_chinese_chars": True}
SPACES = {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False}]}


@pytest.mark.parametrize(
    ("key", "written"),
    {
        "do_lower_case": True,
        "strip_accents": True,
        "tokenize_chinese_chars": True,
        "add_prefix_space": False,
    }.items(),
)
def test_settings_of_a_tokenizer_that_contradict_its_file_are_refused(
    key: str, written: bool
) -> None:
    def check(name: str, value: bool) -> None:
        content = {"normalizer": BERT, "pre_tokenizer": SPACES}
        config = {"tokenizer_class": name, key: value}
        files = {"tokenizer.json": content, "tokenizer_config.json": config}
        text_settings.check({name: json.dumps(it).encode() for name, it in files.items()})

    check("BertTokenizer", written)
    check("PreTrainedTokenizerFast", not written)  # transformers uses the file as it is
    with pytest.raises(ValueError, match=f"expected {key} of .* to be {written} as in tokenizer"):
        check("BertTokenizer", not written)


def _other_type(kind: str) -> Callable[[Any], Any]:
    return lambda modules: [*modules[:-1], {**modules[-1], "type": kind}]


MODULES, POOLING, DENSE_FILE = "modules.json", "1_Pooling/config.json", "2_Dense/config.json"
UNKNOWN = r"^sentence-transformers: expected \w+ of [^ ]+ to be .*, got .*; export another model$"
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
# A file of the folder, keys that it gets or a function of its values, and the refusal.
REFUSED: list[tuple[str, Any, str]] = [
    (MODULES, _other_type("sentence_transformers.models.LSTM"),
        "expected modules Pooling, Dense and Normalize .*, got LSTM"),
    (MODULES, _other_type("custom_st.Pooler"), "got 'custom_st.Pooler' at place 2"),
    (MODULES, lambda _: [],
        "expected modules.json with values as its library writes them, .* length >= 1"),
    (MODULES, lambda modules: modules[1:],
        "expected Transformer first .*, got 'sentence_transformers.models.Pooling' at place 0"),
    (MODULES, lambda modules: modules[:1],
        "expected Pooling after Transformer in modules.json, got none"),
    (MODULES, lambda modules: [*modules[:1], {**modules[1], "path": "../other"}],
        "expected modules within their folder"),
    (MODULES, lambda _: {}, "modules.json to be a JSON list, got dict"),
    (MODULES, lambda modules: [*modules[:2], {**modules[2], "name": "1"}],
        "expected modules of different names, got 0, 1, 1; rename them"),
    (MODULES, {"revision": "main"}, UNKNOWN),
    (MODULES, {"kwargs": ["task"]}, UNKNOWN),
    (POOLING, {"pooling_mode": "median"},
        "expected pooling_mode to be one of cls, .*, got 'median'"),
    (POOLING, {"pooling_mode": ["mean", "max"]},
        "expected pooling_mode to be one of cls, mean, lasttoken, got 'mean, max'"),
    (POOLING, {"include_prompt": False}, "got include_prompt false"),
    (POOLING, {"pooling_layers": 2},
        "expected pooling_layers of Pooling to be left out, as it is unknown, got 2; export"),
    (DENSE_FILE, {"activation_function": "os.system"}, "got 'os.system'"),
    (DENSE_FILE, {"activation_function": "custom_st.Tanh"}, "got 'custom_st.Tanh'"),
    (DENSE_FILE, {"activation_function": "torch.nn.modules.activation.Softplus"},
        "expected activation_function of Dense to be .*, got 'torch.*Softplus'"),
    (DENSE_FILE, {"module_input_name": "token_embeddings"},
        "expected Dense from and to sentence_embedding .*'token_embeddings'"),
    (DENSE_FILE, {"use_residual": True}, "without use_residual"),
    (DENSE_FILE, {"out_features": 8}, r"expected linear.\w+ of Dense with shape \[8.*, got \[7"),
    (DENSE_FILE, {"out_features": 0}, r"Expected .int. >= 1 - at .\$.out_features"),
    (DENSE_FILE, {"dropout": 0.5}, UNKNOWN),
    (TEXT, {"transformer_task": "fill-mask"}, "got 'fill-mask'"),
    (TEXT, {"max_seq_length": 0}, r"Expected .int. >= 1 - at .\$.max_seq_length"),
    (TEXT, {"pad_to": 8}, UNKNOWN),
    (TEXT, {"query_length": 32}, UNKNOWN),
    (TEXT, {"processing_kwargs": {"text": {"stride": 2}}}, UNKNOWN),
    (TEXT, {"processing_kwargs": {"chat_template": {"task": "query"}}}, UNKNOWN),
    (TEXT, {"modality_config": {"text": FORWARD, "message": FORWARD}}, UNKNOWN),
    (TEXT, {"tokenizer_args": {"model_max_length": 4}}, UNKNOWN),
    (MODEL, {"truncate_dim": 8}, UNKNOWN),
    (MODEL, {"model_type": "SparseEncoder"}, UNKNOWN),
]  # fmt: skip


def _with(values: Any, keys: Any) -> Any:
    """Return the values of a file with other keys, in each module of a list."""
    if isinstance(values, list):
        return [{**module, **keys} for module in values]
    return {**values, **keys}


@pytest.mark.parametrize(("file", "change", "message"), REFUSED)
def test_what_cannot_be_exported_is_refused_by_name(
    file: str, change: Any, message: str, tmp_path: Path
) -> None:
    folder(tmp_path, {"pooling_mode": "mean"}, [DENSE])
    _rewritten(tmp_path / file, change if callable(change) else lambda old: _with(old, change))
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)


def test_a_module_without_its_config_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, {"pooling_mode": "mean"})
    (tmp_path / "1_Pooling/config.json").unlink()
    with pytest.raises(ValueError, match="expected 1_Pooling/config.json, got none; download"):
        from_pretrained(tmp_path)


def test_a_decoder_is_pooled_at_its_last_token(tmp_path: Path) -> None:
    folder(tmp_path / "encoder", {"pooling_mode": "lasttoken"})
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "encoder" / name).unlink()
    peer, _ = checkpoints.saved("mistral with a window", tmp_path / "encoder")
    embeddings = ours(tmp_path / "encoder")
    assert close(embeddings, theirs(peer.base_model, POOLINGS["lasttoken"]))
    assert from_pretrained(tmp_path / "encoder", head=False).readout is None


def test_texts_and_artefacts_that_cannot_be_embedded_are_refused() -> None:
    pooled, plain = load(artefact()), load(traces.artefact(encoder("learned"), "torchscript"))
    with pytest.raises(ValueError, match="expected a list of texts, got 'one text'"):
        pooled.embed("one text")
    with pytest.raises(ValueError, match=r"expected a list of texts, got \['one text', 5\]"):
        pooled.embed(["one text", 5])  # type: ignore[list-item]
    rule = "expected an artefact with output sentence_embedding, got last_hidden_state"
    with pytest.raises(ValueError, match=rule):
        plain.embed(["one text"])


def test_the_description_names_pooling_and_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder(tmp_path, {"pooling_mode": "mean"}, [DENSE, "Normalize"])
    assert main(["describe", str(tmp_path)]) == 0
    result = " ".join(capsys.readouterr().out.split())
    assert "output sentence_embedding, pooling mean, layers [Dense, Normalize]" in result
