"""`posenc chat`: talk to a decoder by its chat template; each line of stdin is a message."""

import argparse
import contextlib
import io
import json
import sys
from typing import Any, Iterator

from posenc_export.commands.loading import drafting, loaded, model_of
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

NEW = "/new"
OPTIONS: Table = {
    **model_of("a decoder's artefact with a chat template"),
    "--system": option("text of the system message"),
    **TEMPLATE,
    "--max-tokens": option(
        "largest number of tokens of a reply (default: as many as the context allows)", type=int
    ),
    "--context": option(
        "largest number of tokens of the conversation (default: the range of positions)", type=int
    ),
    **SAMPLING,
    **SPECULATE,
    **PROVIDER,
}


def run(options: argparse.Namespace) -> int:
    """Reply until the end of stdin. Returns the exit status 0."""
    for name in ("max_tokens", "context"):
        number = getattr(options, name)
        if number is not None and number < 1:
            rule, remedy = f"{name} of at least 1", "give a larger number"
            raise refusal("chat", rule, number, remedy)
    model = loaded(options, options.folder, check_generates)
    given = (options.context, drafting(options), template_values(options))
    chat = model.conversation(options.system, *given)
    talking = sys.stdin.isatty()
    if talking:
        said = "begins a new conversation, Ctrl-C ends a reply, Ctrl-D ends the program"
        print(f"{NEW} {said}", file=sys.stderr)
    for line in _lines("> " if talking else ""):
        if line == NEW:
            chat = model.conversation(options.system, *given)
            continue
        try:
            _print_reply(options, chat, line)
        except ValueError as error:
            if not talking:
                raise
            refuse(options.say, str(error))
    return 0


def _lines(prompt: str) -> Iterator[str]:
    """Yield the lines of stdin that are not blank, which a terminal edits with a history."""
    if prompt:
        with contextlib.suppress(ModuleNotFoundError):  # Windows has none
            import readline  # noqa: F401
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as argv
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line


def _print_reply(options: argparse.Namespace, chat: Any, line: str) -> None:
    """Print the reply to a message. What is printed before an interrupt stays a reply."""
    reply = chat.reply(line, options.max_tokens, *sampling_of(options))
    pieces = []
    try:
        for piece in reply:
            pieces.append(piece)
            if not options.json:
                print_text(piece)
    except KeyboardInterrupt:
        reply.close()
    said = {"text": "".join(pieces), "tokens": chat.tokens}
    print(json.dumps(said) if options.json else "", flush=True)
