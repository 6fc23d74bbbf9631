"""posenc completion: a script with which a shell completes the command's words. Needs shtab."""

import argparse
from pathlib import Path

from posenc_export.commands.options import Table, option

SHELLS = ("bash", "zsh", "tcsh")
OPTIONS: Table = {
    "shell": option('the shell; in bash: eval "$(posenc completion bash)"', choices=SHELLS)
}


def run(options: argparse.Namespace) -> int:
    import shtab

    from posenc_export.commands.cli import COMMANDS, parser_of

    parser = parser_of(COMMANDS)
    for action in _actions(parser):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> "list[argparse.Action]":
    actions = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                actions += _actions(command)
    return actions
