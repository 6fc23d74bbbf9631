"""A torch module that was read, as a model that the stages of an export take."""

import contextlib
import copy
import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from posenc_export import encodings, ops
from posenc_export.encodings.shared.base import Geometry, PositionEncoding, StateSpec
from posenc_export.models.block import AttentionBlock
from posenc_export.models.by_transformers import TransformersModel
from posenc_export.models.config import CacheConfig, ModuleConfig, ReadoutConfig
from posenc_export.models.parameters import fill, slots
from posenc_export.models.parts.readout import POOLINGS, Readout
from posenc_export.models.stack import Stack, Text
from posenc_export.models.weight_blocks import Matrix
from posenc_export.models.whole_pass import check_dtype
from posenc_export.reading.exact import in_float64
from posenc_export.reading.halves import in_half, rounded_weights
from posenc_export.reading.products import Products
from posenc_export.reading.read import CachedModule, read_module
from posenc_export.reading.script import with_source
from posenc_export.runtime.artefact.graph_inputs import HIDDEN, KEYS_AND_VALUES
from posenc_export.shared.allocation import memory_kept
from posenc_export.shared.places import seen
from posenc_export.shared.refusal import refusal, short_repr

LENGTH, LEAST = 16, 4  # tokens of an example that is drawn; fewest positions
SEED = 0
OF_MODULE = "calls."  # begins the names of the weights of the module that was read
MATRICES = 4  # assumed matrices per layer, where `extent` cannot count layers


@dataclass(frozen=True)
class ReadAs:
    """How a torch module is read.

    Args:
        example: an input of the module: token ids int64 [B,S], or hidden states float32 [B,S,E].
            None draws token ids for a module that begins with their embedding.
        max_positions: number of positions; the range is 0 .. max_positions - 1.
        positions: name of the argument of forward that takes positions [B,S]; None if the module
            counts them from 0.
        axes: number of coordinates A of each token, if this argument takes them [A,B,S]; 0 for
            positions.
        causal: whether no token sees a later one.
        output: name of the output of a forward that returns several; None for the first that has
            a row for each token.
        memory: as for reading.read.read_module.
    """

    example: Tensor | None = field(default=None, compare=False)
    max_positions: int | None = None
    positions: str | None = None
    causal: bool = True
    output: str | None = None
    axes: int = 0
    memory: int = 0


@dataclass(frozen=True)
class CachedLayer:
    """The caches of a layer. It takes the place of an attention of this package."""

    specs: tuple[StateSpec, ...]
    encoding: PositionEncoding  # without effect: the graph has the module's own encoding

    def states(self) -> list[StateSpec]:
        """Return the caches."""
        return list(self.specs)


