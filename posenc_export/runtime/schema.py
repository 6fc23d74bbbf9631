"""The fields of posenc.json: types, choices and ranges. msgspec checks them when a manifest is read, not when one is built in Python."""

import hashlib
import json
from typing import Annotated, Any, Dict, List, Optional, Tuple, TypedDict, Union

import msgspec
from msgspec import Meta, Struct

SCHEMA = 4
FAILED = 1e300  # the error of an output that holds NaN or infinity: JSON has no number for it
# Patterns end in \Z: a $ would let a line break pass.
LARGEST = 2**31 - 1  # sizes of tensors, in elements along one axis
MOST_PROOFS = 64
MOST = 4096  # values, states and files of one graph
# Fields of a manifest that came after others of the schema; left out where they are empty
LATER = ("cache", "calibration", "deviation", "encoder", "packages", "start_ids", "weights")

Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*\Z", max_length=128)]
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=128)]  # a name without folders that every system allows
Text = Annotated[str, Meta(max_length=128)]
DType = Annotated[str, Meta(pattern=r"^(float16|float32|int8|int32|int64)\Z")]
Real = Annotated[str, Meta(pattern=r"^(float16|float32)\Z")]
Size = Annotated[int, Meta(ge=0, le=LARGEST)]
AtLeastOne = Annotated[int, Meta(ge=1, le=LARGEST)]
Axis = Union[AtLeastOne, Annotated[str, Meta(pattern=r"^[a-z][a-z_]*\Z", max_length=64)]]
Axes = Annotated[Tuple[Axis, ...], Meta(max_length=8)]
Finite = Annotated[float, Meta(ge=0.0, le=1e300)]
Counts = Annotated[Dict[Text, Size], Meta(max_length=MOST)]


class Value(Struct, frozen=True, forbid_unknown_fields=True):
    """One graph input or output: name, numpy dtype name, axes as sizes or symbolic names."""

    name: Name
    dtype: DType
    axes: Axes


