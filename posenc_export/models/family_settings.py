"""Typed access to the config.json of a family. Each key is taken once, and keys that are left are
refused.
"""

import math
from typing import Any, Dict, Mapping, Optional

from posenc_export.models.config_limits import CORRECT, IGNORED
from posenc_export.models.hugging_face import Spec, rope_spec
from posenc_export.shared.refusal import refusal

REQUIRED = object()  # marks a key without default
UNSUPPORTED = "other values cannot be exported yet"  # end of messages
# Activations: transformers' name to ours.
ACTIVATIONS = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu"},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    "relu": "relu",
}
ROTATION = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
# Keys that earlier versions of transformers wrote for every model, with the values that change
# nothing.
DEFAULTS: Dict[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}


class Settings:
    """The keys of a config.json. A method that takes a key raises ValueError if the key is missing
    and has no default, and for values that it does not name.

    Args:
        values: contents of config.json.
        max_positions: number of positions; None for max_position_embeddings.
    """

    def __init__(self, values: Mapping[str, Any], max_positions: Optional[int] = None) -> None:
        self.family = str(values.get("model_type"))
        unread = IGNORED | {"model_type"}
        self._remaining = {key: value for key, value in values.items() if key not in unread}
        self.layers, self.width, self.heads = (
            self.whole(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        # A missing or null value becomes 0 here; an explicit 0 is refused.
        trained = self.whole("max_position_embeddings", 0)
        if not trained and max_positions is None:
            rule = "max_position_embeddings in config.json"
            raise self.error(rule, "none", "give max_positions")
        self.max_positions = trained if max_positions is None else max_positions
        if type(self.max_positions) is not int:
            remedy = f"leave it out for {trained}"
            raise self.refusal("max_positions to be an integer", max_positions, remedy)
        self.trained_positions = trained or self.max_positions

    def error(self, rule: str, got: Any, remedy: str = CORRECT) -> ValueError:
        """Return the error for a config that does not follow a rule, with the text of `got`."""
        return refusal(self.family, rule, got, remedy)

    def refusal(self, rule: str, value: Any, remedy: str = CORRECT) -> ValueError:
        """Return the error for a value that does not follow a rule."""
        return self.error(rule, f"{value!r:.80}", remedy)

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """Remove a key and return its value; refuse a config without it if there is no default."""
        if default is REQUIRED:
            self.needs(key)
        return self._remaining.pop(key, default)

    def whole(self, key: str, default: Optional[int] = None) -> int:
        """Take an integer above 0; `default` if the key is missing or null."""
        value = self.take(key) if default is None else self.take(key, None)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self.refusal(f"{key} to be an integer above 0", value)
        return value

    def number(self, key: str) -> float:
        """Take a finite number above 0."""
        value = self.take(key)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refusal(f"{key} to be a number above 0", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Take a value that is true or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.refusal(f"{key} to be true or false", value)
        return value

    def needs(self, *keys: str) -> None:
        """Refuse a config without these keys, whose defaults may not be those of the model."""
        for key in keys:
            if key not in self._remaining:
                remedy = "add the value with which the model was trained"
                raise self.error(f"{key} in config.json", "none", remedy)

    def only(self, key: str, allowed: Any) -> None:
        """Take a key, and refuse any value but the given one, which a missing key has, too."""
        value = self.take(key, allowed)
        if value != allowed:
            raise self.refusal(f"{key} to be {allowed!r}", value, UNSUPPORTED)

    def activation(self, key: str) -> str:
        """Take the name of an activation, and return our name of it."""
        value = self.take(key)
        if value not in ACTIVATIONS:
            raise self.refusal(f"{key} to be one of {', '.join(ACTIVATIONS)}", value, UNSUPPORTED)
        return ACTIVATIONS[value]

    def window(self, key: str) -> Optional[int]:
        """Take the size of a window, which includes the query's own key; None for no window."""
        value = self.take(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self.refusal(f"{key} to be null or an integer above 0", value)
        return value

    def layer_types(self, name: str) -> None:
        """Take layer_types, and refuse a list that does not name this type for each layer."""
        types = self.take("layer_types", None)
        if types is not None and types != [name] * self.layers:
            rule = f"layer_types to be {name} for each of {self.layers} layers"
            raise self.refusal(rule, types, UNSUPPORTED)

    def rotation(self) -> Spec:
        """Take the keys of the rotation, and return it."""
        keys = {key: self._remaining.pop(key) for key in ROTATION if key in self._remaining}
        for key in ROTATION[:2]:
            if not isinstance(keys.get(key), (dict, type(None))):
                raise self.refusal(f"{key} to be a mapping", keys[key])
        given = {"max_position_embeddings": self.trained_positions, "model_type": self.family}
        return rope_spec({**keys, **given})

    def finish(self) -> None:
        """Check that all keys were taken."""
        usual = {**DEFAULTS, "n_ctx": self.trained_positions}.items()
        unread = {key: value for key, value in self._remaining.items() if (key, value) not in usual}
        if unread:
            got = ", ".join(f"{key}={unread[key]!r:.80}" for key in sorted(unread))
            remedy = "remove what does not affect the outputs of the model"
            raise self.error("only known keys in config.json", got, remedy)
