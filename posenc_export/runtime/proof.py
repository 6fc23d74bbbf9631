"""What an artefact must give: numpy and its manifest, no torch.

An artefact carries its reference: inputs follow from a seed, expected outputs stand in a file. `expected` of any origin, that file or the live module,
is compared by the same grid of scenarios (runtime/measuring.py).

Shapes: B batch, L tokens of a sequence, V numbers of an output.
"""

import hashlib
import math
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import numpy as np

from posenc_export.runtime import providers
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.scenarios import Case
from posenc_export.runtime.schema import FAILED
from posenc_export.runtime.session import Session

BATCHES = (1, 3)
LENGTH = 36  # tokens per row: long enough for every cut, short enough for an oracle that goes entry by entry
LONGEST = 4096  # tokens of the one cell that fills a cache to its end; beyond it the start offsets carry the proof
SHORT = 256  # tokens of a row, padding included, in every cell but the full cache; memory of caches comes in pages of 2 MiB, so that a long range is not free
LARGE = 1 << 26  # weights that a token reads: from here on the grid is thinner, or it would take minutes
WORK = 1 << 37  # weights times tokens of the cell that fills a cache: 4096 tokens of 32 M weights, 1024 of 128 M
ENCODED = 11  # tokens of the sequence that an encoder has read
CHUNK = 512
SEGMENT_PADDING = 3  # columns in front of the first row
WIDEST = 1 << 22  # numbers of the outputs of one call that fills a cache, 16 MiB: fewer tokens at a time where the vocabulary is large


@dataclass(frozen=True)
class Beside:
    """Tokens with coordinates or segments of their own.

    Args:
        tokens: [2,L] or [2,L,E].
        mask: attention mask [2,L]; the first row has padding in front where there are segments.
        numbers: "grid" [axes,2,L] and "token_types" [2,L], as the arguments of a call, one of them or both.
    """

    tokens: np.ndarray
    mask: np.ndarray
    numbers: Dict[str, np.ndarray]


@dataclass(frozen=True)
class Expected:
    """What an artefact must give.

    Args:
        columns: which of the numbers of an output are compared [V].
        cases: by start position, for the larger of BATCHES.
        beside: by the name of a cell, what is fed there and the expected outputs [2,L,V]: where the encoding has coordinates or the model segments.
        filled: tokens that fill a cache [1,n], or [1,n,E], and the expected outputs of the last of them [1,m,V]; none for models without a cache.
    """

    columns: np.ndarray
    cases: Dict[int, Case]
    beside: Dict[str, Tuple[Beside, np.ndarray]]
    filled: Optional[Tuple[np.ndarray, np.ndarray]]


def starts(manifest: Manifest) -> List[int]:
    """Positions that sequences start from: the first, one further on unless the model is large, and the last that leaves room."""
    if manifest.signature == "mask":
        return [0]  # positions are counted from the mask
    last = manifest.max_positions - length_of(manifest)
    return sorted({0, last} if is_large(manifest) else {0, min(1000, last), last})


def is_large(manifest: Manifest) -> bool:
    """Whether the grid is thinner: shorter sequences, two starts, a single row at the first of them alone, a full cache of fewer tokens."""
    return manifest.step_weights >= LARGE


