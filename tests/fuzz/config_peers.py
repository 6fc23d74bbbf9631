"""Small models of transformers for any config.json of the model types that we read, and their outputs beside ours for every division of rows into calls."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

import numpy as np
import torch
import transformers

from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.models.families import FILES
from posenc_export.models.masked_heads import HEADS
from posenc_export.models.pretrained import from_pretrained
from posenc_export.models.task_heads import MASKED, TASKS
from posenc_export.runtime import Session, load
from tests.models import checkpoints, encoders, pairs, vision_models
from tests.models.patterns import Pairs, theirs

LENGTH, SHORT, CHUNK = 24, 9, 7  # tokens of the long and of the short row, and of a chunk
FIRST, STEPS = (
    3,
    21,
)  # tokens of the first call of a decode, which may lie in another range of a rotation, and the last ones, which are read one at a time
BEYOND = 280  # tokens of a long row in which bfloat16 no longer holds every position
LARGEST = 1024  # size of a part above which transformers is not asked; keys that are left out have the defaults of real models
UNBUILT = re.compile(
    r"position|window|token|theta|chunk|seq|max_length|floor_scale|factor"
)  # keys of which no size of a weight follows
LABELLED = ("SequenceClassification", "TokenClassification")  # tasks with labels in config.json
RANGE = 512  # max_positions for types whose configuration has no such key


@dataclass(frozen=True)
class Base:
    """A small valid configuration.

    Args:
        model_type: the model type.
        kind: "decoder", "encoder", "pair" (encoder and decoder) or "vision" (text model of a vision-language model).
        name: name of the model in the tests of its kind.
        task: task of the head of an encoder, as in the names of transformers' classes; empty for
            hidden states.
    """

    model_type: str
    kind: str
    name: str
    task: str = ""

    @property
    def text_alone(self) -> bool:
        """Whether config.json is that of the text model alone."""
        return self.model_type.endswith("_text") and self.kind == "vision"


def bases() -> Dict[str, List[Base]]:
    """Return the small configurations of every model type that we read."""
    found: Dict[str, List[Base]] = {name: [] for name in FILES}
    for kind, names in (("decoder", checkpoints.MODELS), ("encoder", encoders.MODELS)):
        for name in names:
            found[name.split()[0]].append(Base(name.split()[0], kind, name))
    for name, (class_name, _) in pairs.MODELS.items():
        found[class_name.lower()].append(Base(class_name.lower(), "pair", name))
    for name in vision_models.MODELS:
        family = name.replace(",", "").split()[0]
        for model_type in (family, f"{family}_text", *(["glm46v"] if family == "glm4v" else [])):
            if model_type in found:
                found[model_type].append(Base(model_type, "vision", name))
    for name in encoders.MODELS:
        model_type = name.split()[0]
        for task, types in {**TASKS, MASKED: HEADS}.items():
            if model_type in types:
                found[model_type].append(Base(model_type, "encoder", name, task))
    return found


def config_of(base: Base) -> Any:
    """Return transformers' configuration."""
    if base.kind == "decoder":
        return checkpoints.described(base.name)
    if base.kind == "encoder":
        return _with_head(encoders.described(base.name), base.task)
    if base.kind == "pair":
        kind, keys = pairs.MODELS[base.name]
        return getattr(transformers, f"{kind}Config")(**keys)
    return vision_models.described(base.name, "Glm46V" if base.model_type == "glm46v" else "")


def _with_head(config: Any, task: str) -> Any:
    """Return a configuration that names the class of a task, with three labels if it has any."""
    if task:
        auto = getattr(transformers, f"AutoModelFor{task}")
        config.architectures = [auto._model_mapping[type(config)].__name__]
    if task in LABELLED:
        config.id2label = {0: "good", 1: "bad", 2: "neither"}
    return config


def built(base: Base, config: Mapping[str, Any]) -> Any:
    """Return transformers' model of a config.json, with random parameters."""
    torch.manual_seed(0)
    made = type(config_of(base)).from_dict(dict(config))
    large = [
        key
        for key, value in _numbers(made.to_dict())
        if value > LARGEST and not UNBUILT.search(key)
    ]
    if large:
        raise ValueError(f"not asked for a model of real size, by {large[0]}")
    if base.kind == "decoder":
        return checkpoints.randomised(transformers.AutoModelForCausalLM.from_config(made))
    if base.kind == "encoder":
        head = f"AutoModelFor{base.task}" if base.task else "AutoModel"
        return encoders.randomised(encoders.built(made, head))
    name = type(made).__name__.removesuffix("Config") + "ForConditionalGeneration"
    return (pairs.randomised if base.kind == "pair" else checkpoints.randomised)(
        getattr(transformers, name)(made)
    )


