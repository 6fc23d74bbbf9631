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
from posenc_export.page import graph, write
from posenc_export.page.folder import LIBRARIES, TALKS, TEXT_PAGE, TEXTS, WEB
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.chat_template import needed_chat_codec
from tests.page.test_page import NODE_MODULES, opened, with_chromium
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


def _artefact(folder: Path, target: str, **files: bytes) -> Path:
    """Export a seeded decoder with a tokenizer of 300 ids and a token <s>."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        tokenizers.decoders.ByteLevel(),
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, *(json.dumps(talk) for talk in TALKS)], trainer)
    stack = seeded(decoder_config(vocabulary=300, layers=1, hidden=40, block=block("rope")))
    stack.text = Text(tokenizer=tokenizer.to_str().encode(), files=files)  # type: ignore[union-attr,assignment]
    export(stack, target, folder, verify=False)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _artefact(
        tmp_path_factory.mktemp("text") / "artefact", "ort", **{"chat_template.jinja": TEMPLATE}
    )


@pytest.fixture
def web(tmp_path: Path) -> Path:
    """Create a node_modules folder with the file names of the packages. Return that of
    onnxruntime-web.
    """
    files = [*(f"onnxruntime-web/dist/{name}" for name in WEB), *LIBRARIES.values()]
    for name in files:
        (tmp_path / "node_modules" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "node_modules" / name).write_text(name)
    (tmp_path / "node_modules" / "onnxruntime-web" / "package.json").write_text(
        '{"version": "1.2.3"}'
    )
    return tmp_path / "node_modules" / "onnxruntime-web"


def test_a_page_holds_the_tokenizer_the_template_and_tokens_to_compare(
    folder: Path, web: Path, tmp_path: Path
) -> None:
    write(folder, tmp_path / "page", web)
    results = {
        str(path.relative_to(tmp_path / "page"))
        for path in (tmp_path / "page").rglob("*")
        if path.is_file()
    }
    model = {"page.json", "model.onnx", "model.onnx.data", "tokenizer.json"}
    assert results == {
        *TEXT_PAGE,
        *model,
        *(f"onnxruntime-web/{name}" for name in WEB),
        *(f"text/{name}" for name in LIBRARIES),
    }
    shown, chat = (
        json.loads((tmp_path / "page" / "page.json").read_bytes()),
        needed_chat_codec(folder, manifests.read(folder)),
    )
    assert (
        shown["template"] == TEMPLATE.decode()
        and shown["ends"] == list(chat.ends)
        and shown["states"][0]["shape"] == [1, 3, 0, 16]
    )
    assert shown["samples"][: len(TEXTS)] == [
        {"text": text, "ids": chat.codec.encode(text)} for text in TEXTS
    ]
    assert shown["samples"][len(TEXTS) :] == [
        {"messages": talk, "ids": chat.encode(talk)} for talk in TALKS
    ]


def test_a_library_that_is_not_there_is_named(folder: Path, web: Path, tmp_path: Path) -> None:
    shutil.rmtree(web.parent / "@huggingface" / "jinja")
    with pytest.raises(
        ValueError,
        match="page: expected the npm package @huggingface/jinja beside onnxruntime-web .*, got "
        "none; npm install @huggingface/jinja",
    ):
        write(folder, tmp_path / "page", web)
    assert not (tmp_path / "page").exists()


def test_calls_that_give_other_logits_than_a_session_are_found(
    folder: Path, web: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = graph.inputs
    monkeypatch.setattr(
        graph, "inputs", lambda manifest, tokens, held: inputs(manifest, [*tokens[:-1], 0], held)
    )
    with pytest.raises(
        ValueError, match="page: expected calls of the graph to give the logits of a session within"
    ):
        write(folder, tmp_path / "page", web)


@with_chromium
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_a_browser_gives_the_tokens_of_a_conversation_on_a_session(
    target: str, tmp_path: Path
) -> None:
    source = _artefact(tmp_path / "a", target, **{"chat_template.jinja": TEMPLATE})
    write(source, tmp_path / "page", NODE_MODULES / "onnxruntime-web")
    message = "Hello, na\u00efve \U0001f642 world"
    result, document = opened(
        tmp_path, f"temperature=0&tokens=40&message={quote(message)}", "--disable-gpu"
    )
    model = load(source, provider="cpu")
    chat = model.conversation()
    reply = "".join(chat.reply(message, 40))
    assert [int(token) for token in result["tokens"].split()] == chat.tokens
    assert result["reply"] == reply
    assert (
        result["checked"] == "true"
        and f"{len(TEXTS) + len(TALKS)} texts have the tokens" in document
    )
