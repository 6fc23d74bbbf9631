"""A config.json on its way to a description: each key is taken once, and what nobody took is refused by name."""

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import msgspec

from posenc_export.models.config import LayerConfig
from posenc_export.models.hugging_face import Spec, rope_spec

# Keys that say nothing about the computation of logits from tokens.
IGNORED = frozenset(
    """_attn_implementation _name_or_path _num_labels activation_dropout architectures attention_dropout attention_probs_dropout_prob aux_loss_alpha
    attn_implementation attn_pdrop auto_map bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout custom_pipelines
    decoder_start_token_id dropout dtype emb_pdrop embd_pdrop eos_token_id ep_size gradient_checkpointing hidden_dropout hidden_dropout_prob id2label
    init_config init_device init_std initializer_range is_llama_config keys_to_ignore_at_inference label2id layerdrop output_attentions
    output_hidden_states output_past output_router_logits pad_token_id prefix pretraining_tp problem_type resid_pdrop return_dict
    router_aux_loss_coef router_jitter_noise seq_aux summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tokenizer_class tokenizer_name torch_dtype transformers.js_config transformers_version unk_token_id use_cache verbose""".split()
)
# Other spellings of keys that families share.
SPELLINGS = {
    **{name: "num_hidden_layers" for name in ("n_layer", "n_layers", "num_layers")},
    **{name: "hidden_size" for name in ("n_embd", "n_embed", "d_model", "dim")},
    **{name: "num_attention_heads" for name in ("n_head", "n_heads", "attention_heads", "num_heads")},
    **{name: "max_position_embeddings" for name in ("n_positions", "max_seq_len", "n_ctx", "seq_length")},
    **{name: "intermediate_size" for name in ("n_inner", "ffn_dim", "d_ff", "hidden_dim", "d_inner")},
    "num_experts": "num_local_experts",
}
ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "original_max_position_embeddings")
GIVEN = object()  # the default of a key that a config must have
# Activations by their names in transformers: ours.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu"}


