"""The `posenc` command."""

import argparse
import atexit
import gc
import importlib
import os
import sys
from typing import Container, Sequence

from posenc_export.commands import terminal
from posenc_export.commands.options import add_options
from posenc_export.shared.version import VERSION

INTERRUPTED = 130
# What each command does, by group. Its file in commands/ is imported only for its own command.
GROUPS = {
    "make": {
        "export": "write an artefact and verify it",
        "page": "write a static page that runs a decoder in the browser",
    },
    "check": {
        "verify": "compare an artefact with its reference on this machine; needs no torch",
        "conformance": "try kernels of this machine against their documented arithmetic",
        "audit": "compare a graph of another exporter with its checkpoint or module",
        "bench": "time prefill and decode of artefacts and runtimes",
    },
    "run": {
        "chat": "talk to a decoder with a chat template: each line of stdin is a message",
        "generate": "continue a text with a decoder",
        "embed": "write the sentence embeddings of texts",
        "serve": "answer completions, conversations or embeddings over HTTP, as OpenAI's API",
    },
    "look": {
        "list": "list encodings, targets and presets",
        "describe": "print the parts of a model, layer by layer",
        "inspect": "print what an artefact holds, or a program that runs it",
        "plot": "draw encodings, as PNG or SVG",
        "study": "train small decoders and compare them on texts longer than in training",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
EXAMPLES = """
  posenc chat model.gguf                                  talk to a GGUF file
  posenc generate small-rope --prompt "import os"         continue a text
  posenc export ./checkpoint --target ort -o build/model  write an artefact
  posenc audit theirs.onnx --reference ./checkpoint       check another exporter
  posenc inspect build/model --runtime c > model.c        print a program
"""
atexit.register(gc.freeze)  # at exit, Python would look for cycles among all objects, for 0.1 s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, 1 for a failed check, 2 for bad input, 130 when interrupted."""
    with terminal.escaping():
        return _run(sys.argv[1:] if arguments is None else list(arguments))


def _run(arguments: list[str]) -> int:
    called = [word for word in arguments if not word.startswith("-")][:1]
    options, unknown = parser_of(called).parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.say = terminal.Progress()
    # Closed by the calling program: the next opened file would get its descriptor.
    if sys.stdout is None:
        rule = "output: expected stdout to be open, got a closed one"
        return terminal.refuse(options.say, f"{rule}; send it to a file or a pipe")
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
        line = terminal.in_encoding(error) or terminal.refusal(error)
        if line is None:  # a bug, not an error of the input
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
        return terminal.refuse(options.say, line)


def _discard_output() -> None:
    """Send what stdout still holds nowhere: a flush that fails at exit changes the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Front(terminal.OneLineParser):
    """The parser of all commands, whose help lists them by group."""

    def format_help(self) -> str:
        lines = [self.format_usage(), f"{self.description}"]
        for title, group in GROUPS.items():
            lines += ["", f"{title}:", *(f"  {name:12} {line}" for name, line in group.items())]
        return "\n".join(
            [*lines, "", f"examples:{EXAMPLES}", "posenc COMMAND --help has options.\n"]
        )


def parser_of(called: Container[str]) -> argparse.ArgumentParser:
    """Return a parser of all commands, with the arguments of those that are called."""
    purpose = "Export position encodings as attention blocks and decoders, verify and run them."
    parser = Front(prog="posenc", description=purpose)
    parser.add_argument("-V", "--version", action="version", version=f"posenc {VERSION}")
    commands = parser.add_subparsers(
        required=True, metavar="command", parser_class=terminal.OneLineParser
    )
    for name, summary in COMMANDS.items():
        sentence = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=sentence)
        if name in called:
            file = importlib.import_module(f"posenc_export.commands.{name}")
            add_options(command, file.OPTIONS)
            command.set_defaults(run=file.run)
        command.add_argument("--json", action="store_true", help="machine-readable output")
        command.set_defaults(parser=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
