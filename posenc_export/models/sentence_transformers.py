"""Reader of sentence-transformers folders: pooling, dense layers and normalization become the
readout of an encoder, and text is cut as that library does.

modules.json lists the modules with their folders; the first is the encoder, as transformers saves
it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar

from torch import Tensor

from posenc_export.models.checkpoint import Checkpoint
from posenc_export.models.config import Named, ReadoutConfig
from posenc_export.models.sentence_files import (
    Dense,
    Modules,
    Pooling,
    TextSettings,
    TokenizerFile,
)
from posenc_export.models.stack import Stack, Text
from posenc_export.models.task_heads import put
from posenc_export.shared.foreign import json_of, typed
from posenc_export.shared.suggestion import suggestion

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
# Names of the file with the maximal length, in the order in which the library looks for them.
LENGTHS = [
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
# Our names of poolings by the library's current and older keys, in the order in which it
# concatenates them.
POOLINGS = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
OLDER = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Identity": None}
EMBEDDING = "sentence_embedding"
WHERE, AGAIN = "sentence-transformers", "download the folder again"
LONGEST = 2**31 - 1  # tokens of a text
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Sentences:
    """What a sentence-transformers folder adds to its encoder.

    Args:
        readout: pooling and the layers after it.
        weights: tensors of the dense layers, by name in the module Readout.
        max_tokens: largest number of tokens of a text; None for that of the tokenizer and the
            encoder.
        lower: whether text is converted to lower case first.
        files: files to copy, by name.
    """

    readout: ReadoutConfig
    weights: Mapping[str, Tensor]
    max_tokens: Optional[int]
    lower: bool
    files: Mapping[str, bytes]


def opened(folder: Path, whole: bool) -> Tuple[Path, Optional[Sentences]]:
    """Return the folder of the encoder, and what is computed from its hidden states; None if the
    folder is not one of this library.

    Args:
        whole: whether the whole model is wanted; otherwise only the encoder is looked up.
    """
    if not (folder / MODULES).is_file():
        return folder, None
    sentences = read(folder) if whole else None
    return _modules(folder)[0][1], sentences


def read(folder: Path) -> Sentences:
    """Read all modules of a folder.

    Raises:
        ValueError: a file that is missing or not as the library writes it, a module or a setting
            that cannot be exported, each by its name.
    """
    (_, encoder), *others = _modules(folder)
    kind, place = others.pop(0) if others else ("none", folder)
    if kind != "Pooling":
        raise ValueError(
            f"sentence-transformers: expected Pooling after Transformer in {MODULES}, got "
            f"{kind}; export another model"
        )
    names = _pooling(place)
    layers: List[Named] = []
    weights: Dict[str, Tensor] = {}
    for kind, place in others:
        if kind == "Dense":
            layer, tensors = _dense(place)
            weights.update(
                {f"layers.{len(layers)}.{name}": tensor for name, tensor in tensors.items()}
            )
            layers.append(layer)
        elif kind == "Normalize":
            layers.append({"name": "normalize"})
        elif kind != "Dropout":  # which does nothing in inference
            raise ValueError(
                "sentence-transformers: expected modules Pooling, Dense and Normalize after "
                f"the encoder, got {kind}; remove it, or export another model"
            )
    most, lower = _text_settings(encoder)
    files = {PROMPTS: (folder / PROMPTS).read_bytes()} if (folder / PROMPTS).is_file() else {}
    config = ReadoutConfig(output=EMBEDDING, pooling=names, layers=tuple(layers))
    return Sentences(config, weights, most, lower, files)


def attach(model: Stack, sentences: Sentences) -> None:
    """Add the readout to its encoder, and let the tokenizer cut text to the maximal length.

    Raises:
        ValueError: the model is a decoder, or dense layers do not fit the width.
    """
    if model.config.head is not None or model.config.token_geometry.causal:
        raise ValueError(
            "sentence-transformers: expected an encoder with bidirectional attention, got a "
            "decoder; export it without its pooling, from its own folder"
        )
    put(model, sentences.readout, sentences.weights)
    most = min(
        sentences.max_tokens or _limit(model.text) or model.config.max_positions,
        model.config.max_positions,
    )
    tokenizer = (
        truncating(model.text.tokenizer, most, sentences.lower) if model.text.tokenizer else b""
    )
    model.text = Text(
        tokenizer,
        model.text.stop_ids,
        model.text.start_ids,
        {**model.text.files, **sentences.files},
    )


def truncating(tokenizer: bytes, most: int, lower: bool) -> bytes:
    """Return tokenizer.json changed to cut texts to `most` tokens, special tokens included, and not
    to pad them.

    Args:
        lower: convert text to lower case before all else, unless the tokenizer does so already.
    """
    content = json_of(WHERE, "tokenizer.json", tokenizer, AGAIN)
    settings = typed(WHERE, "tokenizer.json", content, TokenizerFile, AGAIN)
    direction = "Right" if settings.truncation is None else settings.truncation.direction
    content["truncation"] = {
        "direction": direction,
        "max_length": most,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = None
    normalizer = settings.normalizer
    if (
        lower
        and '"Lowercase"' not in json.dumps(content.get("normalizer"))
        and not (normalizer and normalizer.lowercase)
    ):
        further = (
            []
            if normalizer is None
            else normalizer.normalizers
            if normalizer.type == "Sequence"
            else [content["normalizer"]]
        )
        content["normalizer"] = {
            "type": "Sequence",
            "normalizers": [{"type": "Lowercase"}, *further],
        }
    return json.dumps(content, ensure_ascii=False).encode()


def _json(path: Path, kind: Type[Any] = dict) -> Any:
    """Return the content of a JSON file: an object, or a list with kind=list."""
    if not path.is_file():
        raise ValueError(f"{WHERE}: expected {path.parent.name}/{path.name}, got none; {AGAIN}")
    return json_of(WHERE, f"{path.parent.name}/{path.name}", path.read_bytes(), AGAIN, kind)


def _typed(path: Path, kind: Type[Settings]) -> Settings:
    """Return the content of a JSON file as a Struct."""
    name = f"{path.parent.name}/{path.name}"
    return typed(WHERE, name, _json(path), kind, AGAIN)  # type: ignore[no-any-return]


def _modules(folder: Path) -> List[Tuple[str, Path]]:
    """Return the kind and the folder of each module."""
    listed = typed(WHERE, MODULES, _json(folder / MODULES, list), Modules, AGAIN)
    found = []
    for index, module in enumerate(sorted(listed, key=lambda module: module.idx)):
        package, _, kind = module.type.rpartition(".")
        place = folder / module.path
        if package.partition(".")[0] != "sentence_transformers" or (kind == "Transformer") != (
            index == 0
        ):
            rule = "Transformer first and other modules of sentence_transformers after it"
            raise ValueError(
                f"sentence-transformers: expected {rule}, got {module.type!r} at place "
                f"{index}; export another model"
            )
        if not place.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                "sentence-transformers: expected modules within their folder, got path "
                f"{module.path!r}; {AGAIN}"
            )
        found.append((kind, place))
    return found


def _pooling(place: Path) -> Tuple[str, ...]:
    config = _json(place / "config.json")
    given = _typed(place / "config.json", Pooling).pooling_mode
    if given is None:
        given = [key for name, key in OLDER.items() if config.get(name)] or ["mean"]
    names: Sequence[str] = [given] if isinstance(given, str) else given
    unknown = next((name for name in names if name not in POOLINGS), None)
    if unknown is not None:
        raise ValueError(
            "sentence-transformers: expected pooling_mode to be one of "
            f"{', '.join(POOLINGS)}, got {unknown!r}; {suggestion(unknown, POOLINGS)}"
        )
    other = sorted(
        set(config)
        - {
            *OLDER,
            "pooling_mode",
            "include_prompt",
            "word_embedding_dimension",
            "embedding_dimension",
        }
    )
    if other:
        raise ValueError(
            "sentence-transformers: expected keys of Pooling that are known, got "
            f"{other[0]!r}; export another model"
        )
    if config.get("include_prompt") is False:
        raise ValueError(
            "sentence-transformers: expected pooling of all tokens, got include_prompt "
            "false, which leaves out a prompt; set it to true"
        )
    return tuple(POOLINGS[name] for name in names)


def _text_settings(encoder: Path) -> Tuple[Optional[int], bool]:
    """Return the maximal number of tokens, None if it is not given, and whether text is
    converted to lower case.
    """
    settings = next(
        (_typed(encoder / name, TextSettings) for name in LENGTHS if (encoder / name).is_file()),
        TextSettings(),
    )
    task = settings.transformer_task
    if task != "feature-extraction":
        raise ValueError(
            "sentence-transformers: expected transformer_task feature-extraction, got "
            f"{task!r}; export another model"
        )
    return settings.max_seq_length, bool(settings.do_lower_case)


def _dense(place: Path) -> Tuple[Named, Dict[str, Tensor]]:
    config = _typed(place / "config.json", Dense)
    ends = {config.module_input_name or EMBEDDING, config.module_output_name or EMBEDDING}
    path = config.activation_function
    package, _, name = path.rpartition(".")
    if not package.startswith("torch.nn") or name not in ACTIVATIONS:
        raise ValueError(
            "sentence-transformers: expected activation_function of Dense to be one of "
            f"torch's {', '.join(ACTIVATIONS)}, got {path!r}; export another model"
        )
    if ends != {EMBEDDING} or config.use_residual:
        raise ValueError(
            f"sentence-transformers: expected Dense from and to {EMBEDDING} without "
            f"use_residual, got {sorted(ends)}; export another model"
        )
    with Checkpoint(place) as checkpoint:
        tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    layer = {
        "name": "dense",
        "size": config.out_features,
        "bias": config.bias,
        "activation": ACTIVATIONS[name],
    }
    return layer, tensors


def _limit(text: Text) -> Optional[int]:
    """Return model_max_length of tokenizer_config.json, or None."""
    name = "tokenizer_config.json"
    given = json_of(WHERE, name, text.files.get(name, b"{}"), AGAIN).get("model_max_length")
    # transformers writes 1e30 for no limit.
    return int(min(given, LONGEST)) if isinstance(given, (int, float)) and given >= 1 else None
