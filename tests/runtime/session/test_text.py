"""Text of loaded models. Conversations keep their cache: each turn reads the new tokens only, and
replies as to the whole conversation.
"""

import json
import re
from pathlib import Path
from typing import Any, Callable

import pytest

from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.models.embedding_and_head import Text
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.tokenizer import ByteCodec
from posenc_export.runtime.session.model import Conversation, Model
from posenc_export.runtime.session.session import Session
from tests import traces
from tests.serve.models import CONFIG, artefact, opened
from tests.tiny import block

pytest.importorskip("jinja2")
pytestmark = pytest.mark.xdist_group("serve")
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content "
    "}}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
MESSAGES = ["first", "second", "third"]


@pytest.fixture(scope="module", params=["rope", "recurrent"])
def model(request: pytest.FixtureRequest) -> Model:
    config = decoder_config(vocabulary=256, layers=1, hidden=40, block=block(request.param))
    return opened(traces.artefact(config, "ort"))


def _chat(session: Session, **given: Any) -> Conversation:
    return Conversation(session, ChatCodec(ByteCodec(), TEMPLATE, {}), "kind", **given)


def test_a_turn_reads_new_tokens_only_and_replies_as_to_the_whole_conversation(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    prefill = Session.prefill

    def counted(session: Session, rows: Any, **given: Any) -> Any:
        read.append(len(rows[0]))
        return prefill(session, rows, **given)

    monkeypatch.setattr(Session, "prefill", counted)
    kept, before = _chat(model.session(rewind=64)), 0
    for message in MESSAGES:
        alone = _chat(model.session())
        alone.messages = list(kept.messages)
        read.clear()
        reply = "".join(kept.reply(message, 20))
        assert reply == "".join(alone.reply(message, 20)) == kept.messages[-1]["content"]
        assert kept.tokens == alone.tokens
        assert read[0] <= read[1] - before
        before = read[1]


def test_a_reply_that_is_left_early_is_what_the_next_turn_follows(model: Model) -> None:
    chat = _chat(model.session())
    reply = chat.reply("first", 20)
    pieces = [next(reply) for _ in range(3)]
    reply.close()
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    alone = _chat(model.session())
    alone.messages = list(chat.messages)
    assert "".join(chat.reply("second", 10)) == "".join(alone.reply("second", 10))


def test_a_conversation_beyond_the_context_is_refused_and_stays_as_it_was(model: Model) -> None:
    chat = _chat(model.session(capacity=30), context=30)
    assert len(list(chat.reply("short"))) <= 30 - len("s:kind\nu:short\na:") + 1
    before = list(chat.messages)
    with pytest.raises(ValueError, match="chat: expected a conversation below 30 tokens"):
        next(chat.reply("x" * 30))
    assert chat.messages == before


def test_a_turn_that_is_refused_adds_no_message(model: Model) -> None:
    chat = _chat(model.session())
    assert list(chat.reply("first", 5))
    before = list(chat.messages)
    with pytest.raises(ValueError, match="temperature"):
        next(chat.reply("second", 5, temperature=-1.0))
    assert chat.messages == before


def test_the_command_gives_the_same_text_with_lookup(capsys: pytest.CaptureFixture) -> None:
    folder, answers = str(artefact("ort")), []
    command = ["generate", folder, "--prompt", "def f(x): def f(x):", "--max-tokens", "20"]
    for speculate in ([], ["--speculate", "lookup"]):
        assert main([*command, "--json", *speculate]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[1] == answers[0]
    with pytest.raises(SystemExit):
        main(["generate", folder, "--prompt", "a", "--speculate", "lokup"])
    assert "invalid choice: 'lokup'" in capsys.readouterr().err


def test_a_model_continues_text_as_its_session_continues_bytes(model: Model) -> None:
    prompt = "naïve"
    ids = [int(ids[0]) for ids in model.session().generate([list(prompt.encode())], 30)]
    text = model.generate(prompt, max_tokens=30)
    assert text == bytes(ids).decode("utf-8", "replace") == model.tokenizer.decode(ids)
    sampled = list(model.stream(prompt, 30, temperature=1.0, seed=3))
    assert len(sampled) > 20 and "".join(sampled) == model.generate(prompt, 30, 1.0, seed=3)
    assert "".join(sampled) != text == model.generate(prompt, 30, speculate="lookup")


def test_the_programs_of_the_page_of_text_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    decoder = seeded(CONFIG)
    decoder.text = Text(files={"chat_template.jinja": TEMPLATE.encode()})
    export(decoder, "ort", tmp_path / "build/model", verify=False)
    monkeypatch.chdir(tmp_path)
    page, names = Path(__file__).parents[3] / "docs/text.md", {}
    for program in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(program, names)
    model, talk = names["model"], names["talk"]
    assert [message["role"][0] for message in talk.messages] == list("suaua")
    alone = model.chat([*talk.messages[:-1]], max_tokens=64)
    assert names["answer"] == alone and talk.messages[-1]["content"] == alone
    assert model.chat("What is the capital of France?", 20) == names["reply"][:20]
    ids = model.session().generate([model.chat_ids(talk.messages[:-1])], 64)
    assert model.tokenizer.decode([int(token[0]) for token in ids]) == alone


REFUSED: list[Any] = [
    (lambda model: model.generate(5), "a prompt of text, got 5; call session"),
    (lambda model: model.generate(""), "a prompt of 1 .. [0-9]+ tokens, got 0; change"),
    (lambda model: model.generate("a", max_tokens=0), "max_tokens to be a whole number"),
    (lambda model: model.chat("a"), r"an artefact with a chat template \(chat_template.jinja\)"),
    (lambda model: model.embed(["a"]), "output sentence_embedding, got logits"),
    (lambda model: model.tokenizer.decode([256]), "token ids 0 .. 255, got an error"),
    (lambda model: Model(model.graph).generate("a"), "got a module in memory; export it"),
]


@pytest.mark.parametrize("call,message", REFUSED, ids=[message[:20] for _, message in REFUSED])
def test_what_a_model_cannot_read_or_write_is_refused(
    call: Callable[[Model], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(opened(artefact("ort")))


@pytest.mark.parametrize("messages", [[], ["hi"], None, [{"content": "hi"}]])
def test_messages_of_another_form_are_refused(messages: Any) -> None:
    chat = _chat(opened(artefact("ort")).session())
    with pytest.raises(ValueError, match="expected a text, or a list of at least one message"):
        next(chat.reply(messages))
