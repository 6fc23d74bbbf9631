"""The fields of posenc.json with types, choices and ranges. msgspec checks them when a manifest
is read, not when one is built in Python.
"""

import hashlib
import json
import math
from typing import Annotated, Any, Dict, List, Optional, Tuple, Union

import msgspec
from msgspec import Meta, Struct

from posenc_export.runtime.artefact.machine import Compiled

SCHEMA = 4
# Version of the names, dtypes, axes and meanings of graph inputs, outputs and states (graph_inputs.py,
# meanings.py, docs/runtimes/README.md), which other programs feed. A new input that has no default value, or
# another meaning of one, needs the next number.
INTERFACE = 1
# Patterns end in \Z, since $ also matches before a final line break.
LARGEST = 2**31 - 1  # largest size of a tensor along one axis
MOST_PROOFS = 64
MOST = 4096  # largest number of values, states or files of one graph
# Fields added to the schema later: omitted if empty, so that older digests stay valid
OMITTED_IF_EMPTY = (
    "cache", "calibration", "compiled", "constants", "deviation", "encoder", "encodings",
    "formats", "generation", "interface", "packages", "quality", "start_ids", "weights",
)  # fmt: skip

Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*\Z", max_length=128)]
FileName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=128)
]  # without folders, and valid on every operating system
Text = Annotated[str, Meta(max_length=128)]
DType = Annotated[str, Meta(pattern=r"^(bfloat16|float16|float32|int8|int32|int64)\Z")]
Real = Annotated[str, Meta(pattern=r"^(bfloat16|float16|float32)\Z")]
Size = Annotated[int, Meta(ge=0, le=LARGEST)]
AtLeastOne = Annotated[int, Meta(ge=1, le=LARGEST)]
Axis = Union[AtLeastOne, Annotated[str, Meta(pattern=r"^[a-z][a-z_]*\Z", max_length=64)]]
Axes = Annotated[Tuple[Axis, ...], Meta(max_length=8)]
Finite = Annotated[float, Meta(ge=0.0, le=1e300)]
Ids = Annotated[Tuple[Size, ...], Meta(max_length=MOST)]
Counts = Annotated[Dict[Text, Size], Meta(max_length=MOST)]


class Value(Struct, frozen=True, forbid_unknown_fields=True):
    """A graph input or output."""

    name: Name  # name in the graph
    dtype: DType  # name of the numpy dtype
    axes: Axes  # size or symbolic name of each axis

    @property
    def token_shape(self) -> Tuple[int, ...]:
        """Sizes of one token of an input [B,S,*]: none for ids, (E,) for activations."""
        return tuple(int(axis) for axis in self.axes[2:])


class State(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that is kept between calls: output `present` of a call is input `past` of the next.

    Its update rule is "append" if it grows along `axis`, "in_place" if it has a fixed capacity
    along `axis` and one buffer, "replace" if each call replaces it.
    """

    past: Name  # name of the graph input
    present: Name  # name of the graph output
    dtype: DType
    axes: Annotated[
        Tuple[Axis, ...], Meta(min_length=1, max_length=8)
    ]  # size or symbolic name of each axis; the first is the batch
    update: Annotated[str, Meta(pattern=r"^(append|in_place|replace)\Z")]
    axis: Annotated[
        int, Meta(ge=0, le=7)
    ]  # index of the axis that counts cache slots; 0 for "replace"
    fill: Annotated[int, Meta(ge=-1, le=0)] = 0  # value of slots that were never written
    reads_hidden: bool = (
        True  # whether the graph reads slots past a row's length; these must then hold `fill`
    )


class File(Struct, frozen=True, forbid_unknown_fields=True):
    """Digest and size of a file in bytes."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    bytes: Annotated[int, Meta(ge=0, le=2**53)]


class Reference(Struct, frozen=True, forbid_unknown_fields=True):
    """Expected outputs stored in the artefact (runtime/verification/reference.py)."""

    columns: AtLeastOne  # number of stored numbers of each output
    # Bound of the errors of cells that are compared with these outputs (numerics.cell_error).
    tolerance: Finite
    filled: bool  # whether outputs of the long sequence are stored
    # Rounding error of one product, relative to it, if the artefact rounds activations
    # (numerics.rounding_tolerance); otherwise 0.
    noise: Finite = 0.0
    # Bound of the errors of the float32 form (verification/float32_form.py); 0 for an artefact
    # without one, and for those of earlier versions.
    float32: Finite = 0.0
    edges: Annotated[
        Dict[
            Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.,:()+^? -]{1,64}\Z")],
            Annotated[int, Meta(ge=0, le=2**53)],
        ],
        Meta(max_length=256),
    ] = msgspec.field(
        default_factory=dict
    )  # tokens of the long sequence at which the computation changes, by name


