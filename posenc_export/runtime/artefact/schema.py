"""The fields of posenc.json. msgspec checks them when a manifest is read."""

import hashlib
import json
import math
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from posenc_export.runtime.artefact import records
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS
from posenc_export.runtime.artefact.records import MOST, Axes, Axis, DType, Name

SCHEMA = 4
# Version of the names, dtypes, axes and meanings of graph inputs, outputs and states
# (graph_inputs.py, docs/runtimes/README.md), which other programs feed. A new input
# that has no default value, or another meaning of one, needs the next number. Graphs without input
# window_start have the first version.
FIRST_INTERFACE, INTERFACE = 1, 2
MOST_PROOFS = 64


class Target(NamedTuple):
    """What a target writes: its graph, its caches, and the formats of numbers that it supports."""

    graph: str  # description of the graph, in one line
    cache: str  # description of the caches, in one line
    layout: dict[str, str]  # as in the manifest, by signature
    file: str = "model.onnx"
    torch: bool = False  # whether torch runs it
    grows: bool = False  # whether caches grow; otherwise they are written in place
    fused: bool = False  # whether attention can be one operator, which is also tested alone
    compact: bool = False  # whether caches of windows have an axis named as that of others
    windows: bool = False  # whether caches can hold only the last tokens of a window
    # capacity_bucket, continuation_rows, contiguous: as in the manifest, unless the graph differs
    capacity_bucket: int = 0
    continuation_rows: int = 0
    contiguous: bool = False
    dtypes: tuple[str, ...] = ("float32", "float16")  # of activations, the default first
    formats: tuple[str, ...] = ()  # of weights, with activations in `few_bits_dtypes`

    @property
    def few_bits_dtypes(self) -> tuple[str, ...]:
        """Dtypes of activations beside weights and caches of few bits."""
        return ("float32",) if "float32" in self.dtypes else self.dtypes


ROWS = {"positions": "rows", "mask": "columns"}
FORMATS = ("int8", "int8-32", "int4", "int4-128")
# Graphs of torch take the first slots of larger memory.
_OF_TORCH: Any = {"capacity_bucket": 64, "torch": True, "dtypes": ("float32",)}
_WRITTEN = "tensors written in place, cost of the valid length"
_BY_LENGTH = "fixed capacity, in place, cost of the valid length"
TARGETS = {
    "onnx": Target(
        "ai.onnx operators, opset 23",
        "grows: past in, present out",
        {"positions": "columns", "mask": "columns"},
        grows=True,
        formats=FORMATS,
    ),
    "onnx-static": Target(
        "ai.onnx operators, opset 24 (23 without caches)",
        "fixed capacity, in place, grown in buckets",
        ROWS,
        windows=True,
        # Small, because the cost of standard operators depends on the capacity instead of the
        # number of valid slots.
        capacity_bucket=256,
        formats=FORMATS,
    ),
    "ort": Target(
        "com.microsoft fused operators where exact",
        _BY_LENGTH,
        ROWS,
        fused=True,
        compact=True,
        windows=True,
        contiguous=True,
        continuation_rows=1,
        formats=(*FORMATS, "keep", "mixed"),
    ),
    "ort-native": Target(
        "as ort, with the attention of posenc-export-kernels",
        _BY_LENGTH,
        {"positions": "rows"},
        fused=True,
        compact=True,
        windows=True,
        contiguous=True,
        dtypes=("float32",),
        formats=(*FORMATS, "keep", "mixed"),
    ),
    "torchscript": Target("scripted and frozen module", _WRITTEN, ROWS, "model.pt", **_OF_TORCH),
    "pt2": Target("torch.export program", _WRITTEN, ROWS, "model.pt2", **_OF_TORCH),
    "ort-cuda": Target(
        "as ort, in half precision, for the CUDA provider",
        "fixed capacity on the device, in place",
        # No "mask": GroupQueryAttention reads lengths on the host, where lengths computed on the
        # device are 0.
        {"positions": "rows"},
        fused=True,
        continuation_rows=1,
        contiguous=True,
        dtypes=("float16", "bfloat16"),  # GroupQueryAttention has no float32 kernel for CUDA
        formats=(*FORMATS, "keep"),
    ),
}
# Fields added to the schema later: omitted if empty, so that older digests stay valid
OMITTED_IF_EMPTY = (
    "cache", "cached_keys", "calibration", "constants", "coordinate_range", "deviation",
    "encoder", "encodings", "formats", "generation", "interface", "packages", "places", "quality",
    "start_ids", "versions", "weights",
)  # fmt: skip


