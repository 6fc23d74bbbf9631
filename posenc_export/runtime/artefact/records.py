"""The records inside a manifest, and the types of its fields."""

from typing import Annotated

from msgspec import Meta, Struct

from posenc_export.shared.places import LONGEST

# Patterns end in \Z, since $ also matches before a final line break.
LARGEST = 2**31 - 1  # largest size of a tensor along one axis
MOST = 4096  # largest number of values, states or files of one graph
INPUTS = r"^(text|held-out calibration text|text of the package|random (tokens|numbers))\Z"

Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*\Z", max_length=128)]
# Without folders, and valid on every operating system.
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=128)]
Text = Annotated[str, Meta(max_length=128)]
DType = Annotated[str, Meta(pattern=r"^(bfloat16|float16|float32|int8|int32|int64)\Z")]
# Of a number
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "int32": 4, "int64": 8}
Real = Annotated[str, Meta(pattern=r"^(bfloat16|float16|float32)\Z")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Size = Annotated[int, Meta(ge=0, le=LARGEST)]
AtLeastOne = Annotated[int, Meta(ge=1, le=LARGEST)]
Bytes = Annotated[int, Meta(ge=0, le=2**53)]  # or another number that a float64 holds exactly
Axis = AtLeastOne | Annotated[str, Meta(pattern=r"^[a-z][a-z_]*\Z", max_length=64)]
Axes = Annotated[tuple[Axis, ...], Meta(max_length=8)]
Finite = Annotated[float, Meta(ge=0.0, le=1e300)]
Ids = Annotated[tuple[Size, ...], Meta(max_length=MOST)]
FewIds = Annotated[list[Size], Meta(max_length=64)]
Edge = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.,:()+^? -]{1,64}\Z")]
Rule = Annotated[str, Meta(max_length=LONGEST)]
Rules = Annotated[list[Rule], Meta(max_length=64)]
Counts = Annotated[dict[Text, Size], Meta(max_length=MOST)]


class File(Struct, frozen=True, forbid_unknown_fields=True):
    """Digest and size of a file in bytes."""

    sha256: Sha256
    bytes: Bytes


class Reference(Struct, frozen=True, forbid_unknown_fields=True):
    """Expected outputs stored in the artefact (runtime/verification/proof.py)."""

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
    # Tokens of the long sequence at which the computation changes, by name.
    edges: Annotated[dict[Edge, Bytes], Meta(max_length=256)] = {}


class Package(Struct, frozen=True, forbid_unknown_fields=True):
    """The origin of an encoding that is not part of this package."""

    name: Text  # name of the distribution, or of the module if it belongs to no distribution
    version: Text  # version of the distribution; empty if there is none


class Quality(Struct, frozen=True, forbid_unknown_fields=True):
    """What an artefact that rounds loses against the float32 module. None was not measured, for
    which earlier versions wrote 0.
    """

    inputs: Annotated[str, Meta(pattern=INPUTS)]
    # Root mean square of the differences of outputs, relative to that of the module's outputs.
    error: Finite
    tokens: AtLeastOne  # number of compared tokens
    # Worst error of the grid for the same rounded weights computed in float32, without rounding of
    # activations and caches.
    exact: Finite
    exact_tolerance: Finite  # bound of `exact`
    # Fraction of tokens after which the largest logit is that of float32. Earlier versions rounded
    # it to three digits.
    agreement: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    perplexity: Finite | None = None  # exponential of the mean cross-entropy of the next token
    float32_perplexity: Finite | None = None  # of the float32 module
    # Cross-entropy of the next token in bits, divided by the mean length of a token in bytes.
    bits_per_byte: Finite | None = None
    float32_bits_per_byte: Finite | None = None  # of the float32 module
    sha256: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""  # digest of the text

    @property
    def ratio(self) -> float | None:
        """Perplexity over that of the float32 module; None without text."""
        measured, plain = self.perplexity, self.float32_perplexity
        return measured / plain if measured and plain else None

    @property
    def first_tokens(self) -> str:
        """How many of the compared tokens the token of float32 follows; "" without logits."""
        same = round((self.agreement or 0) * self.tokens)
        return f"{same} of {self.tokens}" if self.agreement or self.sha256 else ""


class Weights(Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of few bits."""

    # As `posenc export --weights` takes it; "mixed" for --size.
    format: Annotated[str, Meta(pattern=r"^(int8|int8-32|int4|int4-128|keep|mixed)\Z")]
    matrices: Size = 0  # number of constants in that format; all others are float32
    # In which products with these weights read their inputs.
    activations: Annotated[str, Meta(pattern=r"^(int8|float32|float16|bfloat16)\Z")] = "int8"


class Calibration(Struct, frozen=True, forbid_unknown_fields=True):
    """Calibration data of the export."""

    sha256: Sha256  # digest of the file
    tokens: AtLeastOne  # number of tokens read


class Places(Struct, frozen=True, forbid_unknown_fields=True):
    """What visibilities and encodings declare of positions: rules (shared/places.py)."""

    # By layer, whether a query at position q sees a key at k; empty if it has no such mask.
    sees: Annotated[list[Rule], Meta(max_length=MOST)] = []
    # By layer, the rows of tables that its encodings read; those that the encodings of tokens read.
    rows: Annotated[list[Rules], Meta(max_length=MOST)] = []
    tokens: Rules = []
    # By layer, what its biases are a constant >= 0 of each head times; empty if no rule says it.
    biases: Annotated[list[Rule], Meta(max_length=MOST)] = []


class Generation(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tokens that generation_config.json forbids or forces."""

    suppressed: Ids = ()  # ids that are never chosen
    suppressed_first: Ids = ()  # ids that are not chosen as the first token that is free
    forced_first: Size | None = None  # id that is chosen after a prompt of one token