class Package(Struct, frozen=True, forbid_unknown_fields=True):
    """The origin of an encoding that is not part of this package."""

    name: Text  # name of the distribution, or of the module if it belongs to no distribution
    version: Text  # version of the distribution; empty if there is none


class Quality(Struct, frozen=True, forbid_unknown_fields=True):
    """What an artefact that rounds weights, activations or caches loses against the float32
    module. Figures of text are 0 for inputs that are no text.
    """

    inputs: Annotated[
        str,
        Meta(
            pattern=r"^(text|held-out calibration text|text of the package|random tokens|random "
            r"numbers)\Z"
        ),
    ]
    # Root mean square of the differences of outputs, relative to the root mean square of the
    # module's outputs.
    error: Finite
    agreement: Annotated[
        float, Meta(ge=0.0, le=1.0)
    ]  # fraction of tokens with the same largest logit, 0 .. 1; 0 for models without logits
    tokens: AtLeastOne  # number of compared tokens
    # Worst error of the grid for the same rounded weights computed in float32, without rounding of
    # activations and caches.
    exact: Finite
    exact_tolerance: Finite  # bound of `exact`
    perplexity: Finite = 0.0  # exponential of the mean cross-entropy of the next token
    float32_perplexity: Finite = 0.0  # of the float32 module
    # Cross-entropy of the next token in bits, divided by the mean length of a token in bytes.
    bits_per_byte: Finite = 0.0
    float32_bits_per_byte: Finite = 0.0  # of the float32 module
    sha256: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""  # digest of the text

    @property
    def ratio(self) -> float:
        """Perplexity over that of the float32 module; 0 without text."""
        return self.perplexity / self.float32_perplexity if self.float32_perplexity else 0.0