class State(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that outlives a call: output `present` is the next call's input `past`.

    Args:
        update: "append" grows along axis, "in_place" has a fixed capacity along axis and shares one buffer, "replace" is new each call.
        axes: B first; the one other that is a name, at `axis`, counts slots.
        fill: value of slots never written.
        reads_hidden: whether the graph reads slots beyond a row's length: hidden slots must then hold `fill`.
    """

    past: Name
    present: Name
    dtype: DType
    axes: Annotated[Tuple[Axis, ...], Meta(min_length=1, max_length=8)]
    update: Annotated[str, Meta(pattern=r"^(append|in_place|replace)\Z")]
    axis: Annotated[int, Meta(ge=0, le=7)]
    fill: Annotated[int, Meta(ge=-1, le=0)] = 0
    reads_hidden: bool = True


class File(Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a file: its digest and its size."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    bytes: Annotated[int, Meta(ge=0, le=2**53)]


class Certificate(Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured of an artefact, where, and against what.

    Args:
        provider: "cpu" or "cuda".
        machine: processor or GPU, and the library that ran the graph.
        cells: worst error by name of a cell of the grid.
        against: what the cells of the oracle were compared with.
    """

    passed: bool
    tolerance: Finite
    provider: Text
    machine: Annotated[str, Meta(max_length=256)]
    cells: Annotated[Dict[str, Finite], Meta(min_length=1, max_length=65536)]
    against: Text = ""


class Proof(TypedDict):
    """A certificate as `verify` gives it: the fields of Certificate."""

    passed: bool
    tolerance: float
    provider: str
    machine: str
    cells: Dict[str, float]


class Reference(Struct, frozen=True, forbid_unknown_fields=True):
    """Expected outputs that travel with the artefact (runtime/reference.py).

    Args:
        columns: how many numbers of each output are stored.
        tolerance: what errors stay within, relative to the largest output.
        filled: whether the outputs of a filled cache are among them.
    """

    columns: AtLeastOne
    tolerance: Finite
    filled: bool


class Package(Struct, frozen=True, forbid_unknown_fields=True):
    """Where an encoding from outside this package comes from.

    Args:
        name: of the distribution, or of the module where it belongs to none.
        version: of the distribution; empty for none.
    """

    name: Text
    version: Text


class Deviation(Struct, frozen=True, forbid_unknown_fields=True):
    """How far an artefact with weights or caches of few bits is from the float32 module, on the inputs of its reference.

    Args:
        error: root of the mean squared difference of outputs, relative to that of the module's outputs.
        bound: above which an export fails.
        agreement: share of tokens for which the largest logit is the same; 0 where there are no logits.
        tokens: how many were compared.
        exact: worst error of the grid for the same weights in float32: without the rounding of activations and caches.
        exact_tolerance: what that error stays within.
    """

    error: Finite
    bound: Finite
    agreement: Annotated[float, Meta(ge=0.0, le=1.0)]
    tokens: AtLeastOne
    exact: Finite
    exact_tolerance: Finite


class Weights(Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of few bits.

    Args:
        format: as `posenc export --weights` takes it.
        matrices: constants in that format; all others are float32.
    """

    format: Annotated[str, Meta(pattern=r"^(int8|int4|int4-128)\Z")]
    matrices: Size = 0


class Calibration(Struct, frozen=True, forbid_unknown_fields=True):
    """The sample of inputs that an export was given.

    Args:
        sha256: of the file.
        tokens: how many of it were read.
    """

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tokens: AtLeastOne


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """Description of an artefact.

    Args:
        kind: "decoder" (input_ids to logits), "encoder" (input_ids or input_features, and token_type_ids where there are segments, to last_hidden_state or, for a
            decoder, encoder_key_values), "block" (hidden_states to output) or "module" (input_ids or hidden_states to output), one of the user's own.
        target: "onnx", "onnx-static", "ort", "ort-cuda", "torchscript", "pt2"; of a live module, which has no file, "eager".
        signature: "positions" (position_ids, -1 padding) or "mask" (attention_mask, positions counted from it inside the graph).
        dtype: "float32" or "float16", of activations and caches.
        layout: where a row's tokens stand in the cache: "rows" (row b fills its own first slots) or "columns" (all rows advance together).
        max_positions: positions 0 .. max_positions - 1 are the range.
        capacity_bucket: in-place caches are sized in multiples of it; 0 for the whole range at once (a cost that does not follow capacity).
        continuation_rows: most rows a call of several new tokens on a filled cache may have; 0 for any.
        contiguous: positions of a row must follow each other without gaps.
        axes: coordinates of a token beside its place; where above 0, position_ids is [1+axes,B,S], the place first.
        chunk: tokens of a row fed at a time unless told; bounds a bias to [H,chunk,T].
        step_weights: weights that one new token reads; tables of encodings and all but one row of the token table are left out.
        stop_ids: token ids that end a text.
        start_ids: token ids that a decoder begins with which reads an encoder.
        encoder: graph inputs of a decoder that reads an encoder, given once for a row: encoder_attention_mask, then a key and a value for each layer that reads it.
        source: how to build the same weights again: {"preset": name} or {"seed": number}; empty for a model of the user's own.
        weights: their format where it has few bits; None for dtype.
        cache: "int8" where cached keys and values are bytes; empty for dtype.
        calibration: the sample by which weights were rounded and scales of caches chosen; None for none.
        deviation: from the float32 module, of an artefact with weights or caches of few bits that was verified; None for others.
        packages: encodings from outside this package, by name, and the package of each: what is needed to build the model again, and not to run it.
        files: file name to {"sha256", "bytes"}.
        reference: expected outputs beside the graph, or None.
        certificate: what was measured against the module, or None.
        proofs: what was measured against the reference, the newest last, one for each machine and provider.
    """

    kind: Annotated[str, Meta(pattern=r"^(decoder|encoder|block|module)\Z")]
    target: Annotated[str, Meta(pattern=r"^(onnx|onnx-static|ort|ort-cuda|torchscript|pt2)\Z")]
    signature: Annotated[str, Meta(pattern=r"^(positions|mask)\Z")]
    dtype: Real
    layout: Annotated[str, Meta(pattern=r"^(rows|columns)\Z")]
    config: Dict[str, Any]
    inputs: Annotated[List[Value], Meta(min_length=1, max_length=16)]
    outputs: Annotated[List[Value], Meta(min_length=1, max_length=1)]
    states: Annotated[List[State], Meta(max_length=MOST)]
    max_positions: Annotated[int, Meta(ge=1, le=2**53)]
    capacity_bucket: Size
    continuation_rows: Size
    contiguous: bool
    axes: Annotated[int, Meta(ge=0, le=8)] = 0
    chunk: AtLeastOne = 256
    step_weights: Annotated[int, Meta(ge=0, le=2**53)] = 0
    stop_ids: Annotated[List[Size], Meta(max_length=64)] = msgspec.field(default_factory=list)
    start_ids: Annotated[List[Size], Meta(max_length=64)] = msgspec.field(default_factory=list)
    encoder: Annotated[List[Value], Meta(max_length=MOST)] = msgspec.field(default_factory=list)
    opset: Counts = msgspec.field(default_factory=dict)
    operators: Counts = msgspec.field(default_factory=dict)
    versions: Annotated[Dict[Text, Text], Meta(max_length=64)] = msgspec.field(default_factory=dict)
    source: Annotated[Dict[Text, Union[Text, int]], Meta(max_length=8)] = msgspec.field(default_factory=dict)
    weights: Optional[Weights] = None
    cache: Annotated[str, Meta(pattern=r"^(int8)?\Z")] = ""
    calibration: Optional[Calibration] = None
    deviation: Optional[Deviation] = None
    packages: Annotated[Dict[Text, Package], Meta(max_length=64)] = msgspec.field(default_factory=dict)
    files: Annotated[Dict[FileName, File], Meta(max_length=MOST)] = msgspec.field(default_factory=dict)
    reference: Optional[Reference] = None
    certificate: Optional[Dict[str, Any]] = None
    proofs: Annotated[List[Dict[str, Any]], Meta(max_length=MOST_PROOFS)] = msgspec.field(default_factory=list)
    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA

    def input(self, name: str) -> Optional[Value]:
        return next((value for value in self.inputs if value.name == name), None)

    @property
    def vocabulary(self) -> int:
        """Number of token ids; 0 where hidden states are read."""
        return int(self.config.get("tokens", {}).get("vocabulary", 0))

    @property
    def segments(self) -> int:
        """Number of token types; 0 for none."""
        return int(self.config.get("tokens", {}).get("segments", 0))

    def replace(self, **changes: Any) -> "Manifest":
        """The same with other values of the fields that are named."""
        return msgspec.structs.replace(self, **changes)

    def to_json(self) -> Dict[str, Any]:
        """Dicts, lists, strings and numbers only."""
        plain: Dict[str, Any] = msgspec.to_builtins(self)
        for name in LATER:  # digests stay those of artefacts that were written without the field
            if not plain[name]:
                del plain[name]
        return plain

    @property
    def digest(self) -> str:
        """sha256 over all fields except certificate and proofs. File hashes are included, so that a user can compare it with a digest from another source."""
        return digest_of({key: value for key, value in self.to_json().items() if key not in ("certificate", "proofs")})


def shown(error: float) -> str:
    """An error in two digits; NaN for an output that was not finite."""
    return f"{error:.1e}" if error < FAILED else "NaN"


def digest_of(content: Dict[str, Any]) -> str:
    """sha256 of content as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
