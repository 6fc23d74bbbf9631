"""What is read of the JSON files of a sentence-transformers folder, with its types."""

from typing import Annotated, Any, Dict, List, Literal, Optional, Union

from msgspec import Meta, Struct


class Module(Struct):
    """An entry of modules.json."""

    type: str
    path: Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]*\Z", max_length=255)]
    idx: int = 0


Modules = Annotated[List[Module], Meta(min_length=1)]


class Pooling(Struct):
    """What is read of the config of Pooling, beside flags by name."""

    pooling_mode: Union[str, List[str], None] = None


class TextSettings(Struct):
    """The file with the maximal length."""

    transformer_task: Optional[str] = "feature-extraction"
    max_seq_length: Optional[Annotated[int, Meta(ge=1)]] = None
    do_lower_case: Optional[bool] = None


class Dense(Struct):
    """The config of Dense."""

    out_features: Annotated[int, Meta(ge=1)]
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: Optional[str] = None
    module_output_name: Optional[str] = None
    use_residual: Optional[bool] = None


class Truncation(Struct):
    """How a tokenizer.json cuts texts."""

    direction: Literal["Left", "Right"] = "Right"


class Normalizer(Struct):
    """The normalizer of a tokenizer.json."""

    type: str
    lowercase: Optional[bool] = None
    normalizers: List[Dict[str, Any]] = []


class TokenizerFile(Struct):
    """What is read of a tokenizer.json."""

    truncation: Optional[Truncation] = None
    normalizer: Optional[Normalizer] = None
