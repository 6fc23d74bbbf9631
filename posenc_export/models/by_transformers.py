"""Checkpoints as modules that transformers' own code computes.

Nothing is downloaded, and no code of a folder or a hub runs: classes come from the installed
transformers alone, by model_type and architectures. Files are read by models/checkpoint.py.
"""

import contextlib
import inspect
import itertools
import re
import warnings
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from posenc_export.models.checkpoint import BELONGS, WHERE, Checkpoint
from posenc_export.models.config import ReadoutConfig
from posenc_export.models.config_limits import TABLE, check_values
from posenc_export.models.embedding_and_head import Text
from posenc_export.models.encoder_decoder import OWN, Numbers, decoded, read_encoder
from posenc_export.models.gguf.checkpoint import GGUFCheckpoint
from posenc_export.models.replaced_layers import replace_experts, replace_transposed
from posenc_export.models.task_heads import (
    HEADS,
    LANGUAGE,
    SCORES,
    architecture,
    labels_of,
    scores_of,
    task_of,
)
from posenc_export.models.weight_blocks import Matrix
from posenc_export.shared.allocation import enough_memory
from posenc_export.shared.foreign import explained
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

OLDEST = (5, 20)  # version of transformers
INSTALL = "pip install 'posenc-export[transformers]'"
OF_TOKENS = "sound, images and series are not read; export a layer of it by export_model"
# Keys of config.json, at any depth, that name code, kernels, files or devices, and the form of
# outputs. Checkpoint reads quantization_config.
LEFT_OUT = re.compile(
    r"^auto_map$|^custom_|(kernel|fusion|distributed|quantization)_config$|_implementation(_|$)|"
    r"^transformers_weights$|^(use_)?return_dict$|^torchscript$"
)
# Keys for the number of positions.
LENGTHS = "max_position_embeddings n_positions max_seq_len n_ctx seq_length".split()
NO_NUMBERS = ("Infinity", "-Infinity", "NaN")
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# Keys of limits at which the computation changes, of a configuration or its rotation.
LIMITS = {
    "sliding_window": "window",
    "attention_chunk_size": "chunk",
    "original_max_position_embeddings": "original length",
}
SECTIONS = "mrope_section"  # of a rotation: numbers of pairs by coordinate
LONGROPE, DYNAMIC = "longrope", "dynamic"
TWICE = ("falcon",)  # types whose eager attention adds ALiBi twice, as that of transformers 5.24
OLD_BUFFER = re.compile(r"\.(attn\.masked_bias|rotary_emb\.inv_freq)$")
UNTIE = "set tie_word_embeddings to false"
TRIED = 6  # tokens of the run that says whether a model is causal
AnyCheckpoint = Checkpoint | GGUFCheckpoint