def fill_length(manifest: Manifest) -> int:
    """Tokens of the cell that fills a cache, and slots of that cache."""
    return min(manifest.max_positions, LONGEST, max(WORK // max(manifest.step_weights, 1), SHORT))


def length_of(manifest: Manifest) -> int:
    """Tokens of a sequence L."""
    return min(LENGTH // 2 if is_large(manifest) else LENGTH, manifest.max_positions)


def case_inputs(manifest: Manifest) -> Tuple[np.ndarray, np.ndarray, int]:
    """Tokens of a case, the same with another ending, and where it begins."""
    length, rows = length_of(manifest), max(BATCHES)
    fork_at, tokens = length // 2, inputs(manifest, (rows, length), "tokens")
    other = tokens.copy()
    other[:, fork_at:] = inputs(manifest, (rows, length - fork_at), "another ending")
    return tokens, other, fork_at


def beside_inputs(manifest: Manifest) -> Dict[str, Beside]:
    """What is fed in the cells of coordinates and of segments; where a model has both, its segments stand beside coordinates."""
    length, cells = length_of(manifest), {}
    tokens, whole = inputs(manifest, (2, length), "tokens with numbers beside"), np.ones((2, length), np.int64)
    given = {"grid": numbers((manifest.axes, 2, length), "coordinates", manifest.max_positions)} if manifest.axes else {}
    if given:
        cells["coordinates"] = Beside(tokens, whole, given)
    if manifest.segments:
        padded = whole.copy()
        padded[0, : min(SEGMENT_PADDING, length - 1)] = 0
        cells["segments"] = Beside(tokens, padded, {**given, "token_types": numbers((2, length), "segments", manifest.segments)})
    return cells


def fill_inputs(manifest: Manifest) -> np.ndarray:
    """Tokens that fill a cache [1,n]."""
    return inputs(manifest, (1, fill_length(manifest)), "tokens to fill a cache")


def encoder_rows(manifest: Manifest, rows: int) -> Optional[List[np.ndarray]]:
    """What an encoder gave for each row [q,N], each shorter than the one before, in the artefact's dtype; None where the model reads none."""
    if not manifest.encoder:
        return None
    numbers_of_token = sum(int(value.axes[1]) * int(value.axes[3]) for value in manifest.encoder[1:])
    made = uniform((rows, ENCODED, numbers_of_token), "keys and values of an encoder").astype(manifest.dtype)
    return [row[: ENCODED - 3 * index] for index, row in enumerate(made)]


def fill_chunk(manifest: Manifest) -> int:
    """How many of them are fed at a time: fewer where the graph gives the outputs of all of them."""
    return CHUNK if manifest.input("logits_index") else max(1, min(CHUNK, WIDEST // int(manifest.outputs[0].axes[-1])))


def inputs(manifest: Manifest, shape: Tuple[int, ...], name: str) -> np.ndarray:
    """Tokens, or hidden states of variance 1, that follow from a name alone, on every machine and in every version of numpy."""
    vocabulary = manifest.vocabulary
    if vocabulary:
        return numbers(shape, name, vocabulary)
    return uniform((*shape, int(manifest.inputs[0].axes[-1])), name).astype(manifest.inputs[0].dtype)


def uniform(shape: Tuple[int, ...], name: str) -> np.ndarray:
    """Numbers of variance 1, float64, that follow from a name."""
    return ((_bits(shape, name) + 0.5) / 2**31 - 1) * math.sqrt(3)


def numbers(shape: Tuple[int, ...], name: str, limit: int) -> np.ndarray:
    """Whole numbers 0 .. limit - 1, int64, that follow from a name."""
    return (_bits(shape, name).astype(np.int64) * limit) >> 32


def rounded_up(error: float) -> float:
    """An error rounded up to two digits, by up to a tenth, since a certificate states a bound; FAILED where it is not finite."""
    if not math.isfinite(error):
        return FAILED
    return float(f"{1.05 * error:.1e}")


def _bits(shape: Tuple[int, ...], name: str) -> np.ndarray:
    count = math.prod(shape)
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(4 * count), "<u4").reshape(shape)


def where(session: Session) -> str:
    """The processor or GPU, and the library that runs the graph."""
    library = providers.library(session.provider, session.manifest)
    found = f"{_gpu() if session.provider == 'cuda' else processor()}, {library}"
    for name in (library, f"{library}-gpu"):
        try:
            return f"{found} {metadata.version(name).partition('+')[0]}"
        except metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """Name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # a system without it
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _gpu() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "GPU"
    said = subprocess.run([program, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return said.stdout.strip().partition("\n")[0] or "GPU"
