"""`posenc chat`: talk to a decoder by its chat template; each line of stdin is a message."""

import argparse
import contextlib
import io
import json
import re
import sys
import time
from typing import Any, Iterator

from posenc_export.commands.loading import loaded, model_of
from posenc_export.commands.options import (
    PROVIDER,
    SAMPLING,
    SPECULATE,
    TEMPLATE,
    Table,
    option,
    sampling_of,
    template_values,
)
from posenc_export.commands.terminal import print_text, refuse
from posenc_export.runtime.session.generation import check_generates
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

COMMANDS = {
    "/new": "begin a new conversation",
    "/system": "TEXT: begin a new conversation with this system message, or without one",
    "/help": "list these commands",
    "/exit": "end the program, as Ctrl-D and Ctrl-C twice; Ctrl-C once ends a reply",
}
COMMAND = re.compile("/[a-z]+")  # and not a path
OPTIONS: Table = {
    **model_of("a decoder's artefact with a chat template"),
    "--system": option("text of the system message"),
    **TEMPLATE,
    "--max-tokens": option(
        "largest number of tokens of a reply (default: as many as the context allows)", least=1
    ),
    "--context": option(
        "largest number of tokens of the conversation (default: the range of positions)", least=1
    ),
    **SAMPLING,
    **SPECULATE,
    **PROVIDER,
}


def run(options: argparse.Namespace) -> int:
    """Reply until the end of stdin. Returns the exit status 0."""
    model = loaded(options, options.folder, check_generates)
    given = (options.context, options.speculate, template_values(options))
    chat = model.conversation(options.system, *given)
    talking = sys.stdin.isatty()
    if talking:
        print("/help lists the commands, Ctrl-C ends a reply", file=sys.stderr)
    for line in _lines("> " if talking else ""):
        word, _, rest = line.partition(" ")
        if word == "/exit":
            return 0
        if word == "/help":
            said = (f"{name:8} {meaning}" for name, meaning in COMMANDS.items())
            print("\n".join(said), file=sys.stderr)
        elif word in ("/new", "/system"):
            options.system = rest.strip() or None if word == "/system" else options.system
            chat = model.conversation(options.system, *given)
        elif talking and COMMAND.fullmatch(word):
            names = ", ".join(COMMANDS)
            near = suggestion(word, COMMANDS)
            refuse(options.say, str(refusal("chat", f"one of {names}", word, near)))
        else:
            _answer(options, chat, line, talking)
    return 0


def _answer(options: argparse.Namespace, chat: Any, line: str, talking: bool) -> None:
    """Print the reply to a message. What cannot be answered ends the program only in a pipe, and
    what is printed before an interrupt stays a reply.
    """
    reply, begin = chat.reply(line, options.max_tokens, *sampling_of(options)), time.monotonic()
    pieces, seconds = [], []
    try:
        for piece in reply:
            pieces.append(piece)
            seconds.append(time.monotonic() - begin)
            if not options.json:
                print_text(piece)
    except KeyboardInterrupt:
        reply.close()
    except ValueError as error:
        if not talking:
            raise
        refuse(options.say, str(error))
        return
    said = {"text": "".join(pieces), "tokens": chat.tokens}
    print(json.dumps(said) if options.json else "", flush=True)
    if talking and len(seconds) > 1:
        rate = (len(chat.tokens) - 1) / (seconds[-1] - seconds[0])
        shown = f"{len(chat.tokens)} tokens, the first after {seconds[0]:.1f} s, then {rate:.1f}/s"
        print(f"[{shown}]", file=sys.stderr)


def _lines(prompt: str) -> Iterator[str]:
    """Yield the lines of stdin that are not blank, which a terminal edits with a history. With a
    prompt, an interrupt ends them only if it follows another without a line between.
    """
    if prompt:
        with contextlib.suppress(ModuleNotFoundError):  # Windows has none
            import readline  # noqa: F401
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as argv
    interrupted = False
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted or not prompt:
                raise
            interrupted = True
            print("\nCtrl-C again ends the program", file=sys.stderr)
            continue
        interrupted = False
        if line:
            yield line