def _numbers(values: Mapping[str, Any]) -> Iterator[Tuple[str, int]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield str(key), value


def tokens_for(base: Base, config: Any, length: int) -> np.ndarray:
    """Return two rows of token ids [2,length] without special tokens and without the id of padding."""
    text = config.get_text_config() if base.kind == "vision" else config
    ids = [index for index in range(5, min(58, text.vocab_size)) if index != text.pad_token_id]
    return np.random.default_rng(0).choice(ids, (2, length))


class Theirs:
    """Outputs of transformers' model for single rows."""

    def __init__(self, base: Base, model: Any) -> None:
        self.base, self.config = base, model.config
        self.peer = pairs.Peer(model) if base.kind == "pair" else model
        self.output = "last_hidden_state" if base.kind == "encoder" else "logits"

    def full(self, tokens: np.ndarray) -> np.ndarray:
        """Return the outputs [B,S,N] of a full pass; [B,N] of a head that reads a whole row."""
        if not self.base.task:
            return theirs(self.peer, tokens, self.output)
        with torch.no_grad():
            found = self.peer(torch.from_numpy(tokens))
        if self.base.task == "QuestionAnswering":
            return torch.stack((found.start_logits, found.end_logits), 2).numpy()
        return found.logits.numpy()  # type: ignore[no-any-return]

    def cached(self, tokens: np.ndarray) -> np.ndarray:
        """Return the outputs of a decoder that reads FIRST tokens, then others, and the last STEPS tokens one at a time, with its own cache."""
        parts, cache, ends = (
            [],
            None,
            sorted({FIRST, *range(tokens.shape[1] - STEPS, tokens.shape[1] + 1)}),
        )
        with torch.no_grad():
            for begin, end in zip([0, *ends], ends, strict=False):
                found = self.peer(
                    torch.from_numpy(tokens[:, begin:end]),
                    use_cache=True,
                    **({} if cache is None else {"past_key_values": cache}),
                )
                parts.append(found.logits.numpy())
                cache = found.past_key_values
        return np.concatenate(parts, 1)


def loaded(base: Base, folder: Path) -> List[Any]:
    """Return our model of a checkpoint; of a pair, the encoder and the decoder.

    Raises:
        ValueError: the configuration is refused.
    """
    ranged = {"max_positions": RANGE} if base.model_type == "xlnet" else {}
    if base.kind == "pair":
        return [from_pretrained(folder, part=part) for part in ("encoder", "decoder")]
    return [from_pretrained(folder, **ranged)]


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
        return sessions[0]
    read, mask = pairs.inputs(base.model_type == "whisper")
    made = sessions[0].prefill(pairs.ours_of(read), attention_mask=mask)
    rows = [row[seen == 1] for row, seen in zip(made, mask, strict=True)]
    return pairs.Reading(sessions[1], rows)


def divisions(
    base: Base, session: Any, tokens: np.ndarray, wanted: np.ndarray, alone: np.ndarray
) -> Dict[str, Pairs]:
    """Return pairs of outputs (ours, theirs) for every division of the rows into calls.

    Args:
        tokens: two rows [2,S].
        wanted: transformers' outputs of both rows.
        alone: transformers' outputs [1,SHORT,N], or [1,N], of the last SHORT tokens of the second
            row, as a row of its own.
    """
    call = session.read_out if base.task else session.prefill
    long = tokens.shape[1]
    sides = {"left padding": slice(long - SHORT, long)}
    if base.kind == "encoder":
        sides["right padding"] = slice(0, SHORT)
    found: Dict[str, Pairs] = {"full": [(call(tokens), wanted)]}
    for name, place in sides.items():
        _begin(session)
        rows, mask = np.zeros_like(tokens), np.zeros_like(tokens)
        rows[0], rows[1, place] = tokens[0], tokens[1, -SHORT:]
        mask[0], mask[1, place] = 1, 1
        made = call(rows, attention_mask=mask)
        second = made[1] if made.ndim == 2 else made[1, place]
        found[name] = [(made[0], wanted[0]), (second, alone[0])]
    if base.kind == "encoder":
        return found
    _begin(session)
    found["chunks"] = [(session.prefill(tokens, chunk=CHUNK), wanted)]
    _begin(session)
    first = session.prefill(tokens[:, : long - STEPS])
    steps = [session.step(tokens[:, index]) for index in range(long - STEPS, long)]
    found["steps"] = [(np.concatenate((first, np.stack(steps, 1)), axis=1), wanted)]
    return found


def _begin(session: Any) -> None:
    held: Session = session.session if isinstance(session, pairs.Reading) else session
    held.reset()


def grids(session: Session, peer: Theirs, tokens: np.ndarray) -> Pairs:
    """Return pairs of outputs for tokens of images, with time, height and width as coordinates."""
    grid = vision_models.places()[:, :, : tokens.shape[1]]
    session.reset()
    return [
        (
            session.prefill(tokens, grid=grid, chunk=CHUNK),
            theirs(peer.peer, tokens, position_ids=grid),
        )
    ]


def as_saved(config: Any) -> Dict[str, Any]:
    """Return the contents of config.json as transformers saves it."""
    saved: Dict[str, Any] = json.loads(config.to_json_string())
    return saved
