"""Heads of transformers' classes, by `architectures` of config.json.

A head for language, masked tokens, labels of tokens or answers acts on each token, and the class is
read as a whole. One for scores of a sequence acts on one vector, a token or the mean of all: the
base model is read, and the head after a pooling.
"""

import re
from typing import Any, Mapping

import torch
from torch import Tensor

from posenc_export.models.parts.readout import POOLINGS

LANGUAGE = ("CausalLM", "ConditionalGeneration")
SCORES, ANSWERS, LABELS = "SequenceClassification", "QuestionAnswering", "TokenClassification"
HEADS = (*LANGUAGE, "MaskedLM", LABELS, ANSWERS, SCORES)
WITHOUT = "give --no-head, or head=False, for hidden states"
TRIED = 6  # tokens that show how hidden states are pooled


def architecture(config: Mapping[str, Any]) -> str:
    """Return the first of `architectures`, or an empty text."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    return first if isinstance(first, str) else ""


def task_of(name: str) -> str:
    """Return the task in the name of a class, such as SequenceClassification, or an empty text."""
    task = re.search(r"For([A-Z]\w*)$", name)  # RoFormer also contains For
    return task[1] if task else ""


def labels_of(config: Any, task: str) -> tuple[str, ...]:
    """Return the names of the logits by a configuration of transformers; none for token ids."""
    if task == ANSWERS:
        return ("start", "end")
    return tuple(config.id2label.values()) if task in (SCORES, LABELS) else ()


class Hidden(tuple):
    """Outputs of a base model: hidden states, and what its pooler makes of them; all else None."""

    def __getattr__(self, name: str) -> Any:
        return dict(zip(("last_hidden_state", "pooler_output"), self, strict=True)).get(name)


class Given(torch.nn.Module):
    """In place of a base model: its input embeddings are its hidden states."""

    def __init__(self, pooler: torch.nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *arguments: Any, **named: Any) -> Hidden:
        """Return the argument [B,S,E], and what the pooler makes of it."""
        given = (*arguments, *named.values())
        x = next(value for value in given if isinstance(value, Tensor) and value.dim() == 3)
        return Hidden((x, None if self.pooler is None else self.pooler(x)))


class Scores(torch.nn.Module):
    """What a class of transformers does after its base model, which it loses."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        setattr(model, model.base_model_prefix, Given(getattr(model.base_model, "pooler", None)))
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Each hidden state [B,S,E] as a sequence of its own, to [B,S,N]."""
        logits: Tensor = self.model(inputs_embeds=x.reshape(-1, 1, x.size(2))).logits
        return logits.reshape(x.size(0), x.size(1), -1)


def scores_of(model: Any, vocabulary: int) -> tuple[torch.nn.Module, str] | None:
    """Take the head, [B,S,E] to [B,S,N], from a class of transformers for scores of a sequence, and
    say which pooling of hidden states it reads. Return None if it reads more. vocabulary: number of
    token ids.
    """
    padding, base = model.config.get_text_config().pad_token_id, model.base_model
    ids = torch.tensor([[id for id in range(vocabulary) if id != padding][:TRIED]])
    with torch.no_grad():
        expected, x = model(input_ids=ids).logits, base(input_ids=ids).last_hidden_state
        shape, places = (x.size(2), expected.size(1)), torch.arange(1, x.size(1) + 1)[None]
        linear = [part for part in model.children() if isinstance(part, torch.nn.Linear)]
        heads = [one for one in linear if (one.in_features, one.out_features) == shape]
        for head in (*heads, Scores(model)):  # decoders have such a layer alone
            for pooling in ("cls", "last", "mean"):
                scores = head(POOLINGS[pooling]()(x, places)[:, None])[:, 0]
                if torch.allclose(scores, expected, rtol=1e-4, atol=1e-5):
                    return head, pooling
    return None


def left_out(model: Any, values: Mapping[str, Any]) -> str | None:
    """Return the task by config.json whose head a model with hidden states as only output lacks,
    or None. model: as by_transformers.TransformersModel.
    """
    return None if model.head or model.readout else task_of(architecture(values)) or None
