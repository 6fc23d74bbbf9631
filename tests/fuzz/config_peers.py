"""Small models of transformers for any config.json of the model types that we read, and their outputs beside ours for every division of rows into calls."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

import numpy as np
import torch
import transformers

from posenc_export.export.expected import eager_session
from posenc_export.models.families import FILES
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import Session
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
RANGE = 512  # max_positions for types whose configuration has no such key


@dataclass(frozen=True)
class Base:
    """A small valid configuration.

    Args:
        model_type: the model type.
        kind: "decoder", "encoder", "pair" (encoder and decoder) or "vision" (text model of a vision-language model).
        name: name of the model in the tests of its kind.
    """

    model_type: str
    kind: str
    name: str

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
    return found


def config_of(base: Base) -> Any:
    """Return transformers' configuration."""
    if base.kind == "decoder":
        return checkpoints.described(base.name)
    if base.kind == "encoder":
        return encoders.described(base.name)
    if base.kind == "pair":
        kind, keys = pairs.MODELS[base.name]
        return getattr(transformers, f"{kind}Config")(**keys)
    return vision_models.described(base.name, "Glm46V" if base.model_type == "glm46v" else "")


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
        return encoders.randomised(encoders.built(made))
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
        """Return the outputs [B,S,N] of a full pass."""
        return theirs(self.peer, tokens, self.output)

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


def ours(base: Base, folder: Path, encoded: bool = True) -> Any:
    """Return our model of a checkpoint: a session, or for a pair a Reading with the encoder's outputs.

    Raises:
        ValueError: the configuration is refused.
    """
    ranged = {"max_positions": RANGE} if base.model_type == "xlnet" else {}
    if base.kind != "pair":
        return eager_session(from_pretrained(folder, **ranged))
    read, mask = pairs.inputs(base.model_type == "whisper")
    made = eager_session(from_pretrained(folder, part="encoder")).prefill(
        pairs.ours_of(read), attention_mask=mask
    )
    rows = [row[seen == 1] for row, seen in zip(made, mask, strict=True)]
    return pairs.Reading(eager_session(from_pretrained(folder, part="decoder")), rows)


def divisions(
    base: Base, session: Any, tokens: np.ndarray, wanted: np.ndarray, alone: np.ndarray
) -> Dict[str, Pairs]:
    """Return pairs of outputs (ours, theirs) for every division of the rows into calls.

    Args:
        tokens: two rows [2,S].
        wanted: transformers' outputs of both rows.
        alone: transformers' outputs [1,SHORT,N] of the last SHORT tokens of the second row, as a row of its own.
    """
    long = tokens.shape[1]
    seen = np.stack([np.ones(long, bool), np.arange(long) >= long - SHORT])
    pad = np.where(seen, tokens, 0)
    padded: List[Tuple[str, Any]] = [
        (
            "left padding",
            (pad, seen, lambda made: [(made[0], wanted[0]), (made[1, long - SHORT :], alone[0])]),
        )
    ]
    behind = seen[:, ::-1].copy()
    turned = np.stack([tokens[0], np.roll(pad[1], SHORT - long)])
    if base.kind == "encoder":
        padded.append(
            (
                "right padding",
                (turned, behind, lambda made: [(made[0], wanted[0]), (made[1, :SHORT], alone[0])]),
            )
        )
    found = {"full": [(session.prefill(tokens), wanted)]}
    for name, (rows, mask, split) in padded:
        _begin(session)
        found[name] = split(session.prefill(rows, attention_mask=mask.astype(np.int64)))
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
