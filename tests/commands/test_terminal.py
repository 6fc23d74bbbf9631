"""What reaches a terminal: names in files of others cannot control it, and text stays as it is."""

import ast
import io
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any, Iterator

import pytest

from posenc_export.benchmark import contestants
from posenc_export.benchmark.runtimes import RUNTIMES
from posenc_export.commands.cli import main
from posenc_export.commands.terminal import (
    CONTROL,
    EXTRAS,
    Progress,
    escaping,
    print_text,
    refusal,
    show,
)

NAME = "Zoë 東京\x1b]0;owned\x07\x9b31m\u202e\x7f"  # a title, a colour, and reversed text
SHOWN = "Zoë 東京\\u001b]0;owned\\u0007\\u009b31m\\u202e\\u007f"


TOP = Path(__file__).parents[2]


def installations() -> Iterator[str]:
    """Messages of the package that name an installation."""
    for path in (TOP / "posenc_export").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        parts = {
            id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values
        }
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) not in parts and not node.value.startswith('"""'):
                    yield node.value
    for modules in EXTRAS.values():
        for module in modules.split():
            yield str(refusal(ModuleNotFoundError(name=module)))


def test_every_installation_that_a_message_names_can_be_pasted_into_a_shell() -> None:
    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = (re.findall(r"pip install ([^,;]*)", text) for text in installations())
    commands = [command for commands in found for command in commands]
    assert len(commands) > len(EXTRAS)
    names = {"-U", "jinja2", "./packages/presets"}
    names |= {f"posenc-export[{extra}]" for extra in extras}
    for command in commands:
        assert {*shlex.split(command)} <= names, command


def test_the_installation_of_a_runtime_to_time_can_be_pasted_into_a_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(RUNTIMES["genai"]), "missing", lambda _: ["a module"])
    for name, runtime in RUNTIMES.items():
        with pytest.raises(ValueError, match=f", or omit {name}$") as refused:
            contestants._of_runtime(name, [])
        command = str(refused.value).partition("; ")[2].rpartition(", or omit")[0]
        assert shlex.split(command) == ["pip", "install", *runtime.install.split()]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_an_error_names_a_folder_or_a_key_without_its_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama\n" + NAME}))
    for command, shown in (("inspect", NAME), SHOWN), (("describe", f"{tmp_path}"), "Zoë 東京"):
        assert main([*command]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert shown in line and not CONTROL.search(line)


def test_a_wrong_argument_is_named_in_one_line_without_its_control_characters(
    capsys: pytest.CaptureFixture,
) -> None:
    with pytest.raises(SystemExit):
        main(["list", "rope", f"more\n{NAME}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"more {SHOWN}" in line


def test_tables_keep_their_lines_and_letters(capsys: pytest.CaptureFixture) -> None:
    with escaping():
        show([{"name": NAME}, {"name": "two"}])
    assert capsys.readouterr().out.split("\n") == ["name", SHOWN, "two", ""]


def test_json_stays_json(capsys: pytest.CaptureFixture) -> None:
    with escaping():
        print(json.dumps(NAME, ensure_ascii=False))
        sys.stdout.writelines([NAME])
    text = capsys.readouterr().out.splitlines()
    assert json.loads(text[0]) == NAME and text[1] == SHOWN


def test_progress_overwrites_its_line_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with escaping():
        say = Progress()
        say(f"{NAME}\n\r: loading")
        say.close()
    written = terminal.getvalue()
    assert written.startswith("\r[") and f"{SHOWN} : loading" in written
    assert written.count("\r") == 3 and not CONTROL.search(written.replace("\r", ""))


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, SHOWN), (io.StringIO, NAME)])
def test_text_of_a_model_is_escaped_for_a_terminal_only(
    stream: Any, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = stream()
    monkeypatch.setattr(sys, "stdout", output)
    with escaping():
        print_text(f"{NAME}\r\n\t")
    assert output.getvalue() == f"{shown}\r\n\t"
