"""A process that renders chat templates, within limits of time and memory.

Jinja's sandbox keeps a template from Python's internals, but lets it compute without end: in loops,
and in single operations of Python, such as comparing lists that contain each other many times. Only
limits of a process bound all of them.

Python runs this file by its path, so it imports nothing of the package. Each line of stdin is a
request in JSON: a template, values to render it with (null to compile it only) and seconds of
processor time. Each line of stdout is {"text"}, {"names"} of values that a template can read, or
{"error"}. The process ends where time or memory does not suffice.
"""

import datetime
import functools
import json
import resource
import signal
import sys
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY = 1 << 29  # bytes of the address space
LONGEST = 1 << 22  # characters of a rendered text
SHOWN = 1000  # characters of an error


class Generation(Extension):
    """The block {% generation %}, which marks a reply for training and does not change the text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        parsed = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(parsed).set_lineno(line)


class Names(Namespace):
    """namespace() without names that begin with an underscore, which reach Python's internals."""

    def __init__(self, *values: Any, **named: Any) -> None:
        _check(dict(*values, **named))
        super().__init__(*values, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check([name])
        super().__setitem__(name, value)


def _check(names: Any) -> None:
    if any(str(name).startswith("_") for name in names):
        raise SecurityError("a name in a namespace begins with an underscore")


def _tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """JSON without the escapes of HTML that Jinja's own filter writes. layout: indent, separators,
    sort_keys.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _refuse(message: str) -> None:
    raise TemplateError(message)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers: the same options, filters and functions."""
    extensions = [Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_refuse,
        strftime_now=lambda form: datetime.datetime.now().strftime(form),
        namespace=Names,
    )
    return environment


@functools.lru_cache(1)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def _answer(template: str, values: Any) -> dict[str, Any]:
    try:
        compiled = _compiled(template)
        if values is None:
            unbound = meta.find_undeclared_variables(_environment().parse(template))
            return {"names": sorted(unbound - set(_environment().globals))}
        text = compiled.render(**values)
        if len(text) > LONGEST:
            raise MemoryError
        return {"text": text}
    except MemoryError:  # ends the process
        raise
    except Exception as error:  # of any kind that Jinja or a template's calls raise; the caller
        return {"error": str(error)[:SHOWN] or type(error).__name__}  # names the template


def main() -> None:
    """Answer the requests of stdin until its end."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])  # whose signal ends the process
        answer = json.dumps(_answer(asked["template"], asked["values"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
