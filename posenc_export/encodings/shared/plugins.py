"""Encodings registered in this process, or offered by installed packages."""

import functools
import inspect
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Iterator, Mapping

from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.shared.refusal import refusal, short_repr

GROUP = "posenc_export.encodings"
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
Encodings = Mapping[str, type[PositionEncoding]]


@dataclass(frozen=True)
class Package:
    """A distribution that an encoding comes from."""

    # Name of the distribution, or of the top-level module if it belongs to no distribution.
    name: str
    version: str  # version of the distribution, or empty

    def __str__(self) -> str:
        return f"{self.name} {self.version or '(no version)'}"


class Known(Encodings):
    """Encodings by name: built-in, registered, and from entry points of installed packages, which
    are imported on first use. built_in: encodings of this package, by name.
    """

    def __init__(self, built_in: Encodings) -> None:
        self.built_in = built_in
        self.registered: dict[str, type[PositionEncoding]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.built_in, *self.registered, *sorted(_offered()))))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self.registered or name in _offered()

    def __getitem__(self, name: str) -> type[PositionEncoding]:
        """Return the class, after import for an entry point. A built-in encoding takes precedence,
        because presets and checkpoints refer to it by name. ValueError: two packages offer the
        name, or an entry point cannot be imported or is not an encoding; KeyError: unknown name.
        """
        cls = self.built_in.get(name) or self.registered.get(name)
        if cls is not None:
            return cls
        points = _offered().get(name, ())
        if not points:
            raise KeyError(name)
        self.check_one(name)
        return _loaded(points[0])

    def check_one(self, name: str) -> None:
        """Raise ValueError if several encodings have the name, with their packages."""
        cls = self.built_in.get(name) or self.registered.get(name)
        own, points = "" if cls is None else _place(cls), _offered().get(name, ())
        others = [str(_package(point)) for point in points if point.value != own]
        first = [] if cls is None else [str(self.origin(name) or "this package")]
        if len(first + others) > 1:
            remedy = "rename one in its package, or uninstall it"
            got = f"one from each of {' and '.join(first + others)}"
            raise refusal(f"encoding {name}", "one encoding of that name", got, remedy)

    def add(self, name: str, cls: type[PositionEncoding]) -> None:
        """Register an encoding, see `encodings.register`."""
        where = f"register {short_repr(name)}"
        if not isinstance(name, str) or not NAME.match(name):
            rule = "a name of lower-case letters, digits and _"
            raise refusal(where, rule, short_repr(name), "choose another name")
        check_class(where, cls)
        points, before = _offered().get(name, ()), self.registered.get(name, cls)
        taken = [f"an entry point of {_package(p)}" for p in points if p.value != _place(cls)]
        if name in self.built_in:
            taken = [self.built_in[name].__qualname__]
        elif _place(before) != _place(cls):  # not the same class again, as of a notebook's cell
            taken = [before.__qualname__]
        if taken:
            got = f"the name of {' and '.join(taken)}"
            raise refusal(where, "an unused name", got, "choose another name")
        self.registered[name] = cls

    def origin(self, name: str) -> Package | None:
        """Return the package that an encoding comes from; None for a built-in encoding."""
        if name in self.built_in:
            return None
        points = _offered().get(name, ())
        if points:
            return _package(points[0])
        cls = self.registered[name]
        module = cls.__module__.partition(".")[0]
        owners = _owners(tuple(sys.path)).get(module, ())
        return Package(owners[0], metadata.version(owners[0])) if owners else Package(module, "")


def check_class(where: str, cls: Any) -> None:
    """Check that encodings of a class can be built from a specification. ValueError: not a subclass
    of PositionEncoding, a constructor without a geometry, a parameter without a name or a type.
    """
    is_class = isinstance(cls, type)
    if not is_class or not issubclass(cls, PositionEncoding) or cls is PositionEncoding:
        kind = cls.__qualname__ if is_class else f"an object of {type(cls).__qualname__}"
        rule = "a subclass of posenc_export.encodings.PositionEncoding"
        raise refusal(where, rule, kind, "derive the class from it")
    try:
        parameters = list(inspect.signature(cls.__init__, eval_str=True).parameters.values())[1:]
    except NameError as error:
        rule = "annotations that can be evaluated"
        raise refusal(where, rule, error, "import the name at run time") from None
    kinds = inspect.Parameter
    first = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    named = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    if not parameters or parameters[0].kind not in first:
        rule = "a constructor that takes a Geometry first"
        got = f"{cls.__qualname__} without it"
        raise refusal(where, rule, got, "write __init__(self, geometry: Geometry)")
    for parameter in parameters[1:]:
        if parameter.kind not in named or parameter.annotation is inspect.Parameter.empty:
            remedy = f"write {parameter.name}: float, or another type"
            raise refusal(where, "parameters with names and types", repr(str(parameter)), remedy)


def modules() -> set[str]:
    """Return the names of imported modules outside this package that define encodings."""
    classes: list[type[PositionEncoding]] = [PositionEncoding]
    for cls in classes:  # the list grows until it has every subclass
        classes += cls.__subclasses__()
    own = GROUP.partition(".")[0]
    return {cls.__module__ for cls in classes if cls.__module__.partition(".")[0] != own}


def _offered() -> dict[str, tuple[metadata.EntryPoint, ...]]:
    return _offered_on(tuple(sys.path))


@functools.lru_cache(maxsize=4)
def _offered_on(_: tuple[str, ...]) -> dict[str, tuple[metadata.EntryPoint, ...]]:
    """Entry points of installed packages by name, cached by the value of sys.path."""
    points: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    for point in metadata.entry_points(group=GROUP):
        points[point.name] = (*points.get(point.name, ()), point)
    return points


@functools.lru_cache(maxsize=4)
def _owners(_: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Distributions of each top-level module; reads all lists of files, once for a sys.path."""
    return metadata.packages_distributions()


@functools.cache
def _loaded(point: metadata.EntryPoint) -> type[PositionEncoding]:
    where = f"encoding {point.name}"
    described = f"entry point {point.name} = {point.value} of {_package(point)}"
    try:
        cls = point.load()
    # Code of another package may raise anything: report it in one line with the name of the
    # package.
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        remedy = f"repair or uninstall {_package(point).name}"
        raise refusal(where, f"{described} to be importable", problem, remedy) from error
    check_class(f"{where}, {described}", cls)
    if not NAME.match(point.name):
        rule = "a name of lower-case letters, digits and _"
        raise refusal(where, rule, described, "rename it in the package")
    return cls


def _package(point: metadata.EntryPoint) -> Package:
    if point.dist is None:
        return Package(point.value, "")
    return Package(point.dist.name, point.dist.version)


def _place(cls: type[PositionEncoding]) -> str:
    """Module and name of a class, as an entry point refers to it."""
    return f"{cls.__module__}:{cls.__qualname__}"
