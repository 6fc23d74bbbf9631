"""Reader of sentence-transformers folders: pooling, dense layers and normalization become the
readout of a model, and text is cut as that library does. modules.json lists the modules with
their folders; the first is the model, an encoder or decoder as transformers saves it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Collection, Literal, Mapping, Sequence, TypeVar

import torch
from msgspec import Meta, Struct
from torch import Tensor

from posenc_export.models.by_transformers import TransformersModel
from posenc_export.models.checkpoint import Checkpoint
from posenc_export.models.config import ReadoutConfig
from posenc_export.models.embedding_and_head import Text
from posenc_export.models.folder_files import content
from posenc_export.shared.foreign import explained, json_of, typed
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
# Names of the file with the maximal length, in the order in which the library looks for them.
KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
LENGTHS = [f"sentence_{name}_config.json" for name in KINDS]
POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}  # our names of poolings
# The library's names of poolings by older keys.
OLDER = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
SIZES = {"word_embedding_dimension", "embedding_dimension"}
POOLING_KEYS = {*OLDER, *SIZES, "pooling_mode", "include_prompt"}
ACTIVATIONS = ("Tanh", "ReLU", "GELU", "SiLU", "Identity")
EMBEDDING = "sentence_embedding"
WHERE, AGAIN, ANOTHER = "sentence-transformers", "download the folder again", "export another model"
Length = Annotated[int, Meta(ge=1, le=2**31 - 1)]
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
# Keys of all files that are not read, with the values that change no embedding.
UNREAD: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("query_length", "document_length", "query_expansion"), (None,)),
    **dict.fromkeys(("model_args", "tokenizer_args", "config_args"), (None, {})),
    **dict.fromkeys(("model_kwargs", "processor_kwargs", "config_kwargs"), (None, {})),
    **dict.fromkeys(("common", "chat_template"), ({},)),
    "tokenizer_name_or_path": (None,),
    "transformer_task": ("feature-extraction", None),
    "modality_config": ({"text": FORWARD},),  # messages would be given to a chat template
    "module_input_name": (EMBEDDING, None),
    "module_output_name": (EMBEDDING, None),
    "padding": (True, False, "longest", "max_length"),
    "truncation": ("longest_first", True),
    "unpad_inputs": (None, True, False),
    "model_type": ("SentenceTransformer",),
    "kwargs": ([],),
}
PROMPT_KEYS = ("__version__", "prompts", "default_prompt_name", "similarity_fn_name")
Settings = TypeVar("Settings", bound=Struct)


class Module(Struct):
    """An entry of modules.json."""

    type: str
    path: Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]*\Z", max_length=255)]
    idx: int = 0
    name: str = ""


class Pooling(Struct):
    """The mode in the config of Pooling; older configs have a flag for each mode (OLDER)."""

    pooling_mode: str | list[str] | None = None


class TextCall(Struct):
    """What is read of processing_kwargs: how the tokenizer is called."""

    max_length: Length | None = None
    add_special_tokens: bool = True


class TextSettings(Struct):
    """What is read of the file with the maximal length."""

    max_seq_length: Length | None = None
    do_lower_case: bool | None = None
    processing_kwargs: dict[str, dict[str, Any]] = {}
    module_output_name: Literal["token_embeddings"] = "token_embeddings"


class TokenizerConfig(Struct):
    """What is read of a tokenizer_config.json."""

    model_max_length: Annotated[float, Meta(ge=1)] | None = None  # 1e30 for no limit
    truncation_side: Literal["left", "right"] | None = None


class DenseConfig(Struct):
    """The config of Dense."""

    in_features: Length
    out_features: Length
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str | None = None
    module_output_name: str | None = None
    use_residual: bool | None = None


class Dense(torch.nn.Module):
    """activation(W x + b)."""

    def __init__(self, config: DenseConfig, activation: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(config.in_features, config.out_features, config.bias)
        self.activation: torch.nn.Module = getattr(torch.nn, activation)()

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,inputs] to [B,S,N]."""
        y: Tensor = self.activation(self.linear(x))
        return y


class Normalize(torch.nn.Module):
    """x / max(|x|, 1e-12)."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,N] to the same shape."""
        return torch.nn.functional.normalize(x, dim=-1)


@dataclass(frozen=True)
class Sentences:
    """What a sentence-transformers folder adds to its encoder."""

    pooling: str
    layers: list[torch.nn.Module]  # after the pooling
    text: TextSettings
    call: TextCall
    files: Mapping[str, bytes]  # files to copy, by name

    def described(self) -> dict[str, Any]:
        """Return the description of the readout without its size."""
        layers = tuple(type(layer).__name__ for layer in self.layers)
        return {"output": EMBEDDING, "pooling": self.pooling, "layers": layers}


