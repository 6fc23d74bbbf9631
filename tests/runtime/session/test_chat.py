"""Conversations keep their cache: each turn reads the new tokens only, and replies as to the
whole conversation.
"""

import json
from typing import Any, List

import pytest

from posenc_export.commands.cli import main
from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.tokenizer import ByteCodec
from posenc_export.runtime.session.chat import Chat
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.session import Session
from tests import traces
from tests.serve.models import artefact, opened
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


def _chat(session: Session, **given: Any) -> Chat:
    return Chat(session, ChatCodec(ByteCodec(), TEMPLATE, {}), "kind", **given)


def test_a_turn_reads_new_tokens_only_and_replies_as_to_the_whole_conversation(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: List[int] = []
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


def test_the_command_gives_the_same_text_with_lookup_and_with_a_draft_model(
    capsys: pytest.CaptureFixture,
) -> None:
    folder, answers = str(artefact("ort")), []
    command = ["generate", folder, "--prompt", "def f(x): def f(x):", "--max-tokens", "20"]
    for speculate in ([], ["--speculate", "lookup"], ["--speculate", folder]):
        assert main([*command, "--json", *speculate]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[1] == answers[0] == answers[2]
    assert main(["generate", folder, "--prompt", "a", "--speculate", "lokup"]) == 2
    rule = "expected lookup or the folder of a decoder's artefact, got lokup"
    assert rule in capsys.readouterr().err
