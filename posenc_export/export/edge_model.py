"""A reduced model for the edges of a model: two layers of each kind, in which far keys matter.

In a whole model an ignored window changes outputs by less than rounding: one of 4096 keys with
equal weights has 1/4096 of the attention, and a trained head looks elsewhere. Here the projections
of attentions are drawn anew and their scores have a standard deviation of SPREAD, so that a query
gives much of its weight to a few keys at any distance; which ones is random. Of thousands of
queries behind an edge, some give it to the keys that are wrong. Other weights are those of the
model.
"""

import copy
from contextlib import ExitStack
from typing import Any, Dict, List, Sequence, Tuple

import torch
from msgspec.structs import replace
from torch import Tensor

from posenc_export.export.describe import Model, eager
from posenc_export.export.sources import in_dtype
from posenc_export.models.attention import Attention
from posenc_export.models.embedding_and_head import Text
from posenc_export.models.stack import Stack
from posenc_export.reading.layer_contents import contents_of
from posenc_export.reading.parts import templates_of
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.runtime.verification.cells import outputs_by

SPREAD_IN_HALF = 1.0  # of scores in float16, whose rounding a larger one would amplify
SPREAD = 3.0  # of scores; with it, one of 4096 keys has a tenth of the weight of a typical query
# Token ids that are kept; the head of a large vocabulary would cost more than the layers.
VOCABULARY = 64
MEASURED = 64  # tokens on which the spread is measured
SEED = 20


def edge_model(model: Model, spread: float = SPREAD) -> Model:
    """Return the reduced model in float32, in eval mode; it shares weights that are not drawn."""
    chosen = _chosen(model) if isinstance(model, Stack) else []
    reduced = _with_layers(model, chosen) if isinstance(model, Stack) else model
    kept = {id(value): value for value in (*reduced.parameters(), *reduced.buffers())}
    edge = copy.deepcopy(reduced, {**kept, **_drawn(reduced), **_fewer_rows(reduced)})
    edge.source = {}
    if isinstance(edge, Stack):
        _complete(edge, chosen)
    edge = in_dtype(edge.eval(), "float32")
    _spread(edge, spread)
    return edge


def _chosen(model: Stack) -> List[int]:
    """Return the indices of two layers of each kind."""
    parts = contents_of([*model.layers])
    kinds = [*zip(model.config.kinds, model.mask_of, parts, strict=True)]
    templates = templates_of(kinds, kept=2)
    return sorted(set(templates))


def _with_layers(model: Stack, chosen: Sequence[int]) -> Stack:
    """Return a model with some layers of another one, which keep their weights."""
    shallow = copy.copy(model)
    layers = torch.nn.ModuleList(model.layers[index] for index in chosen)
    shallow._modules = {**model._modules, "layers": layers}
    shallow.mask_of = [model.mask_of[index] for index in chosen]
    shallow.layer_states = [model.layer_states[index] for index in chosen]
    return shallow


def _drawn(model: Model) -> Dict[int, Any]:
    """Return projections of variance 1 without biases, by the identities of the old ones."""
    generator, drawn = torch.Generator().manual_seed(SEED), {}
    for attention in model.attentions():
        for weight in attention.projection.parameters():
            if weight.dim() > 1:
                numbers = torch.randn(weight.shape, generator=generator) / weight.size(1) ** 0.5
                drawn[id(weight)] = _parameter(numbers.to(weight.dtype))
        for module in attention.projection.modules():
            if isinstance(module, torch.nn.Linear) and module.bias is not None:
                drawn[id(module.bias)] = _parameter(torch.zeros_like(module.bias))
    return drawn


def _fewer_rows(model: Model) -> Dict[int, Any]:
    """Return the token table and the head with fewer rows, by the identities of the old ones."""
    if not isinstance(model, Stack):
        return {}
    tables: List[Tensor] = [model.tokens.embedding.weight]
    if model.config.head is not None:
        linear: Any = model.head.linear
        tables += [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
    return {id(table): _parameter(table[:VOCABULARY].detach().clone()) for table in tables}


def _parameter(numbers: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(numbers, requires_grad=False)


def _complete(model: Stack, chosen: Sequence[int]) -> None:
    """Let the description and the sizes of modules agree with the weights."""
    config, model.text, model.stored = model.config, Text(), {}
    order = tuple(config.order[index] for index in chosen)
    model.tokens.embedding.num_embeddings = count = min(config.tokens.vocabulary, VOCABULARY)
    if config.head is not None:
        model.head.linear.out_features = count  # type: ignore[union-attr]
    tokens = replace(config.tokens, vocabulary=count)
    model.config = replace(config, order=order, tokens=tokens, readout=None)
    model.readout = None


def _spread(model: Model, spread: float) -> None:
    """Scale the scores of every attention to a standard deviation, measured on a few tokens."""
    inputs: List[Tuple[Attention, Tensor]] = []
    with ExitStack() as hooks, torch.no_grad():
        for attention in model.attentions():
            if isinstance(attention, Attention):
                hook = attention.register_forward_pre_hook(
                    lambda module, arguments: inputs.append((module, arguments[0]))
                )
                hooks.callback(hook.remove)
        module, manifest = eager(model)
        session = Loaded(TorchGraph(module, manifest)).session()
        outputs_by(session, manifest, {}, length=min(MEASURED, manifest.max_positions))
        for attention, x in inputs:
            q, k, _ = attention.projection(x)
            pairs = ((attention.q_norm, q), (attention.k_norm, k))
            sizes = [norm(heads).float().square().mean().sqrt() for norm, heads in pairs]
            products = float(sizes[0] * sizes[1]) * attention.head_size**0.5
            if products > 0:
                attention.scale = spread / products
