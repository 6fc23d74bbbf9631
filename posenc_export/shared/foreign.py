"""Errors of other libraries, and JSON files of strangers, as a ValueError of one line."""

import contextlib
import importlib
import json
import linecache
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Iterator, Sequence

import msgspec

from posenc_export.shared.refusal import refusal

# Exceptions that libraries raise for content that they do not expect: tokenizers, torch's readers.
# RuntimeError includes RecursionError, LookupError includes KeyError and IndexError.
FOREIGN: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
PANIC = "PanicException"
LONGEST = 300  # characters of an error in a message
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape in JSON that may be half a character


# Beginnings of file names that are not code of a user: torch, this package, Python's import.
TORCH = find_spec("torch")
TORCHS = [] if TORCH is None else TORCH.submodule_search_locations or []
OTHERS_CODE = (*TORCHS, str(Path(__file__).parents[1]), importlib.__file__, "<")


def last_line(frames: Sequence[tuple[str, int]]) -> str:
    """Return the last line of a user's code among files and numbers of lines, as
    `folder/file.py:12: code`; empty if there is none.
    """
    own = [frame for frame in frames if not frame[0].startswith(OTHERS_CODE)]
    if not own:
        return ""
    file, number = own[-1]
    code = " ".join(linecache.getline(file, number).split())
    return f"{'/'.join(Path(file).parts[-2:])}:{number}: {code[:120]}".removesuffix(": ")


def brief(error: object) -> str:
    """Return the text of an error in one line of printable characters, or the name of its class if
    it has none.
    """
    text = " ".join(str(error).split())
    return "".join(filter(str.isprintable, text))[:LONGEST] or type(error).__name__


@contextlib.contextmanager
def explained(rule: str, remedy: str, *errors: type[Exception]) -> Iterator[None]:
    """Context manager that turns errors of FOREIGN, bare ones, panics and `errors` into a
    ValueError. rule: what was expected, such as "text: expected a text that the tokenizer can
    encode"; a ValueError that begins with the same word stays as it is.
    """
    try:
        yield
    except BaseException as error:
        # Libraries in Rust raise Exception itself, and for a panic a BaseException, whose class
        # they do not give away.
        bare = type(error) is Exception or type(error).__name__ == PANIC
        own = isinstance(error, ValueError) and str(error).startswith(rule[: rule.find(":") + 1])
        if own or (not bare and not isinstance(error, (*FOREIGN, *errors))):
            raise
        raise ValueError(f"{rule}, got an error ({brief(error)}); {remedy}") from None


def json_of(where: str, name: str, content: bytes, remedy: str, kind: type[Any] = dict) -> Any:
    """Return the content of the JSON file `name`, of type `kind`, dict or list. Raise ValueError,
    which begins with `where`, for content that is not JSON in UTF-8, nested too deeply, or of
    another kind.
    """
    with explained(f"{where}: expected {name} to be JSON", remedy):
        values = json.loads(content.decode("utf-8"))
        if SURROGATE.search(content):
            json.dumps(values, ensure_ascii=False).encode()
    if not isinstance(values, kind):
        rule = f"a JSON {'object' if kind is dict else 'list'}"
        got = f"{type(values).__name__}; {remedy}"
        raise ValueError(f"{where}: expected {name} to be {rule}, got {got}")
    return values


def typed(where: str, name: str, values: Any, kind: Any, remedy: str) -> Any:
    """Return values as a msgspec.Struct or another type. Raise ValueError for others."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        rule = f"{name} with values as its library writes them"
        raise refusal(where, rule, f"another ({brief(error)})", remedy) from None
