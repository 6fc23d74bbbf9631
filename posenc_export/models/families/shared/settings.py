"""Typed access to config.json. Each key is taken once, and keys that were not taken are refused
by name.
"""

import math
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import msgspec

from posenc_export.models.config import LayerConfig, Named
from posenc_export.models.families.shared.keys import DEFAULTS, IGNORED, SPELLINGS
from posenc_export.models.hugging_face import Spec, rope_spec

ROTATION = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
REQUIRED = object()  # marks a key without default
# Ends of messages.
CORRECT, UNSUPPORTED = "correct config.json", "other values cannot be exported yet"
# Activations: transformers' name to ours.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


class Settings:
    """The keys of a config.json. A method that takes a key raises ValueError if the key is missing
    and has no default, and for values that it does not name.

    Args:
        values: contents of config.json.
        max_positions: number of positions of the model to build; None for max_position_embeddings.
    """

    def __init__(self, values: Mapping[str, Any], max_positions: Optional[int] = None) -> None:
        self.family = str(values.get("model_type"))
        self.values = values  # all keys, among them those that families ignore
        self._remaining = {
            key: value
            for key, value in values.items()
            if key != "model_type" and key not in IGNORED
        }
        for key, others in SPELLINGS.items():
            for other, readers in others.items():
                if other in self._remaining:
                    self._spell(other, key, self.family in readers)
        self.layers, self.width, self.heads = (
            self.whole(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        # A missing or null value becomes 0 below; an explicit 0 is refused.
        self._remaining.setdefault("max_position_embeddings", None)
        trained = self.whole("max_position_embeddings", 0)
        if not trained and max_positions is None:
            raise ValueError(
                f"{self.family}: expected max_position_embeddings in config.json, got none; "
                "give max_positions"
            )
        self.max_positions = trained if max_positions is None else max_positions
        if isinstance(self.max_positions, bool) or not isinstance(self.max_positions, int):
            raise self.refusal(
                "max_positions to be an integer", max_positions, f"leave it out for {trained}"
            )
        self.trained_positions = trained or self.max_positions

    def refusal(self, rule: str, got: Any, remedy: str = CORRECT) -> ValueError:
        """Return the error for a key that does not follow a rule."""
        return ValueError(f"{self.family}: expected {rule}, got {got!r}; {remedy}")

    def _spell(self, other: str, key: str, read: bool) -> None:
        """Rename a key. A name that transformers does not read in this family may only repeat
        the value of the name that it reads.
        """
        value = self._remaining.pop(other)
        if key not in self._remaining and not read:
            raise ValueError(
                f"{self.family}: expected {key} in place of {other}, which transformers does "
                f"not read, got {other}={value!r}; rename or remove it"
            )
        if self._remaining.setdefault(key, value) != value:
            raise ValueError(
                f"{self.family}: expected {other} or {key}, got {value!r} and "
                f"{self._remaining[key]!r}; remove one"
            )

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """Remove a key and return its value; refuse a config without it if there is no default."""
        if default is REQUIRED:
            self.needs(key)
        return self._remaining.pop(key, default)

    def whole(self, key: str, default: Any = REQUIRED) -> int:
        """Take an integer above 0; `default` if the key is missing or null."""
        value = self.take(key, default)
        if value is None and default is not REQUIRED:
            return int(default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(f"{key} to be an integer above 0", value)
        return value

    def integer(self, key: str, default: Any = REQUIRED, least: Optional[int] = None) -> int:
        """Take an integer, of `least` or more."""
        value = self.take(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or (least is not None and value < least)
        ):
            raise self.refusal(
                f"{key} to be an integer" + ("" if least is None else f" of {least} or more"), value
            )
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """Take a finite number above 0."""
        value = self.take(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value < math.inf
        ):
            raise self.refusal(f"{key} to be a number above 0", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Take a value that is true or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.refusal(f"{key} to be true or false", value)
        return value

    def needs(self, *keys: str) -> None:
        """Refuse a config without one of these keys. Used for keys whose default in transformers
        may not be that of the model.
        """
        for key in keys:
            if key not in self._remaining:
                raise ValueError(
                    f"{self.family}: expected {key} in config.json, got none; add the value "
                    "with which the model was trained"
                )

    def ignore(self, keys: Iterable[str]) -> None:
        """Take keys that do not affect the model's outputs."""
        for key in keys:
            self._remaining.pop(key, None)

    def rename(self, key: str, usual: str) -> None:
        """Rename a key to the usual name, which transformers does not read in this family, so
        that it may only repeat the value of `key`.
        """
        if usual in self._remaining and self._remaining[usual] != self._remaining.get(key):
            given, other = self._remaining.get(key), self._remaining[usual]
            raise ValueError(
                f"{self.family}: expected {key} in place of {usual}, got {usual}={other!r} "
                f"and {key}={given!r}; remove {usual}"
            )
        if key in self._remaining:
            self._remaining[usual] = self._remaining.pop(key)

    def flatten(self, key: str) -> None:
        """Replace a nested mapping by its entries, as keys `key.name`."""
        nested = self.take(key, None)
        if nested is not None and not isinstance(nested, dict):
            raise self.refusal(f"{key} to be a mapping", nested)
        self._remaining.update(
            {
                f"{key}.{name}": value
                for name, value in (nested or {}).items()
                if name not in IGNORED
            }
        )

    def only(self, key: str, allowed: Any, default: Any = REQUIRED) -> None:
        """Take a key, and refuse any value but the given one."""
        value = self.take(key, default)
        if value != allowed:
            raise self.refusal(f"{key} to be {allowed!r}", value, UNSUPPORTED)

    def fixed(self, values: Mapping[str, Any]) -> None:
        """Take keys, and refuse any value but the given one of each, which is also the value of
        a missing key.
        """
        for key, value in values.items():
            self.only(key, value, value)

    def off(self, key: str) -> None:
        """Take a key, and refuse any value but false and null."""
        value = self.take(key, None)
        if value not in (None, False):
            raise self.refusal(f"{key} to be false or null", value, UNSUPPORTED)

    def number_or_none(self, key: str, default: Optional[float] = None) -> Optional[float]:
        """Take a finite number above 0; None if the key is null, `default` if it is missing."""
        if self._remaining.get(key, default) is None:
            return self.take(key, None)
        return self.number(key) if key in self._remaining else default

    def activation(self, key: str, default: Any = REQUIRED) -> str:
        """Take the name of an activation, and return our name of it."""
        value = self.take(key, default)
        if value not in ACTIVATIONS:
            raise self.refusal(f"{key} to be one of {', '.join(ACTIVATIONS)}", value, UNSUPPORTED)
        return ACTIVATIONS[value]

    def padding(self, default: int) -> int:
        """Return the padding id, for families whose first position is the padding id + 1;
        `default` if the key is missing.
        """
        self._remaining["pad_token_id"] = self.values.get("pad_token_id", default)
        return self.integer("pad_token_id", least=0)

    def per_layer(self, key: str, default: Sequence[Any], or_empty: bool = False) -> List[Any]:
        """Take a list with an entry for each layer; `default` if it is missing or null or, with
        or_empty, empty.
        """
        given = self.take(key, None)
        if given is None or (or_empty and given == []):
            return list(default)
        if not isinstance(given, list) or len(given) != self.layers:
            raise self.refusal(
                f"{key} with an entry for each of {self.layers} layers",
                len(given) if isinstance(given, list) else given,
            )
        return given

    def indices(self, key: str, default: Sequence[int]) -> Sequence[int]:
        """Take a list of layers by index; `default` if it is missing or null."""
        given = self.take(key, None)
        if given is None:
            return default
        if not isinstance(given, list) or not all(type(index) is int for index in given):
            raise self.refusal(f"{key} to be a list of layers", given)
        return given

    def window(self, key: str, default: Any = REQUIRED) -> Optional[int]:
        """Take the size of an attention window, which includes the query's own key; None for no
        window.
        """
        value = self.take(key, default)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise self.refusal(f"{key} to be null or an integer above 0", value)
        return value

    def by_type(
        self,
        kind: LayerConfig,
        encodings: Union[Sequence[Named], Mapping[str, Sequence[Named]]],
        window: Optional[int],
        default: Sequence[str],
    ) -> Tuple[Dict[str, LayerConfig], Tuple[str, ...]]:
        """Take layer_types, and return kinds and order of the layers: full_attention, or
        sliding_attention with a window.

        Args:
            kind: the layer; its encodings and `sees` are replaced.
            encodings: encodings of all layers, or by layer type.
            window: window of sliding_attention; None if there is none.
            default: type of each layer if config.json has no layer_types.
        """
        types = self.per_layer("layer_types", default)
        visible: Dict[str, Dict[str, Any]] = {
            "full_attention": {"name": "causal"},
            "sliding_attention": {"name": "window", "size": window},
        }
        other = next((name for name in types if name not in visible), None)
        if other is not None or (window is None and "sliding_attention" in types):
            rule = "expected layer_types to be full_attention, or sliding_attention with a window"
            raise ValueError(
                f"{self.family}: {rule}, got "
                f"{other or 'sliding_attention without a window'}; {UNSUPPORTED}"
            )
        kinds = {}
        for name in dict.fromkeys(types):
            found = encodings[name] if isinstance(encodings, Mapping) else encodings
            changed = msgspec.structs.replace(
                kind.attention, encodings=tuple(map(dict, found)), sees=visible[name]
            )
            kinds[name] = msgspec.structs.replace(kind, attention=changed)
        return kinds, tuple(types)

    def pattern(self, period: int, *spellings: str) -> List[str]:
        """Take sliding_window_pattern, and return layer types: full_attention for every `period`-th
        layer, sliding_attention for the others.

        Args:
            period: value if sliding_window_pattern is missing.
            spellings: further names of that key.
        """
        given = {
            key: self.whole(key)
            for key in ("sliding_window_pattern", "_sliding_window_pattern", *spellings)
            if key in self._remaining
        }
        if len(set(given.values())) > 1:
            raise ValueError(
                f"{self.family}: expected {' or '.join(given)}, got "
                f"{' and '.join(map(str, given.values()))}; remove one"
            )
        period = next(iter(given.values()), period)
        return [
            "sliding_attention" if (index + 1) % period else "full_attention"
            for index in range(self.layers)
        ]

    def full_attention(self) -> None:
        """Take layer_types, and refuse any type but full_attention."""
        types = self.per_layer("layer_types", [])
        other = next((name for name in types if name != "full_attention"), None)
        if other is not None:
            raise self.refusal("layer_types to be full_attention", other, UNSUPPORTED)

    def rotation_keys(self, theta: float = 10000.0, share: float = 1.0) -> Dict[str, Any]:
        """Take the rotary keys, and return them with the sizes that hugging_face.rope_spec reads.
        head_dim is copied and not taken.

        Args:
            theta: the family's default of rope_theta.
            share: the family's default of partial_rotary_factor.
        """
        keys = {key: self._remaining.pop(key) for key in ROTATION if key in self._remaining}
        for key in ("rope_parameters", "rope_scaling"):
            if keys.get(key) is not None and not isinstance(keys[key], dict):
                raise self.refusal(f"{key} to be a mapping", keys[key])
        nested = [
            part
            for part in (keys.get("rope_parameters"), keys.get("rope_scaling"))
            if isinstance(part, dict)
        ]
        for key, default in (("rope_theta", theta), ("partial_rotary_factor", share)):
            if not any(key in part for part in (keys, *nested)):
                keys[key] = default
        sizes: Dict[str, Any] = {
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
        }
        return {
            **keys,
            **sizes,
            "head_dim": self._remaining.get("head_dim"),
            "max_position_embeddings": self.trained_positions,
        }

    def rotation(
        self,
        partial: bool = False,
        theta: float = 10000.0,
        layout: str = "half",
        share: float = 1.0,
    ) -> Spec:
        """Return the rotation of all layers. Call this before head_dim is taken.

        Args:
            partial: whether the family supports partial rotation of heads in transformers.
            theta: the family's default of rope_theta.
            layout: layout of rotary pairs, "half" or "interleaved".
            share: the family's default of partial_rotary_factor.
        """
        spec = rope_spec(self.rotation_keys(theta, share))
        if "name" not in spec:
            raise ValueError(
                f"{self.family}: expected one rotation for all layers, got rope_parameters "
                f"for {', '.join(spec)}; {UNSUPPORTED}"
            )
        if "rotary" in spec and not partial:
            raise ValueError(
                f"{self.family}: expected rotation of whole heads, got partial_rotary_factor "
                f"for {spec['rotary']} entries; correct config.json"
            )
        return {**spec, **({"layout": layout} if layout != "half" else {})}

    def finish(self) -> None:
        """Check that all keys were taken."""
        unread = [
            key
            for key, value in self._remaining.items()
            if key not in DEFAULTS or value != DEFAULTS[key]
        ]
        if unread:
            key = min(unread)
            found = f"{key}={self._remaining[key]!r}"
            raise ValueError(
                f"{self.family}: expected only known keys in config.json, got {found}; "
                "remove it if it does not affect the outputs of the model"
            )
