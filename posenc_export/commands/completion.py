"""posenc completion: a script with which a shell completes the command's words. Needs shtab."""

import argparse
from pathlib import Path

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=SHELLS, help='the shell; in bash: eval "$(posenc completion bash)"'
    )


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
    """All actions of a parser and of its commands."""
    own = parser._actions
    below = [
        command
        for action in own
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    ]
    return [*own, *(action for command in below for action in _actions(command))]