class Value(Struct, frozen=True, forbid_unknown_fields=True):
    """A graph input or output."""

    name: Name  # name in the graph
    dtype: DType  # name of the numpy dtype
    axes: Axes  # size or symbolic name of each axis

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Sizes of one token of an input [B,S,*]: none for ids, (E,) for activations."""
        return self.axes[2:]  # type: ignore[return-value]


class State(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor kept between calls: output `present` of a call is input `past` of the next."""

    past: Name  # names of the graph input and output
    present: Name
    dtype: DType
    # Size or symbolic name of each axis; the first is the batch.
    axes: Annotated[tuple[Axis, ...], Meta(min_length=1, max_length=8)]
    # "append" if it grows along `axis`, "in_place" if it has a fixed capacity along it and one
    # buffer, "replace" if each call replaces it.
    update: Annotated[str, Meta(pattern=r"^(append|in_place|replace)\Z")]
    axis: Annotated[int, Meta(ge=0, le=7)]  # that of cache slots; 0 for "replace"
    fill: Annotated[int, Meta(ge=-1, le=0)] = 0  # value of slots that were never written
    # Whether the graph reads slots past a row's length; they must hold `fill`.
    reads_hidden: bool = True
    # Number of last tokens that a query reads, with its own; the cache may then begin at a later
    # token than the first, which input `window_start` states. 0 for a cache of all tokens.
    window: Annotated[int, Meta(ge=0, le=2**31)] = 0

    @property
    def grows(self) -> bool:
        """Whether each call appends slots."""
        return self.update == "append"

    @property
    def in_place(self) -> bool:
        """Whether calls write slots of one buffer."""
        return self.update == "in_place"

    @property
    def replaced(self) -> bool:
        """Whether each call replaces it."""
        return self.update == "replace"

    @property
    def holds_positions(self) -> bool:
        """Whether it holds the position of the token in each slot."""
        return self.past == "past_positions"


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """Description of an artefact.

    Args:
        kind: "decoder" (input_ids to logits), "encoder" (input_ids to last_hidden_state, with
            caches if it is a decoder without its head; to encoder_key_values if a decoder reads it;
            with segments also token_type_ids), "block" (hidden_states to output) or "module" (a
            module that was read as it is, input_ids or hidden_states to logits or output).
        target: one of TARGETS; "eager" for a live module, which has no file.
        signature: "positions" (position_ids, -1 for padding) or "mask" (attention_mask, from which
            the graph counts positions).
        dtype: "float32", "float16" or "bfloat16", dtype of activations and caches. numpy has no
            bfloat16: hidden states and outputs of such a graph are float32.
        layout: cache slots of a row's tokens: "rows" (each row fills its own first slots) or
            "columns" (all rows advance together).
        config: description of the model.
        inputs, outputs: graph inputs and outputs without the states. A second output is the
            readout, such as sentence_embedding.
        states: tensors that are kept between calls.
        max_positions: the range of positions is 0 .. max_positions - 1.
        capacity_bucket: in-place caches have a multiple of this number of slots; 0 allocates the
            whole range at once, for graphs whose cost does not depend on the capacity.
        continuation_rows: largest number of rows in a call with several new tokens on a filled
            cache; 0 for no limit.
        contiguous: whether the positions of a row must be consecutive.
        axes: number of coordinates of a token besides its position; if above 0, position_ids is
            [1+axes,B,S] with the position first.
        coordinate_range: number of values of a coordinate that is no place in the sequence, such as
            an edge of a box, and 0 if it is not given; 0 for the range of positions, which are the
            coordinates of a token that is given none.
        chunk: default number of tokens of a row to feed at a time; limits a bias to [H,chunk,T].
        step_weights: number of weights that one new token reads, without tables of encodings and
            with one row of the token table.
        stop_ids, start_ids: token ids that end a text; first ids of a decoder with an encoder.
        generation: tokens that `generate` must not or must choose, or None.
        encoder: inputs of a decoder that reads an encoder, given once per row:
            encoder_attention_mask, then a key and a value for each layer that reads it.
        opset, operators: opset by domain, number of nodes by operator.
        interface: version of the graph's inputs, outputs and states (INTERFACE); 0 in artefacts of
            earlier versions, which do not state it.
        source: how to build the same weights again: {"preset": name} or {"seed": number};
            {"checkpoint": name} for a name only; empty for a user's own model.
        weights: format of weights of few bits; None if all weights have `dtype`.
        formats: format of each weight of few bits, by name of the parameter, if the format of
            `weights` is "mixed"; otherwise empty.
        cache: name of CACHE_FORMATS if keys and values are cached in it, otherwise empty.
        calibration: data used to round weights and to compute the scales of caches, or None.
        quality: loss against the float32 module; None if nothing is rounded or verified.
        deviation, cached_keys, encodings, versions: of earlier versions; not used.
        packages: origin of each encoding of another package, by name. Needed to build the model.
        places: what layers and encodings declare of positions; None in artefacts of earlier
            versions. A module that was read declares what its layers see alone.
        constants: sha256 of each constant of an ONNX graph by name, and of its nodes
            (runtime/verification/constants.py); empty if it was not verified at export.
        files: digest and size of each file, by name.
        reference: expected outputs stored in the artefact, or None.
        certificate: errors measured against the module, or None.
        proofs: errors measured against the reference, one per machine and provider, newest last.
    """

    kind: Annotated[str, Meta(pattern=r"^(decoder|encoder|block|module)\Z")]
    target: Annotated[str, Meta(pattern=rf"^({'|'.join(TARGETS)})\Z")]
    signature: Annotated[str, Meta(pattern=r"^(positions|mask)\Z")]
    dtype: records.Real
    layout: Annotated[str, Meta(pattern=r"^(rows|columns)\Z")]
    config: dict[str, Any]
    inputs: Annotated[list[Value], Meta(min_length=1, max_length=16)]
    outputs: Annotated[list[Value], Meta(min_length=1, max_length=2)]
    states: Annotated[list[State], Meta(max_length=MOST)]
    max_positions: Annotated[int, Meta(ge=1, le=2**53)]
    capacity_bucket: records.Size
    continuation_rows: records.Size
    contiguous: bool
    cached_keys: dict[str, Any] = {}
    axes: Annotated[int, Meta(ge=0, le=8)] = 0
    coordinate_range: records.Size = 0
    chunk: records.AtLeastOne = 256
    step_weights: records.Bytes = 0
    stop_ids: records.FewIds = []
    start_ids: records.FewIds = []
    generation: records.Generation | None = None
    encoder: Annotated[list[Value], Meta(max_length=MOST)] = []
    opset: records.Counts = {}
    operators: records.Counts = {}
    versions: Annotated[dict[records.Text, records.Text], Meta(max_length=64)] = {}
    interface: Annotated[int, Meta(ge=0, le=INTERFACE)] = 0
    source: Annotated[dict[records.Text, records.Text | int], Meta(max_length=8)] = {}
    weights: records.Weights | None = None
    formats: Annotated[
        dict[Name, Annotated[str, Meta(pattern=r"^(int8-32|int4|int4-128)\Z")]],
        Meta(max_length=MOST),
    ] = {}
    cache: Annotated[str, Meta(pattern=rf"^({'|'.join(CACHE_FORMATS)})?\Z")] = ""
    calibration: records.Calibration | None = None
    quality: records.Quality | None = None
    deviation: dict[str, float] = {}
    encodings: dict[str, Any] = {}
    packages: Annotated[dict[records.Text, records.Package], Meta(max_length=64)] = {}
    places: records.Places | None = None
    constants: Annotated[dict[records.Text, records.Sha256], Meta(max_length=65536)] = {}
    files: Annotated[dict[records.FileName, records.File], Meta(max_length=MOST)] = {}
    reference: records.Reference | None = None
    certificate: dict[str, Any] | None = None
    proofs: Annotated[list[dict[str, Any]], Meta(max_length=MOST_PROOFS)] = []
    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA

    def input(self, name: str) -> Value | None:
        """Return the graph input of this name, or None."""
        return next((value for value in self.inputs if value.name == name), None)

    @property
    def by_columns(self) -> bool:
        """Whether all rows advance together through the columns of the caches."""
        return self.layout == "columns"

    @property
    def in_place(self) -> bool:
        """Whether a cache has a fixed capacity."""
        return any(state.in_place for state in self.states)

    @property
    def in_torch(self) -> bool:
        """Whether torch runs the graph, or a live module."""
        return self.target not in TARGETS or TARGETS[self.target].torch

    @property
    def stores_positions(self) -> bool:
        """Whether the first state holds the positions of cached tokens."""
        return bool(self.states) and self.states[0].holds_positions

    @property
    def slot_bytes(self) -> int:
        """Bytes of the caches of one row for one token."""
        cached = [state for state in self.states if not state.replaced]
        sizes = [math.prod(axis for axis in s.axes if isinstance(axis, int)) for s in cached]
        return sum(n * records.BYTES[s.dtype] for n, s in zip(sizes, cached, strict=True))

    @property
    def passed_dtype(self) -> str:
        """The numpy dtype of hidden states, encoder outputs and outputs."""
        return passed(self.dtype)

    @property
    def vocabulary(self) -> int:
        """Number of token ids; 0 for a model that reads hidden states."""
        return int(self.config.get("tokens", {}).get("vocabulary", 0))

    @property
    def decodes(self) -> bool:
        """Whether the output is logits for each token id, from which text is generated."""
        of_module = self.kind == "module" and self.config.get("causal", True) is True
        return self.kind == "decoder" or (of_module and self.outputs[0].axes[-1] == self.vocabulary)

    @property
    def encodes(self) -> bool:
        """Whether each call is a whole sequence of tokens, in both directions."""
        of_module = self.kind == "module" and self.config.get("causal") is False
        return self.kind == "encoder" or (of_module and self.vocabulary > 0)

    @property
    def segments(self) -> int:
        """Number of token types; 0 for a model without segments."""
        return int(self.config.get("tokens", {}).get("segments", 0))

    def replace(self, **changes: Any) -> "Manifest":
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Convert to dicts, lists, strings and numbers."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        measured = (plain["quality"] or {}).items()
        plain["quality"] = {name: value for name, value in measured if value is not None}
        omitted = [(plain, name) for name in OMITTED_IF_EMPTY]
        for part, name in omitted + [(state, "window") for state in plain["states"]]:
            if not part[name]:
                del part[name]
        return plain

    @property
    def digest(self) -> str:
        """sha256 of all fields, with the digests of all files, except certificate and proofs."""
        content = self.to_json()
        return digest_of({key: content[key] for key in content.keys() - {"certificate", "proofs"}})


def passed(dtype: str) -> str:
    """Return the numpy dtype in which activations of a dtype enter and leave a graph."""
    return "float32" if dtype == "bfloat16" else dtype


def digest_of(content: dict[str, Any]) -> str:
    """Return the sha256 of content as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
