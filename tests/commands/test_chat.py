"""posenc chat: replies by the chat template of an artefact."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posenc_export.commands.cli import main
from posenc_export.export import Sources, export
from posenc_export.models.embedding_and_head import Text
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime.artefact.tokenizer import BytePieces
from tests.tiny import block

pytest.importorskip("jinja2")
TEMPLATE = (
    b"{% for message in messages %}{{ message.role[0] }}:{{ message.content "
    b"}}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


SOURCES = Sources(seeded(decoder_config(vocabulary=256, layers=1, hidden=40, block=block("rope"))))


def _exported(folder: Path, template: bytes = b"", **files: bytes) -> str:
    """Export a decoder, which is traced once, with a chat template and these files of text."""
    files |= {"chat_template.jinja": template} if template else {}
    SOURCES.model.text = Text(files=files)  # type: ignore[union-attr,assignment]
    export(SOURCES, "ort", folder, verify=False)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _exported(tmp_path_factory.mktemp("chat") / "artefact", TEMPLATE)


def test_values_for_the_chat_template_are_given_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = b"{% if enable_thinking is false %}{{ raise_exception('off') }}{% endif %}"
    folder = _exported(tmp_path / "artefact", begin + TEMPLATE)
    for given, said in [
        ('{"enable_thinking": false}', "got an error (off)"),
        ('{"enable": 1}', "expected names that the chat template reads (enable_thinking)"),
        ("{", "chat_template_kwargs: expected the option to be JSON"),
    ]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("a"))
        assert main(["chat", folder, "--chat-template-kwargs", given]) == 2
        assert said in capsys.readouterr().err


def test_each_line_is_a_message_and_new_begins_again(
    folder: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n  two  \n/new\none\n"))
    assert main(["chat", folder, "--max-tokens", "4", "--json"]) == 0
    first, second, again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first == again != second


def test_a_system_message_begins_again_and_exit_ends_the_program(
    folder: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "/help\none\n/system kind\none\n/system\none\n/exit\none\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", folder, "--max-tokens", "8", "--json"]) == 0
    shown = capsys.readouterr()
    plain, kind, again = [json.loads(line) for line in shown.out.splitlines()]
    assert plain == again != kind and "/system " in shown.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert main(["chat", folder, "--system", "kind", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == f"{kind['text']}\n"


def test_a_terminal_shows_speed_and_ends_at_the_second_interrupt(
    folder: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = iter(["/nwe", KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt, "two"])

    def typed(prompt: str) -> str:
        line = next(entered)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(line)

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["chat", folder, "--max-tokens", "4"]) == 130 and next(entered) == "two"
    said = capsys.readouterr().err
    assert "got /nwe; did you mean /new?" in said and said.count("Ctrl-C again") == 2
    assert re.search(r"^\[4 tokens, the first after \d+\.\d s, then \d+\.\d/s\]$", said, re.M)


@pytest.mark.parametrize("pieces", [0, 2])
def test_an_interrupt_ends_the_reply_and_not_the_conversation(
    pieces: int, folder: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, called = BytePieces.push, iter(range(100))

    def interrupted(self: BytePieces, token: int) -> str:
        if next(called) == pieces:
            raise KeyboardInterrupt
        return push(self, token)

    monkeypatch.setattr(BytePieces, "push", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", folder, "--max-tokens", "4", "--json"]) == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(first["tokens"]) == pieces + 1 and len(second["tokens"]) == 4


def test_the_chat_reads_lines_in_any_encoding_and_prints_replies_as_they_come(folder: str) -> None:
    command = [sys.executable, "-m", "posenc_export", "chat", folder, "--max-tokens", "3"]
    done = subprocess.run(command, input=b"d\xc3\xa9j\xe0\nmore\n", capture_output=True, check=True)
    assert len(done.stderr.splitlines()) == 1 and done.stdout.endswith(b"\n")


REFUSED = {
    "no template": ({}, "chat: expected an artefact with a chat template"),
    "a template with code": ({"template": b"{{ messages.__class__.mro() }}"}, "is unsafe"),
    "a broken template": ({"template": b"{% for"}, "a chat template that Jinja can compile"),
    "settings that are not JSON": ({"tokenizer_config.json": b"{"}, "_config.json to be JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_artefact_without_a_template_that_can_be_used_is_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, message = REFUSED[case]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a"))
    folder = _exported(tmp_path / "artefact", **files)
    assert main(["chat", folder]) == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if "no passed certificate" not in line]
    assert message in line


def test_templates_in_the_settings_of_the_tokenizer_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    several = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": TEMPLATE.decode() + "{{ bos_token }}{{ eos_token }}"},
    ]
    bos: Any = {"content": "<s>", "special": True}
    settings = {"chat_template": several, "bos_token": bos, "eos_token": "</s>"}
    files = {"tokenizer_config.json": json.dumps(settings).encode()}
    files["special_tokens_map.json"] = b'{"bos_token": "<b>"}'
    folder = _exported(tmp_path / "artefact", **files)
    from posenc_export.runtime import load
    from posenc_export.runtime.artefact.chat_template import needed_chat_codec

    codec = needed_chat_codec(Path(folder), load(folder).manifest)
    assert codec.text([{"role": "user", "content": "x"}]) == "u:x\na:<s></s>"
