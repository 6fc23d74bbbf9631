"""Small models of transformers for any config.json of the model types that we read, and their
outputs beside ours for every division of rows into calls.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import numpy as np
import torch
import transformers

from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.models.families import FILES, LONGROPE
from posenc_export.models.masked_heads import HEADS
from posenc_export.models.pretrained import from_pretrained
from posenc_export.models.task_heads import MASKED, TASKS
from posenc_export.runtime import load
from tests.models import checkpoints, encoders, pairs, series, speech

# Size of a part above which transformers is not asked; keys that are left out have the defaults of
# real models.
LARGEST = 1024
UNBUILT = re.compile(
    r"position|window|token|theta|chunk|seq|max_length|floor_scale|factor|_base$|context"
)  # keys of which no size of a weight follows
# Tasks with labels in config.json.
LABELLED = ("SequenceClassification", "TokenClassification", "AudioFrameClassification")
RANGE = 512  # max_positions for types whose configuration has no such key


@dataclass(frozen=True)
class Base:
    """A small valid configuration.

    Args:
        model_type: the model type.
        kind: "decoder", "encoder" or "pair" (encoder and decoder).
        name: name of the model in the tests of its kind.
        task: task of the head of an encoder, as in the names of transformers' classes; empty for
            hidden states.
    """

    model_type: str
    kind: str
    name: str
    task: str = ""


def bases() -> Dict[str, List[Base]]:
    """Return the small configurations of every model type that we read."""
    result: Dict[str, List[Base]] = {name: [] for name in FILES}
    for kind, names in (("decoder", checkpoints.OURS), ("encoder", encoders.OURS)):
        for name in names:
            result[name.split()[0]].append(Base(name.split()[0], kind, name))
    for name, (class_name, _) in pairs.MODELS.items():
        result[class_name.lower()].append(Base(class_name.lower(), "pair", name))
    for name in encoders.OURS:
        model_type = name.split()[0]
        for task, types in {**TASKS, MASKED: HEADS}.items():
            if model_type in types:
                result[model_type].append(Base(model_type, "encoder", name, task))
    return result


def config_of(base: Base) -> Any:
    """Return transformers' configuration."""
    if base.kind == "decoder":
        return checkpoints.described(base.name)
    if base.kind == "encoder":
        return _with_head(encoders.described(base.name), base.task)
    kind, keys = pairs.MODELS[base.name]
    return getattr(transformers, f"{kind}Config")(**keys)


def _with_head(config: Any, task: str) -> Any:
    """Return a configuration that names the class of a task, with three labels if it has any."""
    if task:
        auto = encoders.auto(config, f"AutoModelFor{task}")
        config.architectures = [auto._model_mapping[type(config)].__name__]
    if task in LABELLED:
        config.id2label = {0: "good", 1: "bad", 2: "neither"}
    return config


def built(base: Base, config: Mapping[str, Any]) -> Any:
    """Return transformers' model of a config.json, with random parameters."""
    torch.manual_seed(0)
    result = type(config_of(base)).from_dict(dict(config))
    large = [
        key
        for key, value in _numbers(result.to_dict())
        if value > LARGEST and not UNBUILT.search(key)
    ]
    if large:
        raise ValueError(f"not asked for a model of real size, by {large[0]}")
    if base.kind == "decoder":
        return checkpoints.randomised(series.built(result))
    if base.kind == "encoder":
        head = f"AutoModelFor{base.task}" if base.task else "AutoModel"
        model = encoders.randomised(encoders.built(result, head))
        return speech.Peer(model) if base.model_type in speech.SPEECH else model
    name = type(result).__name__.removesuffix("Config") + "ForConditionalGeneration"
    return pairs.randomised(getattr(transformers, name)(result))


def _numbers(values: Mapping[str, Any]) -> Iterator[Tuple[str, int]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield str(key), value


def tokens_for(base: Base, config: Any, length: int) -> np.ndarray:
    """Return two rows of token ids [2,length] without special tokens and without the id of
    padding.
    """
    most = min(58, getattr(config, "vocab_size", 58))  # ids stand for values of series
    padding = getattr(config, "pad_token_id", None)
    ids = [index for index in range(5, most) if index != padding]
    return np.random.default_rng(0).choice(ids, (2, length))


def loaded(base: Base, folder: Path, length: int) -> List[Any]:
    """Return our model of a checkpoint; of a pair, the encoder and the decoder.

    Args:
        length: number of tokens of the long row. transformers uses LongRoPE's short factors if it
            is not above the trained length; ours chooses by the range of positions.

    Raises:
        ValueError: the configuration is refused.
    """
    without = base.model_type in encoders.WITHOUT_RANGE
    ranged: Dict[str, Any] = {"max_positions": RANGE} if without else {}
    if base.kind == "pair":
        return [from_pretrained(folder, part=part) for part in ("encoder", "decoder")]
    model = from_pretrained(folder, **ranged)
    if length <= trained(model):
        model = from_pretrained(folder, lengths="by_position", **ranged)
    return [model]


def trained(model: Any) -> int:
    """Return the trained length of a decoder with LongRoPE; 0 for other models."""
    kinds = model.config.layers.values() if model.config.head is not None else ()
    specs = [spec for kind in kinds for spec in kind.attention.encodings]
    results = [spec["original_max_positions"] for spec in specs if spec["name"] == LONGROPE]
    return min(results, default=0)


def decode_defect(models: Sequence[Any]) -> str:
    """Return why transformers' decode differs from its full pass; empty if no reason is known."""
    attentions = [kind.attention for kind in models[-1].config.layers.values()]
    if any(attention.sees.get("size") == 1 for attention in attentions):
        return "its cache for a window of one token keeps all keys, keys[:, :, -1 + 1 :]"
    if trained(models[-1]):
        return "it chooses LongRoPE's factors once per call, and keys in the cache keep theirs"
    return ""


def opened(base: Base, models: List[Any], folder: Path, target: str) -> Any:
    """Return a session of our model; for a pair a Reading with the encoder's outputs.

    Args:
        models: from `loaded`.
        folder: artefacts are written into it.
        target: target of the artefacts; "eager" for the modules themselves.

    Raises:
        ValueError: the target refuses the model.
    """
    sessions = []
    for index, model in enumerate(models):
        if target == "eager":
            sessions.append(eager_session(model))
            continue
        place = folder / f"artefact {index}"
        export(model, target, place, verify=False)
        sessions.append(load(place, threads=1, provider="cpu").session())
    if base.kind != "pair":
        return series.opened(sessions[0])
    read, mask = pairs.inputs(base.model_type == "whisper")
    result = sessions[0].prefill(pairs.ours_of(read), attention_mask=mask)
    rows = [row[seen == 1] for row, seen in zip(result, mask, strict=True)]
    return pairs.Reading(sessions[1], rows)


def as_saved(config: Any) -> Dict[str, Any]:
    """Return the contents of config.json as transformers saves it."""
    saved: Dict[str, Any] = json.loads(config.to_json_string())
    return saved