def opened(folder: Path, whole: bool) -> tuple[Path, Sentences | None]:
    """Return the folder of the encoder, and what is computed from its hidden states, if the whole
    model is wanted; None if the folder is not one of this library.
    """
    if not (folder / MODULES).is_file():
        return folder, None
    (_, encoder), *others = _modules(folder)
    return encoder, _read(folder, encoder, others) if whole else None


def _read(folder: Path, encoder: Path, others: list[tuple[str, Path]]) -> Sentences:
    """Read the modules behind the encoder. ValueError: what is missing or cannot be exported."""
    kind, place = others.pop(0) if others else ("none", folder)
    if kind != "Pooling":
        raise refusal(WHERE, f"Pooling after Transformer in {MODULES}", kind, ANOTHER)
    names = _pooling(place)
    layers: list[torch.nn.Module] = []
    for kind, place in others:
        if kind == "Dense":
            layers.append(_dense(place))
        elif kind == "Normalize":
            if (place / "config.json").is_file():
                _check_keys("Normalize", _json(place / "config.json"), ())
            layers.append(Normalize())
        elif kind != "Dropout":  # which does nothing in inference
            rule = "modules Pooling, Dense and Normalize after the encoder"
            raise refusal(WHERE, rule, kind, f"remove it, or {ANOTHER}")
    found = [encoder / name for name in LENGTHS if (encoder / name).is_file()]
    text = _typed(found[0], TextSettings) if found else TextSettings()
    prompts = folder / PROMPTS
    files = {PROMPTS: content(prompts)} if prompts.exists() else {}
    _check_keys(PROMPTS, _json(prompts) if files else {}, PROMPT_KEYS)
    return Sentences(names, layers, text, _call(text), files)


def attach(model: TransformersModel, sentences: Sentences) -> None:
    """Add the readout to its model, and let the tokenizer cut text to the maximal length.
    ValueError: dense layers do not fit the width.
    """
    size, layers = model.width, sentences.layers
    for linear in [layer.linear for layer in layers if isinstance(layer, Dense)]:
        if linear.in_features != size:
            got = f"one for {linear.in_features}"
            raise refusal(WHERE, f"a Dense layer for {size} numbers", got, AGAIN)
        size = linear.out_features
    model.after = torch.nn.Sequential(*layers) if layers else None
    model.readout = ReadoutConfig(size=size, **sentences.described())
    text, positions = model.text, model.max_positions
    assert positions is not None  # given for a whole model
    name, call = "tokenizer_config.json", sentences.call
    values = json_of(WHERE, name, text.files.get(name, b"{}"), AGAIN)
    config = typed(WHERE, name, values, TokenizerConfig, AGAIN)
    lengths = (call.max_length, sentences.text.max_seq_length, config.model_max_length)
    most = int(min(next(filter(None, lengths), positions), positions))
    side, tokenizer = config.truncation_side, text.tokenizer
    tokenizer = truncating(tokenizer, most, sentences, side) if tokenizer else b""
    files = {**text.files, **sentences.files}
    model.text = Text(tokenizer, text.stop_ids, text.start_ids, files)


def truncating(tokenizer: bytes, most: int, how: Sentences, side: str | None) -> bytes:
    """Return tokenizer.json changed to cut texts to `most` tokens, special tokens included, and not
    to pad them, to convert text to lower case before all else and to add no special tokens where
    the settings say so. side: which end is cut; None for that in tokenizer.json.
    """
    from tokenizers import Tokenizer, normalizers

    with explained(f"{WHERE}: expected a tokenizer.json of the library tokenizers", AGAIN):
        own: Any = Tokenizer.from_buffer(tokenizer)
        written = (own.truncation or {}).get("direction", "right")
        own.enable_truncation(most, direction=side or written)
        own.no_padding()
        if how.text.do_lower_case:
            further = [] if own.normalizer is None else [own.normalizer]
            own.normalizer = normalizers.Sequence([normalizers.Lowercase(), *further])
        if not how.call.add_special_tokens:
            own.post_processor = None
        content: str = own.to_str()
    return content.encode()


def _json(path: Path, kind: type[Any] = dict) -> Any:
    """Return the content of a JSON file: an object, or a list with kind=list."""
    name = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise refusal(WHERE, name, "none", AGAIN)
    return json_of(WHERE, name, content(path), AGAIN, kind)


