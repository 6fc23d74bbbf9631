"""Completion of the command in shells."""

import shutil
import subprocess

import pytest

from posenc_export.commands.cli import COMMANDS, main
from posenc_export.commands.completion import SHELLS

shtab = pytest.importorskip("shtab", reason="shtab is not installed")
COMPLETE = """
complete_words() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _shtab_posenc posenc "${@: -1}" "${@: -2:1}"; echo "${COMPREPLY[@]}"
}
complete_words posenc ""
complete_words posenc export --ta
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_every_shell_names_every_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in printed] == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    done = subprocess.run(
        ["bash", "-c", script + COMPLETE], capture_output=True, encoding="utf-8", check=True
    )
    commands, options = done.stdout.splitlines()
    assert set(commands.split()) >= set(COMMANDS) and options == "--target"
