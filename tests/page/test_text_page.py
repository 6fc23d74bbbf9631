"""Pages of models with a tokenizer: what they hold, what is refused, and that a browser gives
the tokens of a conversation on a session.
"""

import json
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest

from posenc_export.export import export
from posenc_export.models.embedding_and_head import Text
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import decoder_config
from posenc_export.page import graph, write_page
from posenc_export.page.folder import LIBRARIES, TALKS, TEXT_PAGE, TEXTS, WEB
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.chat_template import needed_chat_codec
from tests.page.test_page import NODE_MODULES, contents, opened, shown_by, with_chromium
from tests.tiny import block

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.xdist_group("serve")
TEMPLATE = (
    b"{% for message in messages %}\n  "
    b"{% if message.role == 'system' and not loop.first %}{{ raise_exception('late') "
    b"}}{% endif %}\n"
    b"<s>{{ message.role }}\n{{ message.content | trim "
    b"}}<s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def _artefact(folder: Path, target: str) -> Path:
    """Export a seeded decoder with TEMPLATE and a tokenizer of 300 ids and a token <s>."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    of = {"initial_alphabet": tokenizers.pre_tokenizers.ByteLevel.alphabet()}
    of |= {"special_tokens": ["<s>"], "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, **of)
    tokenizer.train_from_iterator([*TEXTS, *(json.dumps(talk) for talk in TALKS)], trainer)
    stack = seeded(decoder_config(vocabulary=300, layers=1, hidden=40, block=block("rope")))
    files = {"chat_template.jinja": TEMPLATE}
    stack.text = Text(tokenizer=tokenizer.to_str().encode(), files=files)  # type: ignore[union-attr,assignment]
    export(stack, target, folder, verify=False)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _artefact(tmp_path_factory.mktemp("text") / "artefact", "ort")


@pytest.fixture
def web(tmp_path: Path) -> Path:
    """Create a node_modules folder with the file names of the packages. Return that of
    onnxruntime-web.
    """
    files = [*(f"onnxruntime-web/dist/{name}" for name in WEB), *LIBRARIES.values()]
    for name in files:
        (tmp_path / "node_modules" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "node_modules" / name).write_text(name)
    web = tmp_path / "node_modules" / "onnxruntime-web"
    (web / "package.json").write_text('{"version": "1.30.0"}')
    return web


def test_a_page_holds_the_tokenizer_the_template_and_tokens_to_compare(
    folder: Path, web: Path, tmp_path: Path
) -> None:
    write_page(folder, tmp_path / "page", web)
    model = {"page.json", "model.onnx", "model.onnx.data", "tokenizer.json"}
    libraries = [*(f"onnxruntime-web/{n}" for n in WEB), *(f"text/{n}" for n in LIBRARIES)]
    assert contents(tmp_path / "page").keys() == {*TEXT_PAGE, *model, *libraries}
    shown, chat = shown_by(tmp_path / "page"), needed_chat_codec(folder, manifests.read(folder))
    assert shown["template"] == TEMPLATE.decode() and shown["ends"] == list(chat.ends)
    assert shown["states"][0]["shape"] == [1, 3, 0, 16]
    texts = [{"text": text, "ids": chat.codec.encode(text)} for text in TEXTS]
    talks = [{"messages": talk, "ids": chat.encode(talk)} for talk in TALKS]
    assert shown["samples"] == texts + talks


def test_a_library_that_is_not_there_or_too_old_is_named(
    folder: Path, web: Path, tmp_path: Path
) -> None:
    shutil.rmtree(web.parent / "@huggingface" / "jinja")
    said = "beside onnxruntime-web .*, got none; npm install @huggingface/jinja"
    with pytest.raises(ValueError, match=f"page: expected the npm package @hugg.*/jinja {said}"):
        write_page(folder, tmp_path / "page", web)
    (web / "package.json").write_text('{"version": "1.22.0"}')
    with pytest.raises(ValueError, match="expected onnxruntime-web 1.24 or newer, got 1.22.0; npm"):
        write_page(folder, tmp_path / "page", web)
    assert not (tmp_path / "page").exists()


def test_calls_that_give_other_logits_than_a_session_are_found(
    folder: Path, web: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = graph.inputs
    wrong = lambda manifest, tokens, held: right(manifest, [*tokens[:-1], 0], held)  # noqa: E731
    monkeypatch.setattr(graph, "inputs", wrong)
    said = "page: expected calls of the graph to give the logits of a session within"
    with pytest.raises(ValueError, match=said):
        write_page(folder, tmp_path / "page", web)


@with_chromium
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_a_browser_gives_the_tokens_of_a_conversation_on_a_session(
    target: str, tmp_path: Path
) -> None:
    source = _artefact(tmp_path / "a", target)
    write_page(source, tmp_path / "page", NODE_MODULES / "onnxruntime-web")
    message = "Hello, na\u00efve \U0001f642 world"
    query = f"temperature=0&tokens=40&message={quote(message)}"
    result, document = opened(tmp_path, query, "--disable-gpu")
    chat = load(source, provider="cpu").conversation()
    assert result["reply"] == "".join(chat.reply(message, 40))
    assert [int(token) for token in result["tokens"].split()] == chat.tokens
    assert result["checked"] == "true"
    assert f"{len(TEXTS) + len(TALKS)} texts have the tokens" in document
