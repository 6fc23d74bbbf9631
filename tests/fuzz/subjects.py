"""Artefacts for the session fuzzer, in every format and on every provider, and their expected
outputs for a single row.

Shapes: L positions of the range, E model width, V numbers of an output.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
from msgspec.structs import replace

from posenc_export.export import ReadAs, Sources, export
from posenc_export.export.describe import Model, eager
from posenc_export.export.expected import TRIES, disturbed, eager_session
from posenc_export.export.sources import in_dtype
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime import Session, load, verify
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS, SCALED
from posenc_export.runtime.artefact.certificate import exported_error
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.runtime.verification.proof import accuracy_on
from posenc_export.shared.numerics import LIMIT, SAFETY, Errors, cell_error
from tests.reading import own_modules
from tests.tiny import block, decoder, encoder

TEXTS = 5  # number of token sequences, and of sequences of coordinates
# Lengths of full passes are rounded up to a multiple of this, so that later calls can reuse them.
ROUND = 48
ENCODED = (7, 2, 5, 1, 9)  # lengths of the encoder sequences in tokens
KEPT = 400  # most full passes in the cache
WIDTH = 48  # of the hidden states of tests.tiny
WINDOW = 24  # tokens that layers of kind "windows" see
BYTES = 256  # vocabulary for which calibration data may be any text
SAMPLE = 2048  # tokens of calibration data
# A certificate bounds the root mean square error over the tokens of a cell, at least MANY. Where
# activations are rounded, that of a few tokens may be larger by UNEVEN: measured up to 1.2 times
# that of their row (encoder with normalized positions in float16, whose row is at 0.9 of the
# bound).
MANY, UNEVEN = 16, 1.25
ABOVE_MEASURED = 2  # most error of a call, times the largest that is measured as exported
# Arguments of export by format.
FORMS: dict[str, dict[str, str]] = {
    "float32": {},
    "float16": {"dtype": "float16"},
    **{name: {"weights": name} for name in ("int8", "int4", "int4-128")},
    **{f"cache-{name}": {"cache": name} for name in CACHE_FORMATS},
    "int8-cache": {"weights": "int8", "cache": "int8"},
}


class Spec(NamedTuple):
    """Specification of an artefact: variant of tests.tiny, kind of model (KINDS, OWN), target,
    signature, number of positions, format (FORMS), and provider.
    """

    variant: str
    kind: str
    target: str
    signature: str = "positions"
    size: int = 40
    form: str = "float32"
    provider: str = "cpu"

    def __str__(self) -> str:
        return "-".join(map(str, self))


class Token(NamedTuple):
    """A token of a row: index of its text, and of its sequence of coordinates; -1 for the
    default ones.
    """

    text: int
    beside: int = -1


def windows(variant: str, size: int, name: str = "window") -> Any:
    """Describe a decoder whose layers see a window, or chunks."""
    whole = decoder(variant, max_positions=size)
    sees = {"name": name, "size": WINDOW}
    layers = {
        name: replace(kind, attention=replace(kind.attention, sees=sees))
        for name, kind in whole.layers.items()
    }
    return replace(whole, layers=layers)


KINDS: dict[str, Callable[[str, int], Any]] = {
    "decoder": lambda variant, size: decoder(variant, max_positions=size),
    "block": lambda variant, size: block(variant, max_positions=size),
    "linear": lambda variant, size: decoder(
        variant, max_positions=size, mechanism="linear", kv_heads=6
    ),
    "bidirectional": lambda variant, size: block(variant, max_positions=size, causal=False),
    "encoder": lambda variant, size: replace(encoder(variant), max_positions=size),
    "windows": windows,
    "chunks": functools.partial(windows, name="chunk"),
    "bytes": lambda variant, size: decoder_config(BYTES, 2, 40, block(variant, max_positions=size)),
}
OWN = ("own",)  # modules of users, whose variants are those of tests.reading.own_modules
CALIBRATED = ("block", "bytes")  # kinds for which calibration data can be written


class Subject:
    """An artefact, the texts for its rows, and its expected outputs.

    Args:
        spec: the artefact to export.
        folder: an empty folder for it.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        result, how = sources(spec.variant, spec.kind, spec.size), dict(FORMS[spec.form])
        if how.get("cache") in SCALED:
            how["calibrate"] = str(_sample(spec.kind, folder))
        place, options = folder / "artefact", {"signature": spec.signature, **how}
        export(result, spec.target, place, verify=False, **options)  # type: ignore[arg-type]
        self.spec, self.model = spec, load(place, provider=spec.provider, threads=1)
        self.manifest = self.model.manifest
        self.cached = bool(self.manifest.states)
        self.in_place = any(state.update == "in_place" for state in self.manifest.states)
        self.replaces = any(state.update == "replace" for state in self.manifest.states)
        self.windows = any(state.window for state in self.manifest.states)
        self.columns = self.manifest.layout == "columns"
        self.vocabulary = self.manifest.vocabulary
        self.width: Any = self.manifest.inputs[0].axes[-1]
        random = np.random.default_rng(0)
        dtype = self.manifest.dtype
        if self.vocabulary:
            self.texts = random.integers(min(61, self.vocabulary), size=(TEXTS, spec.size))
        else:
            self.texts = random.standard_normal((TEXTS, spec.size, self.width)).astype(dtype)
        shape = (TEXTS, self.manifest.axes or 1, spec.size)
        self.beside = random.integers(spec.size, size=shape)
        heads = self.manifest.encoder[1:]
        numbers = sum(int(value.axes[1]) * int(value.axes[3]) for value in heads)
        lengths = ENCODED if numbers else ()
        self.encoded = [random.standard_normal((n, numbers)).astype(dtype) for n in lengths]
        self._module = result.of(self.manifest.dtype, how.get("weights")).model
        self._against, self._passes = references(self._module, self), {}  # type: ignore[var-annotated]

    def tokens(self, row: list[Token], first: int = 0) -> np.ndarray:
        """Return the tokens of a row from index `first` on, [n] or [n,E]."""
        places = enumerate(row[first:], first)
        read = [self.texts[token.text, place % self.spec.size] for place, token in places]
        return np.stack(read) if read else self.texts[0, :0]

    def numbers(self, row: list[Token], start: int, first: int = 0) -> np.ndarray:
        """Return the coordinates [axes,n] of a row from index `first` on. Those that are not given
        count the positions, and are 0 if they are no places in the sequence.
        """
        counted = self.manifest.axes and not self.manifest.coordinate_range
        numbers = np.zeros((self.beside.shape[1], len(row[first:])), np.int64)
        for place, token in enumerate(row[first:], first):
            given = self.beside[token.beside, :, place % self.spec.size]
            default = start + place if counted else 0
            numbers[:, place - first] = given if token.beside >= 0 else default
        return numbers

    def expected(
        self, start: int, row: list[Token], source: int = 0
    ) -> dict[str, tuple[np.ndarray, "Reference"]]:
        """Return the outputs for a single row in one pass, at least [len(row),V], and the reference
        that computed them, by its name.

        Causal models are given further tokens after the row.

        Args:
            source: index of its encoder sequence in `encoded`, if the model reads an encoder.
        """
        wanted = len(row)
        if self.cached:
            wanted = min(-(-len(row) // ROUND) * ROUND, self.spec.size - start)
        whole = tuple(row) + (row[-1],) * (wanted - len(row))
        key = (start, source, whole)
        if key not in self._passes:
            if len(self._passes) >= KEPT:
                self._passes.clear()
            self._passes[key] = {
                name: (self._pass(against.session, start, list(whole), source), against)
                for name, against in self._against.items()
            }
        return self._passes[key]  # type: ignore[no-any-return]

    def explained(
        self, start: int, row: list[Token], source: int, against: "Reference", part: slice
    ) -> float:
        """Return the largest error of some tokens of a row that rounding explains: SAFETY times the
        change of the module's outputs if each weight changes by a unit in the last place, or if it
        computes in the artefact's dtype, at most LIMIT. Integer positions amplify such changes by
        a factor of 100 and more.
        """
        full = self._pass(self._against["its module"].session, start, row, source)
        others = (self._pass(session, start, row, source) for session in self._disturbed)
        return min(LIMIT, SAFETY * max(against.error(x[part], full, part) for x in others))

    @functools.cached_property
    def _disturbed(self) -> list[Session]:
        module = in_dtype(self._module, "float32")
        sessions = [eager_session(disturbed(module, seed)) for seed in range(TRIES)]
        if self.manifest.dtype != "float32":
            sessions.append(Loaded(TorchGraph(*eager(self._module))).session())
        return sessions

    def _pass(self, session: Session, start: int, row: list[Token], source: int) -> np.ndarray:
        numbers = self.numbers(row, start)[:, None]
        tokens, *given = (
            array if array.dtype == np.int64 else array.astype(session.manifest.dtype)
            for array in (self.tokens(row), *self.encoded[source : source + 1])
        )
        grid: np.ndarray | None = numbers if self.manifest.axes else None
        session.reset()
        how: Any = {"start": start, "chunk": len(row), "grid": grid, "encoder": given or None}
        return session.prefill(tokens[None], **how)[0]


class Reference(NamedTuple):
    """A session that computes expected outputs, the bound of the error of the artefact
    (numerics.cell_error), whether the artefact rounds activations, and the factor on the bound for
    fewer than MANY tokens.
    """

    session: Session
    bound: float
    rounds: bool
    of_few: float = 1.0

    def error(self, output: np.ndarray, full: np.ndarray, part: slice) -> float:
        """Return the error of the outputs of some tokens of a row, relative to all its outputs in
        one pass. Verification pools the tokens of a row in the same way.
        """
        errors, expected = Errors(), full[part]
        errors.add(output, expected)
        if not expected.size:
            return 0.0
        mean, of_row = (np.square(x, dtype=np.float64).mean() for x in (expected, full))
        return cell_error(errors, self.rounds) * min(1.0, float(np.sqrt(mean / (of_row or 1.0))))


def references(module: Model, subject: Subject) -> dict[str, Reference]:
    """Return what the outputs of a subject are compared with: the eager module with its rounded
    weights, and one pass of the artefact itself over the row.

    The first bound is the one that verification uses, or twice the error that it
    measures on the artefact as exported: nothing bounds the rounding to codes on the CPU, which is
    large in some models. Two divisions into calls of one artefact are closer, so the second one is
    half of it.
    """
    spec, manifest = subject.spec, subject.manifest
    assert manifest.reference is not None
    accuracy = accuracy_on(spec.provider, manifest.reference)
    bound = accuracy.tolerance
    if accuracy.rounds:
        proof = verify(subject.model.folder, spec.provider, record=False, quick=True)
        bound = max(bound, ABOVE_MEASURED * (exported_error(proof) or 0.0))
    of_few = UNEVEN if accuracy.rounds else 1.0
    results = {"its module": Reference(eager_session(module), bound, accuracy.rounds, of_few)}
    if accuracy.rounds:
        results["its own full pass"] = Reference(subject.model.session(), bound / 2, True)
    return results


@functools.lru_cache(maxsize=8)
def sources(variant: str, kind: str, size: int) -> Sources:
    """Return the module of a spec, traced once for all targets."""
    if kind not in OWN:
        return Sources(seeded(KINDS[kind](variant, size)))
    own = own_modules.seeded(variant)
    memory = own_modules.ReadsEncoder.memory if variant == own_modules.READING else 0
    return Sources(own, how=ReadAs(own_modules.inputs(own, 2, 12), size, memory=memory))


def _sample(kind: str, folder: Path) -> Path:
    """Write calibration data for a kind of CALIBRATED."""
    random, path = np.random.default_rng(0), folder / "sample"
    if kind == "bytes":
        path.write_bytes(random.integers(BYTES, size=SAMPLE).astype(np.uint8).tobytes())
        return path
    np.save(path.with_suffix(".npy"), random.standard_normal((SAMPLE, WIDTH)).astype(np.float32))
    return path.with_suffix(".npy")


_folders: list["tempfile.TemporaryDirectory[str]"] = []


@functools.cache
def subject(spec: Spec) -> Subject:
    """Return the subject of a spec, created once."""
    _folders.append(tempfile.TemporaryDirectory())
    return Subject(spec, Path(_folders[-1].name))
