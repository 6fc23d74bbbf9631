"""JSON files of a checkpoint with odd values: each is read, or refused in one line."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator, Sequence

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime.artefact.chat_template import chat_codec
from posenc_export.runtime.artefact.tokenizer import check_tokenizer
from posenc_export.runtime.session import model as session_text
from posenc_export.shared.foreign import explained
from tests.models import checkpoints, sentence_folders

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, 2**70, 1.5, -0.0, 1e308, float("nan"),
    float("inf"),
    "", "x", "a\nb", "\ud800", "../x", "a\0b", [], [1], ["x"], [None], [[]], [{}], {}, {"a": 1},
    {"type": "x"},
    [{"name": [], "template": 1}],
]  # fmt: skip
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 64,
    "do_lower_case": True,
    "bos_token": {"content": "[CLS]", "special": True},
    "eos_token": "[SEP]",
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}
SENTENCES = (
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "config.json",
)
DECODER = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
COUNTS = [1, pytest.param(len(ODD), marks=pytest.mark.exhaustive)]
Path_ = tuple[Any, ...]  # keys and indices that lead to a value


def _paths(values: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the paths of all values; of a large object or list, only those of three entries."""
    yield path
    entries = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in list(entries)[: 3 if len(values) > 40 or isinstance(values, list) else None]:
        if isinstance(value, (dict, list)):
            yield from _paths(value, (*path, key))
        else:
            yield (*path, key)


def _changed(values: Any, path: Path_, value: Any) -> Any:
    """Return a copy of JSON values with another value at a path."""
    if not path:
        return value
    copy = dict(values) if isinstance(values, dict) else list(values)
    copy[path[0]] = _changed(values[path[0]], path[1:], value)
    return copy


def _check(values: Any, count: int, call: Callable[[Any], Any]) -> None:
    """Call with `count` odd values at each path. Only a ValueError of one line may be raised."""
    choice = random.Random(0)
    for path in _paths(values):
        for value in choice.sample(ODD, count):
            try:
                call(_changed(values, path, value))
            except ValueError as error:
                assert re.fullmatch(r"[^\n]*: expected [^\n]*", str(error)), (path, value, error)


def _write(folder: Path, name: str, values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences") / "a"
    after = [sentence_folders.DENSE, "Normalize"]
    sentence_folders.folder(folder, {"pooling_mode": ["mean"]}, after, lower=True)
    _write(folder, "tokenizer_config.json", SETTINGS)
    return folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder") / "a"
    checkpoints.saved("llama", folder)
    (folder / "tokenizer.json").write_bytes(sentence_folders.tokenizer())
    _write(folder, "tokenizer_config.json", SETTINGS)
    generation = {"eos_token_id": [1, 2], "num_beams": 1, "suppress_tokens": [1]}
    _write(folder, "generation_config.json", generation)
    return folder


def _with(folder: Path, name: str) -> Callable[[Any], None]:
    """Return what loads the folder with other values in a file."""

    def load(values: Any) -> None:
        _write(folder, name, values)
        check_tokenizer(from_pretrained(folder).text.tokenizer)

    return load


def _in_turn(folder: Path, name: str, count: int) -> None:
    content = (folder / name).read_bytes()
    try:
        _check(json.loads(content), count, _with(folder, name))
    finally:
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", SENTENCES)
def test_any_value_in_a_folder_of_sentence_transformers_is_read_or_refused_in_one_line(
    name: str, count: int, sentences: Path
) -> None:
    _in_turn(sentences, name, count)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", DECODER)
def test_any_value_in_a_checkpoint_of_a_decoder_is_read_or_refused_in_one_line(
    name: str, count: int, decoder: Path
) -> None:
    _in_turn(decoder, name, count)


def _codec(folder: Path, file: str = "tokenizer_config.json") -> Any:
    """Return the codec of conversations of a folder with one file."""
    files: Any = {file: None}
    manifest: Any = SimpleNamespace(files=files, kind="decoder", vocabulary=256, stop_ids=[])
    return chat_codec(folder, manifest)


@pytest.mark.parametrize("count", COUNTS)
def test_any_value_in_settings_of_a_conversation_is_read_or_refused_in_one_line(
    count: int, tmp_path: Path
) -> None:
    def load(values: Any) -> None:
        _write(tmp_path, "tokenizer_config.json", values)
        _codec(tmp_path)

    _check(SETTINGS, count, load)


TEMPLATES: Sequence[Any] = (
    5, {"default": "x"}, ["x"], [{"name": ["default"], "template": "x"}], [{"name": "default"}],
    [{"name": "default", "template": None}], [None], [[]], [{"name": "other", "template": "x"}],
)  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_of_another_form_is_refused_in_one_line(
    template: Any, tmp_path: Path
) -> None:
    _write(tmp_path, "tokenizer_config.json", {"chat_template": template})
    rule = r"^chat: expected [^\n]*; save one as chat_template.jinja$"
    with pytest.raises(ValueError, match=rule):
        _codec(tmp_path)


def test_a_special_token_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    tokens = {"bos_token": 5, "eos_token": {"content": ["</s>"]}, "pad_token": {"content": "<p>"}}
    _write(tmp_path, "tokenizer_config.json", {"chat_template": "x", **tokens})
    codec = _codec(tmp_path)
    assert codec is not None and codec.special == {"pad_token": "<p>"}


def test_a_chat_template_that_is_not_unicode_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"^chat: expected chat_template.jinja in UTF-8, [^\n]*$"):
        _codec(tmp_path, "chat_template.jinja")