def _typed(path: Path, kind: type[Settings]) -> Settings:
    """Return what is read of a file, of which other keys must have values of UNREAD."""
    name, values = f"{path.parent.name}/{path.name}", _json(path)
    settings = typed(WHERE, name, values, kind, AGAIN)
    _check_keys(name, values, kind.__struct_fields__)
    return settings


def _check_keys(name: str, values: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise ValueError for keys that are not read, unless their values change no embedding."""
    for key, value in values.items():
        allowed = UNREAD.get(key, ())
        if key not in read and value not in allowed:
            expected = " or ".join(map(repr, allowed)) or "left out, as it is unknown"
            raise refusal(WHERE, f"{key} of {name} to be {expected}", f"{value!r:.80}", ANOTHER)


def _call(settings: TextSettings) -> TextCall:
    """Return how texts are given to the tokenizer."""
    name, calls = "processing_kwargs", settings.processing_kwargs
    _check_keys(name, calls, ("text", "audio", "image", "video"))
    call = typed(WHERE, name, calls.get("text", {}), TextCall, AGAIN)
    _check_keys(f"{name}.text", calls.get("text", {}), call.__struct_fields__)
    return call


def _modules(folder: Path) -> list[tuple[str, Path]]:
    values = _json(folder / MODULES, list)
    listed = typed(WHERE, MODULES, values, Annotated[list[Module], Meta(min_length=1)], AGAIN)
    for entry in values:
        _check_keys(MODULES, entry, Module.__struct_fields__)
    names = [module.name for module in listed]
    if len(set(names)) < len(names):  # the library keeps the last one of a name only
        raise refusal(WHERE, "modules of different names", ", ".join(names), "rename them")
    modules = []
    for index, module in enumerate(listed):
        package, _, kind = module.type.rpartition(".")
        place = folder / module.path
        own = package.partition(".")[0] == "sentence_transformers"
        if not own or (kind == "Transformer") != (index == 0):
            rule = "Transformer first and other modules of sentence_transformers after it"
            raise refusal(WHERE, rule, f"{module.type!r} at place {index}", ANOTHER)
        if not place.resolve().is_relative_to(folder.resolve()):
            raise refusal(WHERE, "modules within their folder", f"path {module.path!r}", AGAIN)
        modules.append((kind, place))
    return modules


def _pooling(place: Path) -> str:
    config = _json(place / "config.json")
    mode = typed(WHERE, "Pooling", config, Pooling, AGAIN).pooling_mode
    if mode is None:
        mode = [key for name, key in OLDER.items() if config.get(name)] or ["mean"]
    name = ", ".join([mode] if isinstance(mode, str) else mode)
    if name not in POOLINGS:
        rule = f"pooling_mode to be one of {', '.join(POOLINGS)}"
        raise refusal(WHERE, rule, repr(name), suggestion(name, POOLINGS))
    _check_keys("Pooling", config, POOLING_KEYS)
    if config.get("include_prompt") is False:
        got = "include_prompt false, which leaves out a prompt"
        raise refusal(WHERE, "pooling of all tokens", got, "set it to true")
    return POOLINGS[name]


def _dense(place: Path) -> Dense:
    config = _typed(place / "config.json", DenseConfig)
    ends = {config.module_input_name or EMBEDDING, config.module_output_name or EMBEDDING}
    path = config.activation_function
    package, _, name = path.rpartition(".")
    if not package.startswith("torch.nn") or name not in ACTIVATIONS:
        rule = f"activation_function of Dense to be one of torch's {', '.join(ACTIVATIONS)}"
        raise refusal(WHERE, rule, repr(path), ANOTHER)
    if ends != {EMBEDDING} or config.use_residual:
        rule = f"Dense from and to {EMBEDDING} without use_residual"
        raise refusal(WHERE, rule, sorted(ends), ANOTHER)
    with Checkpoint(place) as checkpoint, torch.device("meta"):
        layer = Dense(config, name)
        wanted, names = dict(layer.named_parameters()), set(checkpoint.names())
        checkpoint.check_names(wanted.keys() - names, names - wanted.keys(), len(wanted))
        tensors = {name: checkpoint.tensor(name).clone() for name in names}
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            rule = f"{name} of Dense with shape {list(wanted[name].shape)}"
            raise refusal(WHERE, rule, list(tensor.shape), AGAIN)
    layer.load_state_dict(tensors, assign=True)
    return layer