class Numbers(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the trained numbers of an encoding are in a file: little-endian, in row-major order."""

    file: FileName
    offset: Annotated[int, Meta(ge=0, le=2**53)]  # byte in the file
    dtype: Annotated[
        str, Meta(pattern=r"^(bool|bfloat16|float(16|32|64)|u?int(8|16|32|64))\Z")
    ]  # name of the torch dtype
    shape: Annotated[Tuple[Size, ...], Meta(max_length=8)]
    transposed: bool = (
        False  # whether the file has the transpose, as graphs hold matrices of products
    )

    @property
    def bytes(self) -> int:
        """Number of bytes in the file."""
        bits = int("".join(filter(str.isdigit, self.dtype)) or 8)  # of bool: 8
        return math.prod(self.shape) * bits // 8


class Weights(Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of few bits."""

    format: Annotated[
        str, Meta(pattern=r"^(int8|int8-32|int4|int4-128|keep|mixed)\Z")
    ]  # format as `posenc export --weights` takes it; "mixed" for --size
    matrices: Size = 0  # number of constants in that format; all others are float32
    activations: Annotated[str, Meta(pattern=r"^(int8|float32)\Z")] = (
        "int8"  # whether inputs of products with these weights are rounded to 8 bits
    )


class Calibration(Struct, frozen=True, forbid_unknown_fields=True):
    """Calibration data of the export."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # digest of the file
    tokens: AtLeastOne  # number of tokens read


class Generation(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which tokens generation_config.json of the checkpoint forbids or forces, and the first
    tokens of Whisper.
    """

    suppressed: Ids = ()  # ids that are never chosen
    suppressed_first: Ids = ()  # ids that are not chosen as the first token that is free
    forced_first: Optional[Size] = None  # id that is chosen after a prompt of one token
    forced: Annotated[
        Tuple[Optional[Size], ...], Meta(max_length=64)
    ] = ()  # ids after the start token; None in place of the language of the speech
    languages: Annotated[
        Dict[Text, Size], Meta(max_length=1024)
    ] = {}  # id of each language, by its token
    tasks: Annotated[Dict[Text, Size], Meta(max_length=64)] = {}  # id of each task
    no_timestamps: Optional[Size] = None  # id after which no times are generated
    language: Text = ""  # default language; empty to detect it
    task: Text = ""  # default task


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """Description of an artefact.

    Args:
        kind: "decoder" (input_ids to logits), "encoder" (input_ids or input_features to
            last_hidden_state or, if a decoder reads it, encoder_key_values; with segments also
            token_type_ids), "block" (hidden_states to output) or "module" (a user's own module,
            input_ids or hidden_states to output).
        target: "onnx", "onnx-static", "ort", "ort-cuda", "torchscript", "pt2" or "aotinductor";
            "eager" for a live module, which has no file.
        signature: "positions" (position_ids, -1 for padding) or "mask" (attention_mask, from which
            the graph counts positions).
        dtype: "float32", "float16" or "bfloat16", dtype of activations and caches. numpy has no
            bfloat16: hidden states and outputs of such a graph are float32.
        layout: cache slots of a row's tokens: "rows" (each row fills its own first slots) or
            "columns" (all rows advance together).
        config: description of the model.
        inputs, outputs: graph inputs and outputs without the states. The second output, if there is
            one, is the readout of an encoder, such as sentence_embedding.
        states: tensors that are kept between calls.
        max_positions: the range of positions is 0 .. max_positions - 1.
        capacity_bucket: in-place caches are allocated in multiples of this number of slots; 0
            allocates the whole range at once, for graphs whose cost does not depend on the
            capacity.
        continuation_rows: largest number of rows in a call with several new tokens on a filled
            cache; 0 for no limit.
        contiguous: whether the positions of a row must be consecutive.
        axes: number of coordinates of a token besides its position; if above 0, position_ids is
            [1+axes,B,S] with the position first.
        chunk: default number of tokens of a row to feed at a time; limits a bias to [H,chunk,T].
        step_weights: number of weights that one new token reads, without tables of encodings and
            with one row of the token table.
        stop_ids: token ids that end a text.
        start_ids: first token ids of a decoder that reads an encoder.
        generation: tokens that `generate` must not or must choose; None for no such tokens.
        encoder: graph inputs of a decoder that reads an encoder, given once per row:
            encoder_attention_mask, then a key and a value for each layer that reads it.
        opset: version by domain.
        operators: number of nodes by operator.
        versions: library versions of the export.
        interface: version of the graph's inputs, outputs and states (INTERFACE); 0 in artefacts of
            earlier versions, which do not state it.
        source: how to build the same weights again: {"preset": name} or {"seed": number};
            {"checkpoint": name} for a name only; empty for a user's own model.
        weights: format of weights of few bits; None if all weights have `dtype`.
        formats: format of each weight of few bits, by name of the parameter, if the format of
            `weights` is "mixed"; otherwise empty.
        cache: "int8" if cached keys and values are stored in 8 bits; empty if they have `dtype`.
        calibration: calibration data used to round weights and to compute the scales of caches;
            None for none.
        quality: loss against the float32 module; None if the artefact was not verified or rounds
            nothing.
        deviation: figures of earlier versions in place of `quality`; not used.
        compiled: what the native code of target aotinductor was compiled from and for; None for
            other targets.
        encodings: where the trained numbers of each encoding are, by name of the parameter in the
            block or stack (docs/commands.md). Needed for pictures, not to run the artefact.
        packages: origin of each encoding that is not part of this package, by name. Needed to build
            the model again, not to run it.
        constants: sha256 of the numbers and attributes of each node of an ONNX graph, by its name
            (runtime/verification/constants.py). Empty for other graphs and in artefacts that were
            not verified when they were exported.
        files: digest and size of each file, by name.
        reference: expected outputs stored in the artefact, or None.
        certificate: errors measured against the module, or None.
        proofs: errors measured against the reference, one per machine and provider, the newest
            last.
    """

    kind: Annotated[str, Meta(pattern=r"^(decoder|encoder|block|module)\Z")]
    target: Annotated[
        str, Meta(pattern=r"^(onnx|onnx-static|ort|ort-cuda|torchscript|pt2|aotinductor)\Z")
    ]
    signature: Annotated[str, Meta(pattern=r"^(positions|mask)\Z")]
    dtype: Real
    layout: Annotated[str, Meta(pattern=r"^(rows|columns)\Z")]
    config: Dict[str, Any]
    inputs: Annotated[List[Value], Meta(min_length=1, max_length=16)]
    outputs: Annotated[List[Value], Meta(min_length=1, max_length=2)]
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
    generation: Optional[Generation] = None
    encoder: Annotated[List[Value], Meta(max_length=MOST)] = msgspec.field(default_factory=list)
    opset: Counts = msgspec.field(default_factory=dict)
    operators: Counts = msgspec.field(default_factory=dict)
    versions: Annotated[Dict[Text, Text], Meta(max_length=64)] = msgspec.field(default_factory=dict)
    interface: Annotated[int, Meta(ge=0, le=INTERFACE)] = 0
    source: Annotated[Dict[Text, Union[Text, int]], Meta(max_length=8)] = msgspec.field(
        default_factory=dict
    )
    weights: Optional[Weights] = None
    formats: Annotated[
        Dict[Name, Annotated[str, Meta(pattern=r"^(int8-32|int4|int4-128)\Z")]],
        Meta(max_length=MOST),
    ] = msgspec.field(default_factory=dict)
    cache: Annotated[str, Meta(pattern=r"^(int8)?\Z")] = ""
    calibration: Optional[Calibration] = None
    quality: Optional[Quality] = None
    deviation: Dict[str, float] = msgspec.field(default_factory=dict)
    compiled: Optional[Compiled] = None
    encodings: Annotated[Dict[Name, Numbers], Meta(max_length=MOST)] = msgspec.field(
        default_factory=dict
    )
    packages: Annotated[Dict[Text, Package], Meta(max_length=64)] = msgspec.field(
        default_factory=dict
    )
    constants: Annotated[
        Dict[Text, Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]], Meta(max_length=65536)
    ] = msgspec.field(default_factory=dict)
    files: Annotated[Dict[FileName, File], Meta(max_length=MOST)] = msgspec.field(
        default_factory=dict
    )
    reference: Optional[Reference] = None
    certificate: Optional[Dict[str, Any]] = None
    proofs: Annotated[List[Dict[str, Any]], Meta(max_length=MOST_PROOFS)] = msgspec.field(
        default_factory=list
    )
    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA

    def input(self, name: str) -> Optional[Value]:
        """Return the graph input of this name, or None."""
        return next((value for value in self.inputs if value.name == name), None)

    @property
    def passed_dtype(self) -> str:
        """The numpy dtype of hidden states, encoder outputs and outputs."""
        return passed(self.dtype)

    @property
    def vocabulary(self) -> int:
        """Number of token ids; 0 for a model that reads hidden states."""
        return int(self.config.get("tokens", {}).get("vocabulary", 0))

    @property
    def segments(self) -> int:
        """Number of token types; 0 for a model without segments."""
        return int(self.config.get("tokens", {}).get("segments", 0))

    def replace(self, **changes: Any) -> "Manifest":
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def to_json(self) -> Dict[str, Any]:
        """Convert to dicts, lists, strings and numbers."""
        plain: Dict[str, Any] = msgspec.to_builtins(self)
        for name in OMITTED_IF_EMPTY:
            if not plain[name]:
                del plain[name]
        return plain

    @property
    def digest(self) -> str:
        """sha256 of all fields except certificate and proofs. It covers the digests of all
        files, so a user can compare it with one from a trusted source.
        """
        return digest_of(
            {
                key: value
                for key, value in self.to_json().items()
                if key not in ("certificate", "proofs")
            }
        )


def passed(dtype: str) -> str:
    """Return the numpy dtype in which numbers of a dtype of activations are passed to a graph
    and returned.
    """
    return "float32" if dtype == "bfloat16" else dtype


def digest_of(content: Dict[str, Any]) -> str:
    """Return the sha256 of content as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