class ReadModule(CachedModule):
    """A module that was read, with the attributes and methods of a model of this package.

    Args:
        name: qualified name of its class.
        how: how it was read.
        read: arguments of CachedModule.

    Attributes:
        products: the linear layers and tables of the module, by the names of their weights.
    """

    __jit_unused_properties__ = ["token_encoding"]

    def __init__(self, name: str, how: ReadAs, *read: Any) -> None:
        super().__init__(*read)
        self.axes, self.with_position = self.captured.axes, False
        self.coordinate_range, self.embed_states, self.segments = 0, 0, 0
        self.source: dict = {}
        self.text = Text()
        self.stored: dict[str, Matrix] = {}  # weights of a quantized checkpoint
        self.sizes: dict[str, int] = {}  # sizes of a checkpoint for config.json
        self.trained = 0  # length of LongRoPE, if it has one
        ids, width, most = self.vocabulary, self.width, self.max_positions
        geometry = Geometry(max(width, 1), 1, max(width, 1), most, causal=how.causal)
        none = encodings.build_all((), geometry)
        caches = [CacheConfig(*c) for c in self.caches]
        self.layers = [
            CachedLayer(tuple(map(_state, (own for own in caches if own.layer == layer))), none)
            for layer in dict.fromkeys(cache.layer for cache in caches)
        ]
        self.encoding_of_tokens = (none,)  # no submodule, since it has no numbers
        self.config = ModuleConfig(
            name=name,
            width=width,
            tokens={"vocabulary": ids, "segments": 0} if ids else {},
            outputs=self.outputs,
            max_positions=most,
            caches=tuple(caches),
            edges={f"length {number}": number for number in self.captured.lengths},
            remedies=tuple(self.captured.remedies),
            positions=how.positions,
            causal=how.causal,
            output=how.output,
            axes=how.axes,
        )
        self.products = Products(self.captured)
        self.changed: set[str] = set()  # names of parameters whose numbers differ from the module's
        self.dtype = torch.float32  # of products, caches, hidden states and outputs
        self.output_name = "logits" if self.config.decodes else "output"
        self.eval()  # otherwise `in_dtype` of sources.py would copy it

    def attentions(self) -> list[Any]:
        """Return the caches of each layer."""
        return list(self.layers)

    def sees(self) -> list[str]:
        """Return for each layer the rule (shared/places.py) of the keys that its attention sees, as
        it was read. Empty for a layer without attention, or if a bias decides which keys it sees.
        """
        attends = [node for node in self.flat.nodes if node.target is ops.attend]
        masks = [node.args[3].args[2:] for node in attends]  # bias, like, before, after, chunk
        rules = ["" if bias is not None else seen(*limits) for bias, _, *limits in masks]
        kinds = [layer.specs[0].grows for layer in self.layers] or [True] * len(rules)
        if sum(kinds) != len(rules):  # attention that was not recognized as a whole
            return [""] * len(kinds)
        return [rules.pop(0) if keys else "" for keys in kinds]

    @property
    def token_encoding(self) -> PositionEncoding:
        """The encoding of tokens, which has no effect."""
        return self.encoding_of_tokens[0]

    def weight_dtype(self) -> torch.dtype:
        """Return the dtype of products, caches, hidden states and outputs."""
        return self.dtype

    def in_dtype(self, dtype: torch.dtype) -> "ReadModule":
        """Return the model with products and caches in a dtype (reading.halves), and the weights of
        these products rounded to it. Other weights and tables are shared.
        """
        other = copy.copy(self)
        other._modules, other.changed, other.dtype = dict(self._modules), set(self.changed), dtype
        rounded = rounded_weights(self.flat, self._trained())
        if dtype != torch.float32:
            other.changed |= {OF_MODULE + name for name in rounded}
        other.calls = with_source(GraphModule(self.calls, other.in_own_dtype(self.flat)))
        places = slots(other.calls)
        for name in rounded:
            weight = other.calls.get_parameter(name)
            own = torch.nn.Parameter(weight.to(dtype), weight.requires_grad)
            fill(places[id(weight)], own)
        other.readout = None if self.readout is None else self.readout.in_dtype(dtype)
        return other.eval()

    def in_own_dtype(self, graph: Graph) -> Graph:
        """Return a flat graph of some or all layers with products and caches in its dtype."""
        is_plain = self.dtype == torch.float32
        return graph if is_plain else in_half(graph, self.dtype, self._trained())

    def traced_once(self) -> "ReadModule":
        """Return the model for a trace, which computes one of the layers that are alike and marks
        the others (ops/layers.py).
        """
        repeated, held = self.repeated, self.calls.state_dict()
        if repeated is None:
            return self
        for names in repeated.weights:
            pairs = ((held[first], held[own]) for first, own in names.items())
            if any((a.dtype, a.shape) != (b.dtype, b.shape) for a, b in pairs):
                return self  # since they were rounded
        other = copy.copy(self)
        graph = repeated.whole(self.in_own_dtype(repeated.graph), marks=True)
        other._modules = {**self._modules, "calls": with_source(GraphModule(self.calls, graph))}
        return other

    def _trained(self) -> set[str]:
        """Return the names of the weights that may be rounded."""
        routers = self.products.routers
        return {name for name in self.captured.parameters if name not in routers}

    def weights(self) -> list[Tensor]:
        """Return the parameters of the module, without tables and constants of its code."""
        return list(self.by_name(self.captured.parameters).values())

    def by_name(self, names: Iterable[str]) -> dict[str, torch.nn.Parameter]:
        """Return weights by their names here. names: those in the module that was read. Tables that
        only positions are looked up in are left out.
        """
        held = dict(self.named_parameters())
        own = (f"{OF_MODULE}{name}" for name in names)
        return {name: held[name] for name in own if name in held}

    def step_weights(self) -> int:
        """Count the weights that a step reads: every matrix once, one row of the token table."""
        total = sum(weight.numel() for weight in self.weights())
        products = self.products
        heads = self.by_name(products.linear)
        for name, table in self.by_name(products.tables).items():
            total += table.size(1) - (0 if name in heads else table.numel())
        return int(total)

    def extent(self) -> tuple[int, int]:
        """Return the depth and the length of the longest sum, on which tolerances depend."""
        sums = [w.numel() // w.size(0) for w in self.weights() if w.dim() > 1]
        depth = max(len(self.layers), math.ceil(len(sums) / MATRICES), 1)
        return depth, max(sums, default=1)

    def exact(
        self,
        x: np.ndarray,
        positions: range,
        places: Sequence[Any],
        segments: np.ndarray | None = None,
        encoded: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return outputs [n,N] of the module itself for a row x [n] or [n,E] from position 0 on.
        What depends on tokens is computed in float64. places: coordinates, for a module with axes.
        encoded: outputs of an encoder [Q,N], for one that reads them.
        """
        assert positions.start == 0, "a module counts positions from 0"
        row, captured = torch.from_numpy(np.array(x))[None], self.captured
        row = row.float() if row.is_floating_point() else row  # as the module takes float16
        if segments is not None:
            row = row + self.vocabulary * torch.from_numpy(np.array(segments))[None]
        if self.changed:
            changed = {n.removeprefix(OF_MODULE): self.get_parameter(n) for n in self.changed}
            captured = captured.with_weights(changed)
        beside: tuple[Tensor, ...] = (torch.tensor(places).t()[:, None],) if self.axes else ()
        if encoded is not None:
            memory = torch.from_numpy(encoded.astype(np.float32))[None]
            beside = memory, torch.ones(memory.shape[:2], dtype=torch.int64)
        with memory_kept():
            exact = in_float64(functools.partial(captured.whole, beside=beside), row)
            return np.asarray(exact[0].numpy())


def _state(cache: CacheConfig) -> StateSpec:
    """Return the state of a cache. States of recurrences stay float32."""
    sizes = tuple(size for size in (cache.heads, cache.size, cache.values) if size)
    dtype = "float32" if cache.heads and cache.values else ""
    return StateSpec(cache.name, sizes, grows=not cache.values, dtype=dtype)


Model = Stack | AttentionBlock | ReadModule
KNOWN = (Stack, AttentionBlock, ReadModule)


def as_model(model: Any, how: ReadAs = ReadAs()) -> Model:
    """Return a model of this package unchanged, and read any other module as it is.

    Raises:
        ValueError: `model` is no module, has weights in float64, or cannot be read; `how` is given
            for a model of this package.
    """
    if isinstance(model, KNOWN):
        if how.example is not None or how != ReadAs():
            rule = "example, max_positions, positions, axes, causal and output for your own module"
            raise refusal("export", rule, f"them for {type(model).__name__}", "leave them out")
        if not isinstance(model, ReadModule):
            check_dtype(model)
        return model
    if not isinstance(model, torch.nn.Module):
        rule = "a Stack, an AttentionBlock or another torch.nn.Module"
        an = "an instance of it" if isinstance(model, type) else "such an object"
        raise refusal("export", rule, short_repr(model), f"pass {an}")
    kind = type(model)
    where, name = f"module {kind.__qualname__}", f"{kind.__module__}.{kind.__qualname__}"
    _check(model, where)
    if isinstance(model, TransformersModel):
        most = how.max_positions or model.max_positions
        positions = "beside" if model.axes else None
        how = replace(how, max_positions=most, positions=positions, axes=model.axes)
        how = replace(how, causal=model.causal and not model.readout, memory=model.memory)
    if not isinstance(how.max_positions, int) or how.max_positions < LEAST:
        rule = f"max_positions to be a whole number of at least {LEAST}"
        remedy = "give max_positions=N, or --max-positions N, for positions 0 .. N-1"
        raise refusal(where, rule, repr(how.max_positions), remedy)
    if not isinstance(how.causal, bool):
        raise refusal(where, "causal to be True or False", repr(how.causal))
    plain = copy.deepcopy(model).eval() if any(p.training for p in model.modules()) else model
    example = how.example
    if example is None:
        most = how.max_positions
        known = plain.ids if isinstance(plain, TransformersModel) else 0
        example = _random(known or _vocabulary(plain, where, most), most)
    made = read_module(
        plain,
        example,
        how.max_positions,
        positions=how.positions,
        axes=how.axes,
        causal=how.causal,
        output=how.output,
        memory=how.memory,
        make=functools.partial(ReadModule, name, how),
    )
    if isinstance(model, TransformersModel):
        _complete(made, model)
    return made


def _complete(made: ReadModule, model: TransformersModel) -> None:
    """Add what only a checkpoint has: tokenizer, token types, names of outputs and labels, a
    readout.
    """
    made.text, made.source, made.segments = model.text, model.source, model.segments
    made.sizes, made.trained = model.sizes, model.trained
    made.stored = {OF_MODULE + name: weight for name, weight in model.stored.items()}
    hidden = KEYS_AND_VALUES if model.keys_and_values else HIDDEN
    made.output_name = "logits" if model.head else hidden
    edges = {**made.config.edges, **model.edges}
    made.config = msgspec.structs.replace(made.config, labels=model.labels, edges=edges)
    if model.segments:
        tokens = {"vocabulary": model.vocabulary, "segments": model.segments}
        made.vocabulary = model.vocabulary
        made.config = msgspec.structs.replace(made.config, tokens=tokens)
    if model.readout is not None:
        read_out(made, model.readout, model.after)


def read_out(made: ReadModule, config: ReadoutConfig, after: torch.nn.Module | None) -> None:
    """Give a model without caches a second output.

    Args:
        after: what follows the pooling, a module of [B,S,E] that acts on each token, or None.
    """
    if after is not None:
        example = _random(0, LENGTH, made.outputs)
        after = as_model(after, ReadAs(example, LENGTH, causal=False))
    made.readout = Readout(POOLINGS[config.pooling](), after)
    made.config = msgspec.structs.replace(made.config, readout=config)


def read_again(model: Any, described: Mapping[str, Any]) -> Model:
    """Return a model as `as_model` does, with arguments for reading from a described module."""
    known = isinstance(model, KNOWN)
    if known or described.get("kind") != "module" or not isinstance(model, torch.nn.Module):
        return as_model(model)
    most = described["max_positions"]
    of: Any = model if isinstance(model, TransformersModel) else None
    ids = of.ids if of else described["tokens"].get("vocabulary", 0)
    example = _random(ids, most, described["width"])
    positions, output = described.get("positions"), described.get("output")
    causal, axes = bool(described.get("causal", True)), described.get("axes", 0)
    return as_model(model, ReadAs(example, most, positions, causal, output, axes))


def _check(module: torch.nn.Module, where: str) -> None:
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if dtypes and torch.float32 not in dtypes:
        got = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        remedy = "call .float() and pass the artefact's dtype to export"
        raise refusal(where, "float32 weights", got, remedy)


def _random(vocabulary: int, most: int, width: int = 0) -> Tensor:
    """Draw token ids [2,S], or hidden states [2,S,E] without a vocabulary."""
    generator, shape = torch.Generator().manual_seed(SEED), (2, min(LENGTH, most))
    if vocabulary:
        return torch.randint(vocabulary, shape, generator=generator)
    return torch.randn(*shape, width, generator=generator)


def _vocabulary(module: torch.nn.Module, where: str, most: int) -> int:
    """Return the number of token ids of a module that begins with their embedding. ValueError: it
    does not. most: number of positions.
    """
    sizes: list[Any] = []
    ids = torch.zeros((2, min(LENGTH, most)), dtype=torch.int64)
    held = ids.untyped_storage().data_ptr()

    def note(part: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0] if inputs and isinstance(part, torch.nn.Embedding) else None
        if isinstance(x, Tensor) and x.untyped_storage().data_ptr() == held:  # ids or a view
            sizes.append(part.num_embeddings)

    hooks = [part.register_forward_pre_hook(note) for part in module.modules()]
    # A module that fails here takes no ids, or has looked them up in a table before.
    with contextlib.suppress(Exception), torch.no_grad():
        module(ids)
    for hook in hooks:
        hook.remove()
    if not sizes:
        rule = "an example, unless forward begins with the embedding of token ids"
        remedy = "give example=x, token ids int64 [B,S] or hidden states float32 [B,S,E]"
        raise refusal(where, rule, "none", remedy)
    return int(min(sizes))