class TransformersModel(torch.nn.Module):
    """A model of transformers as a function of token ids alone, or of token ids and what an encoder
    gives.

    Args:
        model: a model in eval mode that takes input_ids, or of a decoder decoder_input_ids.
        vocabulary: number of token ids.
        max_positions: number of positions, or None if its configuration names none.
        keys_and_values: of an encoder, the layers of a decoder that read its hidden states. Their
            results, one after the other, are its output in place of hidden states.
        memory: of a decoder, the size of this output; its layers are `Numbers` of it. 0 for others.

    Attributes:
        head: whether outputs are logits, not hidden states.
        width: number of outputs for each token.
        segments: number of token types, 0 for one or none.
        axes: number of coordinates that rotate heads, 0 for positions.
        first: row of the first position in a table whose rows before belong to padding.
        labels: names of the logits, or none.
        readout: a second output, computed from hidden states without caches.
        after: what follows its pooling, a module of [B,S,E] that acts on each token.
        trained: the trained length of LongRoPE, 0 for other rotations.
        causal: whether outputs do not depend on later tokens, tried with numbers.
        text, source: as those of a Stack.
        stored: weights of few bits as the checkpoint has them, by name.
    """

    def __init__(
        self,
        model: Any,
        vocabulary: int,
        max_positions: int | None,
        keys_and_values: Sequence[torch.nn.Module] = (),
        memory: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.vocabulary, self.max_positions = model, vocabulary, max_positions
        self.keys_and_values, self.memory = torch.nn.ModuleList(keys_and_values), memory
        self.text = Text()
        self.source: dict[str, Any] = {}
        self.stored: dict[str, Matrix] = {}
        takes = inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in takes else {}
        self.segments, self.first, self.trained = 0, 0, 0
        self.labels: tuple[str, ...] = ()
        self.readout: ReadoutConfig | None = None
        self.after: torch.nn.Module | None = None
        ids = (vocabulary // 2 + torch.arange(TRIED)[None]) % vocabulary
        with torch.no_grad():
            outputs = self._outputs(ids)
            self.spans = "start_logits" in outputs
            self.head = self.spans or "logits" in outputs
            before = self(ids)[:, :-1]
            if (row := _first_row(model, max_positions)) and max_positions is not None:
                self.max_positions = max_positions - row
                self.first = row if "position_ids" in takes else 0
                if not torch.equal(self(ids)[:, :-1], before):
                    self.first = 0
            ids[:, -1] = (ids[:, -1] + 1) % vocabulary
            change = (self(ids)[:, :-1] - before).abs().max()
        self.causal = bool(change <= 1e-5 * before.abs().max())
        self.width = int(before.size(2))
        self.axes = self._axes(ids)
        types = getattr(_text(model.config), "type_vocab_size", 0) or 0
        if types > 1 and "token_type_ids" in takes and not self.causal:
            self.segments = types

    def _axes(self, ids: Tensor) -> int:
        """Return how many coordinates turn heads, in text all the position; 0 for none, another
        meaning of position_ids, or outputs that do not depend on them. ids: [1,S] int64.
        """
        named = (getattr(part, SECTIONS, None) for part in self.model.modules())
        sections = next((each for each in named if each), ())
        axes = len(next(iter(sections.values())) if isinstance(sections, dict) else sections)
        if not axes:
            return 0
        try:
            places = torch.arange(ids.size(1)).expand(axes, 1, -1)
            with torch.no_grad():
                text, y, moved = self(ids), self(ids, places), self(ids, 2 * places)
            same = y.shape == text.shape and torch.allclose(y, text, rtol=1e-5, atol=1e-5)
            return axes if same and not torch.equal(moved, text) else 0
        except (IndexError, RuntimeError):  # raised by torch for another number of axes
            return 0

    def choose_factors(self) -> None:
        """Give rotations that transformers chooses in each call the same factors for all positions.
        LongRoPE gets its long ones if max_positions is above the trained length.

        Raises:
            ValueError: more positions than the trained length of dynamic rotations, whose factors
                depend on the length of a call from there on.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        modules: Iterator[Any] = self.modules()
        for part in [part for part in modules if hasattr(part, "original_max_seq_len")]:
            most = part.original_max_seq_len
            if DYNAMIC in str(part.rope_type) and self.max_positions > most:
                rule = f"at most {most} positions, the trained length of its dynamic rotations"
                remedy = f"set max_positions to {most}; longer calls rotate all their tokens anew"
                raise refusal(WHERE, rule, self.max_positions, remedy)
            if part.rope_type == LONGROPE:
                config = part.config
                self.trained = config.rope_parameters["original_max_position_embeddings"]
                part.inv_freq, _ = ROPE_INIT_FUNCTIONS[LONGROPE](config, seq_len=self.max_positions)
            if part.rope_type in (LONGROPE, DYNAMIC):
                part.rope_type = "default"  # which transformers leaves as it is

    @property
    def decodes(self) -> bool:
        """Whether outputs are logits of the next token."""
        return self.head and self.causal and self.width == self.vocabulary

    @property
    def ids(self) -> int:
        """Number of the ids that forward takes."""
        return self.vocabulary * max(self.segments, 1)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the model in its configuration."""
        config = _text(self.model.config)
        return {name: getattr(config, name) for name in SIZES if hasattr(config, name)}

    @property
    def edges(self) -> dict[str, int]:
        """The limits in its configuration, by name."""
        return limits_of(_text(self.model.config))

    def forward(
        self, ids: Tensor, beside: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """ids [B,S] int64 -> logits [B,S,V] float32, or hidden states [B,S,E] without a head. Of a
        model with segments, the vocabulary times the segment is added to an id. beside: coordinates
        [axes,B,S] int64 of a model with axes, None for the positions; or the output of an encoder
        [B,M,memory], with a mask [B,M] of 1 at tokens and 0 at padding.
        """
        options: dict[str, Any] = {}
        if beside is not None and not self.memory:
            options["position_ids"] = beside
        if self.segments:
            options["token_type_ids"] = torch.div(ids, self.vocabulary, rounding_mode="floor")
            ids = ids % self.vocabulary
        if self.first:  # which counts all tokens, where transformers counts those of other ids
            options["position_ids"] = (torch.arange(ids.size(1)) + self.first).expand(ids.shape)
        outputs = self._outputs(ids, *([beside, mask] if self.memory else []), **options)
        if self.spans:
            return torch.stack((outputs.start_logits, outputs.end_logits), 2)
        result: Tensor = outputs.logits if self.head else outputs.last_hidden_state
        if self.keys_and_values:
            return torch.cat([layer(result) for layer in self.keys_and_values], -1)
        return result

    def _outputs(
        self, ids: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, **options: Any
    ) -> Any:
        """Return the outputs of the model. memory: encoder outputs; None for a token of zeros."""
        options |= self.options
        if not self.memory:
            return self.model(input_ids=ids, **options)
        if memory is None:
            memory = torch.zeros(len(ids), 1, self.memory)
        return decoded(self.model, ids, memory, mask, **options)


def limits_of(config: Any) -> dict[str, int]:
    """Return the limits in a configuration of transformers, by name."""
    rotation = getattr(config, "rope_parameters", None) or {}
    found = {name: limit(config, key) or rotation.get(key) for key, name in LIMITS.items()}
    return {f"{name} {at}": at for name, at in found.items() if type(at) is int}


def limit(config: Any, key: str) -> Any:
    """Return an attribute of a configuration; None if it has none, or if layers differ in it."""
    try:
        return getattr(config, key, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError of transformers
        return None


class Kind(NamedTuple):
    """What a config.json means to transformers: a configuration, the class of its model, with its
    head or without, and the keys that it does not read.
    """

    config: Any
    model: Any
    head: bool
    unread: Sequence[str]

    @property
    def task(self) -> str:
        return task_of(self.model.__name__) if self.head else ""

    @property
    def vocabulary(self) -> int:
        return int(_text(self.config).vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The number of positions that the configuration names, or None."""
        named = [getattr(_text(self.config), name, None) for name in LENGTHS]
        return next((length for length in named if type(length) is int and length > 0), None)

    def empty(self) -> Any:
        """Return the model on the meta device. ValueError: transformers does not build it."""
        with _calls("a config.json from which transformers builds a model"), torch.device("meta"):
            return self.model(self.config)

    def described(self) -> dict[str, Any]:
        """Return what `posenc describe` prints."""
        parameters = sum(parameter.numel() for parameter in self.empty().parameters())
        described = {
            "kind": "module",
            "name": self.model.__name__,
            "tokens": {"vocabulary": self.vocabulary},
            "max_positions": self.max_positions,
            "parameters": parameters,
            "read": f"by transformers {version()}",
        }
        return {**described, "not read": [*self.unread]} if self.unread else described


def kind_of(values: Mapping[str, Any], head: bool = True) -> Kind:
    """Return what a config.json means to transformers.

    Args:
        values: contents of config.json.
        head: False for the model without its head.

    Raises:
        ValueError: a type or a class that transformers lacks; a model whose input is not token
            ids, or whose output is not one row for each token; values that its class refuses.
        ModuleNotFoundError: there is no transformers, or one older than OLDEST.
    """
    name = check_type(values)
    check_values(WHERE, values)
    with _calls(f"a config.json that transformers reads as {name!r:.80}"):
        from transformers import CONFIG_MAPPING

        config = CONFIG_MAPPING[name].from_dict(without_code(dict(values)))
        given = inspect.signature(type(config)).parameters
        unread = {*vars(config)} & {*values} - {*given, "model_type"}
        return Kind(config, *_class(values, config, head), sorted(unread))


def load(kind: Kind, checkpoint: AnyCheckpoint, part: str | None = None) -> TransformersModel:
    """Return the model with the tensors of a checkpoint, which stay mapped if they are float32.

    Args:
        part: "encoder" or "decoder" of a model with both, as for from_pretrained; None for the
            whole of others, and for the encoder with hidden states as output.

    Raises:
        ValueError: tensors are missing, unknown or have another shape or dtype; too few for the
            sizes in config.json; the input is not token ids; a part that the model lacks.
    """
    base, names = f"{kind.model.base_model_prefix}.", checkpoint.names()
    layers = getattr(_text(kind.config), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > (count := len(checkpoint.sizes())):
        rule = f"files with at least {layers} tensors for the layers in config.json"
        raise refusal(WHERE, rule, count, BELONGS)
    empty = kind.empty()
    named = any(name.startswith(base) for name in names)
    _check(empty, checkpoint)
    if isinstance(checkpoint, GGUFCheckpoint):  # which has no names of transformers
        shapes = {name: tuple(one.shape) for name, one in empty.named_parameters()}
        checkpoint.place(shapes, base)
    tensors = {name: _Named(checkpoint, name) for name in checkpoint.names()}
    with _calls("weights that transformers reads"), enough_memory(WHERE):
        model, found = kind.model.from_pretrained(
            None,
            config=kind.config,
            state_dict=tensors,
            dtype=torch.float32,
            attn_implementation="sdpa" if kind.config.model_type in TWICE else "eager",
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
        )
        if model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")
            replace_experts(model)
        replace_transposed(model)
    apart = sorted({*empty.all_tied_weights_keys} - {*model.all_tied_weights_keys})
    # T5 is tied whatever its configuration says, unless the tensors differ.
    if apart and checkpoint.config.get("tie_word_embeddings") is not False:
        rule, remedy = f"{apart[0]} to equal the weight that it is tied to", UNTIE
        raise refusal(WHERE, rule, "different tensors", remedy)
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        rule = f"{name} with shape {list(wanted)} by config.json"
        raise refusal(WHERE, rule, list(stored), BELONGS)
    # Early versions of transformers saved buffers, which are computed now.
    buffers, held = {name for name, _ in model.named_buffers()}, model.state_dict()
    with _calls("a model that reads token ids"):
        wrapped = _wrapped(kind, model.eval(), part)
    missing = {*found["missing_keys"]}
    if missing and _is_unread(wrapped, [held[name] for name in missing]):
        missing = set()  # as those of a pooler beside hidden states
    extra = {name for name in found["unexpected_keys"] if not OLD_BUFFER.search(name)} - buffers
    if not kind.head and named:
        extra = {name for name in extra if name.startswith(base)}
    elif named and kind.task not in LANGUAGE:
        extra = {name for name in extra if not _of_another_head(name, base, model)}
    if isinstance(checkpoint, Checkpoint):
        checkpoint.check_names(missing, extra, len(held))
    wrapped.stored = _stored(wrapped, base, checkpoint)
    return wrapped


def _wrapped(kind: Kind, model: Any, part: str | None) -> TransformersModel:
    """Return a model, or a part of one with encoder and decoder."""
    both, further = model.config.is_encoder_decoder, dict[str, Any]()
    scores = None
    if kind.task == SCORES:
        model, scores = model.base_model, scores_of(model, kind.vocabulary)
    if part is not None and not both:
        rule = f"a model with encoder and decoder for part {part}"
        raise refusal(WHERE, rule, kind.model.__name__, "leave part out")
    if part is not None:
        layers = read_encoder(model)
        sizes = [layer.out_features for layer in layers.values()]
        if part == "encoder":
            further = {"keys_and_values": [*layers.values()]}
        else:
            further = {"memory": sum(sizes)}
            for end, size, name in zip(itertools.accumulate(sizes), sizes, layers, strict=True):
                model.set_submodule(name, Numbers(end - size, end))
    if both and part != "decoder":
        model = model.get_encoder()
    # Messages and descriptions name the class of transformers.
    place: Any = {"__module__": kind.model.__module__}
    own: Any = type(kind.model.__name__, (TransformersModel,), place)
    wrapped: TransformersModel = own(model, kind.vocabulary, kind.max_positions, **further)
    labels = labels_of(kind.config, kind.task)
    if scores is not None:
        wrapped.after, pooling = scores
        wrapped.readout = ReadoutConfig(output="logits", pooling=pooling, size=len(labels))
    wrapped.labels = labels if wrapped.head or scores else ()
    return wrapped.eval()


def _of_another_head(name: str, base: str, model: Any) -> bool:
    """Return whether a tensor that a model lacks is of a pooler or beside its base model, named
    `base`, and its heads.
    """
    owners = {owner for owner, _ in model.named_modules()}
    beside = not name.startswith(base) and name.rpartition(".")[0] not in owners
    return beside or name.startswith(f"{base}pooler.")


def _stored(model: TransformersModel, base: str, checkpoint: AnyCheckpoint) -> dict[str, Matrix]:
    """Return the weights of a model that are matrices of a quantized checkpoint, by their names,
    all of a tied one. base: what names in the checkpoint may have or lack.
    """
    weights, names = {}, {*checkpoint.names()}
    for name, weight in model.named_parameters(remove_duplicate=False):
        plain = name.removeprefix("model.")
        spelled = (plain, plain.removeprefix(base), base + plain)
        theirs = next((one for one in spelled if one in names), None)
        matrix = None if theirs is None else checkpoint.matrix(theirs)
        if matrix is not None and matrix.rows == len(weight):
            weights[id(weight)] = matrix
    of_each = model.named_parameters(remove_duplicate=False)
    return {name: weights[id(one)] for name, one in of_each if id(one) in weights}


def _is_unread(model: TransformersModel, weights: Iterable[Tensor]) -> bool:
    """Return whether outputs read none of some weights, which become NaN."""
    with torch.no_grad():
        for weight in weights:
            weight.fill_(torch.nan)
        y = model(torch.arange(TRIED)[None] % model.vocabulary)
        y = y if model.after is None else model.after(y)
    return bool(y.isfinite().all())


def _first_row(model: Any, length: int | None) -> int:
    """Return the row of the first position in the table of positions, whose rows before belong to
    padding, as in RoBERTa; 0 without such a table.
    """
    tables = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    rows = [table.padding_idx for table in tables if table.num_embeddings == length]
    return max((row + 1 for row in rows if row is not None), default=0)


class _Named:
    """A tensor of a checkpoint, which transformers reads by [...]."""

    def __init__(self, checkpoint: AnyCheckpoint, name: str) -> None:
        self.checkpoint, self.name = checkpoint, name

    def __getitem__(self, _: Any) -> Tensor:
        return self.checkpoint.tensor(self.name)


def version(why: str = "") -> str:
    """Return the version of transformers. ModuleNotFoundError: none, or one older than OLDEST."""
    try:
        import transformers

        found = transformers.__version__
    except ModuleNotFoundError:
        found = "none"
    if found == "none" or tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        rule = f"{WHERE}: expected transformers {'.'.join(map(str, OLDEST))} or newer{why}"
        raise ModuleNotFoundError(f"{rule}, got {found}; {INSTALL}", name="transformers")
    return str(found)


def without_code(values: Any) -> Any:
    """Return the content of config.json without the keys LEFT_OUT, at any depth, with infinities as
    transformers writes them ({"__float__": "Infinity"}) as numbers.
    """
    if isinstance(values, list):
        return [without_code(value) for value in values]
    if not isinstance(values, dict):
        return values
    if values.keys() == {"__float__"} and values["__float__"] in NO_NUMBERS:
        return float(values["__float__"])
    return {key: without_code(values[key]) for key in values if not LEFT_OUT.search(key)}


@contextlib.contextmanager
def _calls(rule: str) -> Iterator[None]:
    """Context manager for calls of transformers, offline and without reports. Its errors become a
    ValueError: expected `rule`; those of this package stay as they are.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import StrictDataclassError
    from transformers.utils import logging

    online, told, bars = (
        constants.HF_HUB_OFFLINE,
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
    )
    constants.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    errors = (ImportError, OSError, StrictDataclassError)
    try:
        with explained(f"{WHERE}: expected {rule}", BELONGS, *errors), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as torch's of weights without numbers
            yield
    finally:
        constants.HF_HUB_OFFLINE = online
        logging.set_verbosity(told)
        if bars:
            logging.enable_progress_bar()


def _text(config: Any) -> Any:
    """Return the configuration of the part that reads token ids."""
    return config.get_text_config(decoder=True)


def check_type(values: Mapping[str, Any]) -> str:
    """Return the model_type of a config.json. ValueError: transformers does not know it.
    ModuleNotFoundError: as for kind_of.
    """
    name = values.get("model_type")
    rule = f"model_type to be a type of transformers {version(f' to read model_type {name!r:.80}')}"
    from transformers import CONFIG_MAPPING

    if isinstance(name, str) and name in CONFIG_MAPPING:
        return name
    if values.get("auto_map"):
        got = f"{name!r:.80}, whose code is a file of its own (auto_map) and never runs"
        raise refusal(WHERE, rule, got, OWN)
    raise refusal(WHERE, rule, f"{name!r:.80}", suggestion(name, CONFIG_MAPPING))


def _class(values: Mapping[str, Any], config: Any, head: bool) -> tuple[Any, bool]:
    """Return the class of a model, and whether it has its head: the first of architectures, else
    that for language, else the base; the base without a head, or for a head that gives no logits
    for each token.
    """
    import transformers

    name, base = architecture(values), transformers.MODEL_MAPPING.get(type(config), None)
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind: Any = base if not head else getattr(transformers, name, None)
    if head and not name:
        kind = causal or base
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not known or not (isinstance(config, kind.config_class or ()) or _serves(kind, config)):
        rule = f"architectures to be a class of transformers for {values['model_type']}"
        raise refusal(WHERE, rule, f"{name!r:.80}", OWN)
    inputs = [*inspect.signature(kind.forward).parameters][1:]
    if "input_ids" not in inputs:
        raise refusal(WHERE, f"{kind.__name__} to read input_ids", ", ".join(inputs[:3]), OF_TOKENS)
    if head and name and not (name.endswith("Model") or "LMHead" in name or kind is causal):
        head = base is None or task_of(name) in (LANGUAGE if config.is_encoder_decoder else HEADS)
    return (kind if head or not name else base), head


def _serves(kind: Any, config: Any) -> bool:
    """Return whether an auto class of transformers maps the model_type of a config to a class."""
    from transformers.models.auto import modeling_auto

    mappings = [
        names for key, names in vars(modeling_auto).items() if key.endswith("_MAPPING_NAMES")
    ]
    return any(names.get(config.model_type) == kind.__name__ for names in mappings)


def _check(empty: Any, checkpoint: AnyCheckpoint) -> None:
    """Check a model on the meta device before its memory is allocated."""
    stored = sum(checkpoint.sizes())
    for what, tensors, most in (
        ("weights", empty.parameters(), stored + TABLE),  # tables may be left out of files
        ("tables of positions", empty.buffers(), TABLE),
    ):
        if (count := sum(tensor.numel() for tensor in tensors)) > most:
            rule = f"{what} of at most {most} numbers for files with {stored}"
            raise refusal(WHERE, rule, f"{count} by config.json", BELONGS)
