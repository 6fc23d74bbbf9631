"""The `posenc` command: list, describe, export, compile, verify, generate, chat, embed, serve,
page, bench, inspect, plot, completion.
"""

import argparse
import importlib
import os
import sys
from typing import Container, List, Optional, Sequence

from posenc_export.commands.terminal import (
    REFUSED,
    OneLineParser,
    Progress,
    escaping,
    in_encoding,
    refusal,
    refuse,
)
from posenc_export.shared.version import VERSION

INTERRUPTED = 130
# File in commands/ of each command, which is imported only for its own command, and what the
# command does.
COMMANDS = {
    "list": ("listing", "list encodings, targets, families of checkpoints and presets"),
    "describe": (
        "describe",
        "print a model layer by layer, in the order of its forward pass; reads no weights",
    ),
    "export": ("export", "write an artefact and verify it"),
    "compile": ("compile", "compile a pt2 artefact to native code for this machine (AOTInductor)"),
    "verify": (
        "verify",
        "verify an artefact on this machine against the reference that it contains; needs no torch",
    ),
    "generate": ("generate", "continue a text with a decoder"),
    "chat": ("chat", "talk to a decoder with a chat template: each line of stdin is a message"),
    "embed": ("embed", "write the sentence embeddings of texts"),
    "serve": (
        "serve",
        "answer completions, conversations or embeddings over HTTP, as in OpenAI's API",
    ),
    "page": ("page", "write a static page that runs a decoder in the browser"),
    "bench": ("bench", "time prefill and decode of artefacts and runtimes"),
    "inspect": (
        "inspect",
        "print encoding, sizes, positions, inputs, states, certificate and layers of an "
        "artefact, or a program that runs it",
    ),
    "plot": ("plot", "draw an encoding, as PNG or SVG"),
    "completion": ("completion", "print a script that completes commands and options in a shell"),
}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit status: 0, 1 for a failed check, 2 for bad input, 130
    after an interrupt.
    """
    with escaping():
        return _run(sys.argv[1:] if arguments is None else list(arguments))


def _run(arguments: List[str]) -> int:
    called = [word for word in arguments if not word.startswith("-")][:1]
    options, unknown = parser_of(called).parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.say = Progress()
    # Closed by the calling program: the next opened file would get its descriptor.
    if sys.stdout is None:
        return refuse(
            options.say,
            "output: expected stdout to be open, got a closed one; send it to a file or a pipe",
        )
    try:
        status = int(options.run(options))
        sys.stdout.flush()  # raises BrokenPipeError here rather than at exit
        return status
    except BrokenPipeError:
        _discard_output()
        return 0
    except KeyboardInterrupt:
        options.say.close()
        return INTERRUPTED
    except Exception as error:  # the code of an encoding from outside may raise anything
        line = refusal(error) if isinstance(error, REFUSED) else None
        line = in_encoding(error) or line
        if line is None:  # a bug, not an error of the input
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
        return refuse(options.say, line)


def _discard_output() -> None:
    """Send what stdout still holds nowhere, so that the flush at exit does not fail again, which
    would change the exit status.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser_of(called: Container[str]) -> argparse.ArgumentParser:
    """Return a parser of all commands, with the arguments of those that are called."""
    parser = OneLineParser(
        prog="posenc",
        description="Export position encodings as attention blocks and decoders, verify them, "
        "and run them.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"posenc {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=OneLineParser)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        if name in called:
            file = importlib.import_module(f"posenc_export.commands.{module}")
            file.add_arguments(command)
            command.set_defaults(run=file.run)
        command.add_argument("--json", action="store_true", help="machine-readable output")
        command.set_defaults(parser=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