OF_LIBRARIES = (
    OverflowError("too large"), AssertionError(), AttributeError("no name"), EOFError("ends"),
    KeyError("a"), MemoryError(), RecursionError("too deep"), SyntaxError("a\nb"), TypeError(),
    ValueError("a\n  b"), Exception("of Rust"),
)  # fmt: skip


@pytest.mark.parametrize("error", OF_LIBRARIES, ids=lambda error: type(error).__name__)
def test_an_error_of_a_library_is_explained_in_one_line(error: Exception) -> None:
    line = r"text: expected a text, got an error \([^\n]+\); change it"
    with (
        pytest.raises(ValueError, match=f"^{line}$"),
        explained("text: expected a text", "change it"),
    ):
        raise error


def test_an_error_of_the_system_is_not_explained_as_one_of_content() -> None:
    with pytest.raises(OSError), explained("text: expected a text", "change it"):
        raise OSError("no space is left")


@pytest.mark.parametrize("limit", [float("inf"), 1e30, 10**30, None])
def test_a_tokenizer_without_a_sensible_limit_is_cut_at_the_positions_of_the_encoder(
    limit: Any, sentences: Path
) -> None:
    names = ("tokenizer_config.json", "sentence_bert_config.json")
    contents = {name: (sentences / name).read_bytes() for name in names}
    try:
        _write(sentences, "tokenizer_config.json", {"model_max_length": limit})
        _write(sentences, "sentence_bert_config.json", {})
        model = from_pretrained(sentences)
        cut = json.loads(model.text.tokenizer)["truncation"]
        assert cut["max_length"] == model.max_positions
    finally:
        for name, content in contents.items():
            (sentences / name).write_bytes(content)


@pytest.mark.parametrize(
    "content",
    [[], {"prompts": ["a"]}, {"prompts": {"a": 5}}, {"default_prompt_name": ["a"]}, "x"],
    ids=str,
)
def test_prompts_of_another_form_are_refused_in_one_line(content: Any, tmp_path: Path) -> None:
    _write(tmp_path, session_text.PROMPTS, content)
    with pytest.raises(ValueError, match=r"^embed: expected [^\n]*; correct it in the checkpoint"):
        session_text._prompt(tmp_path, None)