class Settings:
    """The keys of a config.json.

    Args:
        values: the whole configuration.
        max_positions: of the model that is made; max_position_embeddings where None.

    Raises:
        ValueError: max_positions that is no whole number.
    """

    def __init__(self, values: Mapping[str, Any], max_positions: Optional[int] = None) -> None:
        self.family = str(values.get("model_type"))
        self.padding_id = values.get("pad_token_id", GIVEN)
        self._left = {key: value for key, value in values.items() if key != "model_type" and key not in IGNORED}
        for other, key in SPELLINGS.items():
            if other in self._left:
                value = self._left.pop(other)
                if self._left.setdefault(key, value) != value:
                    raise ValueError(f"{self.family}: {other} and {key} are one thing, got {value!r} and {self._left[key]!r}; remove one")
        self.layers, self.width, self.heads = (self.whole(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        self._left.setdefault("max_position_embeddings", None)  # a missing one is 0 below; a 0 that is given is refused
        trained = self.whole("max_position_embeddings", 0)
        if not trained and max_positions is None:
            raise ValueError(f"{self.family}: the range is given where config.json has no max_position_embeddings, got none; give max_positions")
        self.max_positions = trained if max_positions is None else max_positions
        if isinstance(self.max_positions, bool) or not isinstance(self.max_positions, int):
            raise ValueError(f"{self.family}: max_positions is a whole number, got {max_positions!r}; leave it out for {trained}")
        self.trained_positions = trained or self.max_positions

    def take(self, key: str, default: Any = GIVEN) -> Any:
        """The value of a key, which is then done with.

        Raises:
            ValueError: a key without default is missing.
        """
        if default is GIVEN:
            self.needs(key)
        return self._left.pop(key, default)

    def whole(self, key: str, default: Any = GIVEN) -> int:
        """A whole number above 0; `default` where the key is missing or null."""
        value = self.take(key, default)
        if value is None and default is not GIVEN:
            return int(default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.family}: {key} is a whole number above 0, got {value!r}; correct config.json")
        return value

    def number(self, key: str, default: Any = GIVEN) -> float:
        """A finite number above 0."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{self.family}: {key} is a number above 0, got {value!r}; correct config.json")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.family}: {key} is true or false, got {value!r}; correct config.json")
        return value

    def needs(self, key: str) -> None:
        """Refuse a config without a key for which transformers has a number of its own."""
        if key not in self._left:
            raise ValueError(f"{self.family}: config.json has {key}, got none; add it as the model was trained")

    def spelled(self, key: str, usual: str) -> None:
        """Read a key as another one, which transformers does not read in this family.

        Raises:
            ValueError: the other one beside it with another value, or alone.
        """
        if usual in self._left and self._left[usual] != self._left.get(key):
            given, other = self._left.get(key), self._left[usual]
            raise ValueError(f"{self.family}: {key} stands for {usual}, got {usual}={other!r} beside {key}={given!r}; remove {usual}")
        if key in self._left:
            self._left[usual] = self._left.pop(key)

    def opened(self, key: str) -> None:
        """Spread a nested configuration, so that its keys are taken as `key.name`.

        Raises:
            ValueError: no mapping.
        """
        nested = self.take(key, None)
        if nested is not None and not isinstance(nested, dict):
            raise ValueError(f"{self.family}: {key} is a mapping, got {nested!r}; correct config.json")
        self._left.update({f"{key}.{name}": value for name, value in (nested or {}).items() if name not in IGNORED})

    def only(self, key: str, allowed: Any, default: Any = GIVEN) -> None:
        """Refuse any other value than this one."""
        value = self.take(key, default)
        if value != allowed:
            raise ValueError(f"{self.family}: {key} is {allowed!r}, got {value!r}; nothing else of it can be exported yet")

    def off(self, key: str) -> None:
        """Refuse a switch that is on; null is off too."""
        value = self.take(key, None)
        if value not in (None, False):
            raise ValueError(f"{self.family}: {key} is false or null, got {value!r}; nothing else of it can be exported yet")

    def number_or_none(self, key: str, default: Optional[float] = None) -> Optional[float]:
        """A finite number above 0; None where the key is null, `default` where it is missing."""
        if self._left.get(key, default) is None:
            return self.take(key, None)
        return self.number(key) if key in self._left else default

    def activation(self, key: str, default: Any = GIVEN) -> str:
        """Our name of an activation.

        Raises:
            ValueError: one that is not known.
        """
        value = self.take(key, default)
        if value not in ACTIVATIONS:
            raise ValueError(f"{self.family}: {key} is one of {', '.join(ACTIVATIONS)}, got {value!r}; nothing else of it can be exported yet")
        return ACTIVATIONS[value]

    def padding(self, default: int) -> int:
        """The id of padding, for families that count positions from it; `default` where the key is missing.

        Raises:
            ValueError: no whole number of 0 or more.
        """
        value = default if self.padding_id is GIVEN else self.padding_id
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{self.family}: pad_token_id is a whole number of 0 or more, got {value!r}; correct config.json")
        return value

    def per_layer(self, key: str, default: Sequence[Any], or_empty: bool = False) -> List[Any]:
        """A list with an entry for each layer; `default` where the key is missing or null, or, with or_empty, an empty list.

        Raises:
            ValueError: a list of another length.
        """
        given = self.take(key, None)
        if given is None or (or_empty and given == []):
            return list(default)
        if not isinstance(given, list) or len(given) != self.layers:
            found = len(given) if isinstance(given, list) else repr(given)
            raise ValueError(f"{self.family}: {key} has an entry for each of {self.layers} layers, got {found}; correct config.json")
        return given

    def window(self, key: str, default: Any = GIVEN) -> Optional[int]:
        """Keys that a query sees, itself among them; None for all of them.

        Raises:
            ValueError: no whole number above 0.
        """
        value = self.take(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{self.family}: {key} is null or a whole number above 0, got {value!r}; correct config.json")
        return value

    def by_type(
        self,
        kind: LayerConfig,
        encodings: Union[Sequence[Mapping[str, Any]], Mapping[str, Sequence[Mapping[str, Any]]]],
        window: Optional[int],
        default: Union[str, Sequence[str]],
    ) -> Tuple[Dict[str, LayerConfig], Tuple[str, ...]]:
        """Kinds and order of layers by layer_types: full_attention, or sliding_attention with a window.

        Args:
            kind: the layer without encodings and sight.
            encodings: of all layers, or by layer type.
            window: of sliding_attention.
            default: the type of each layer, or of all, where config.json has no layer_types.

        Raises:
            ValueError: another type, layers with a window where there is none.
        """
        types = self.per_layer("layer_types", [default] * self.layers if isinstance(default, str) else default)
        sights: Dict[str, Dict[str, Any]] = {"full_attention": {"name": "causal"}, "sliding_attention": {"name": "window", "size": window}}
        other = next((name for name in types if name not in sights), None)
        if other is not None or (window is None and "sliding_attention" in types):
            rule = "full_attention, or sliding_attention beside a window"
            raise ValueError(f"{self.family}: layer_types are {rule}, got {other or 'sliding_attention without one'}; nothing else of them can be exported yet")
        kinds = {}
        for name in dict.fromkeys(types):
            found = encodings[name] if isinstance(encodings, Mapping) else encodings
            changed = msgspec.structs.replace(kind.attention, encodings=tuple(map(dict, found)), sees=sights[name])
            kinds[name] = msgspec.structs.replace(kind, attention=changed)
        return kinds, tuple(types)

    def pattern(self, period: int, *spellings: str) -> List[str]:
        """Types of layers of which every `period`-th sees all keys and the others a window, where config.json has no layer_types.

        Args:
            period: where sliding_window_pattern is missing.
            spellings: further names of that key.
        """
        given = {key: self.whole(key) for key in ("sliding_window_pattern", "_sliding_window_pattern", *spellings) if key in self._left}
        if len(set(given.values())) > 1:
            raise ValueError(f"{self.family}: {' and '.join(given)} are one thing, got {' and '.join(map(str, given.values()))}; remove one")
        period = next(iter(given.values()), period)
        return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(self.layers)]

    def full_attention(self) -> None:
        """Refuse layers that do not see all that came before."""
        types = self.per_layer("layer_types", [])
        other = next((name for name in types if name != "full_attention"), None)
        if other is not None:
            raise ValueError(f"{self.family}: layer_types are full_attention, got {other!r}; nothing else of them can be exported yet")

    def rotation_keys(self, theta: float = 10000.0, share: float = 1.0) -> Dict[str, Any]:
        """What hugging_face.rope_spec reads, with the family's own theta and share of a head where the config names none.
        Sizes are not taken: they serve elsewhere too.

        Raises:
            ValueError: rope_parameters or rope_scaling that is no mapping.
        """
        keys = {key: self._left.pop(key) for key in ROTATION if key in self._left}
        for key in ("rope_parameters", "rope_scaling"):
            if keys.get(key) is not None and not isinstance(keys[key], dict):
                raise ValueError(f"{self.family}: expected {key} as a mapping, got {keys[key]!r}; correct config.json")
        nested = [part for part in (keys.get("rope_parameters"), keys.get("rope_scaling")) if isinstance(part, dict)]
        for key, default in (("rope_theta", theta), ("partial_rotary_factor", share)):
            if not any(key in part for part in (keys, *nested)):
                keys[key] = default
        sizes: Dict[str, Any] = {"hidden_size": self.width, "num_attention_heads": self.heads, "num_hidden_layers": self.layers}
        return {**keys, **sizes, "head_dim": self._left.get("head_dim"), "max_position_embeddings": self.trained_positions}

    def rotation(self, partial: bool = False, theta: float = 10000.0, layout: str = "half", share: float = 1.0) -> Spec:
        """The rotation of all layers; to be asked for before sizes are taken.

        Args:
            partial: whether a part of each head may turn; where False, transformers has no such model of the family.
            theta: of the family, where the config names none.
            layout: of pairs, "half" or "interleaved".
            share: of each head that turns, where the config names none.

        Raises:
            ValueError: as rope_spec; a rotation for each layer type, a part of a head.
        """
        spec = rope_spec(self.rotation_keys(theta, share))
        if "name" not in spec:
            raise ValueError(f"{self.family}: all layers turn alike, got rope_parameters for {', '.join(spec)}; nothing else of them can be exported yet")
        if "rotary" in spec and not partial:
            raise ValueError(f"{self.family}: whole heads turn, got partial_rotary_factor for {spec['rotary']} entries; correct config.json")
        return {**spec, **({"layout": layout} if layout != "half" else {})}

    def finish(self) -> None:
        """Refuse the keys that nobody took.

        Raises:
            ValueError: the first of them.
        """
        if self._left:
            key = sorted(self._left)[0]
            raise ValueError(f"{self.family}: every key of config.json is understood, got {key}={self._left[key]!r}; remove it if the model computes the same without")
