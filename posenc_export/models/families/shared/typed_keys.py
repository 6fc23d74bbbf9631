"""Typed access to config.json. Each key is taken once, and keys that are left are refused."""

import math
from typing import Any, List, Mapping, Optional

from posenc_export.models.families.shared.keys import DEFAULTS, IGNORED
from posenc_export.shared.refusal import refusal

REQUIRED = object()  # marks a key without default
# Ends of messages.
CORRECT, UNSUPPORTED = "correct config.json", "other values cannot be exported yet"
# Activations: transformers' name to ours.
ACTIVATIONS = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu"},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    "relu": "relu",
}


class Keys:
    """The keys of a config.json. A method that takes a key raises ValueError if the key is missing
    and has no default, and for values that it does not name.
    """

    layers: int  # of the model

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.family = str(values.get("model_type"))
        self.values = values  # all keys, among them those that families ignore
        unread = IGNORED | {"model_type"}
        self._remaining = {key: value for key, value in values.items() if key not in unread}

    def error(self, rule: str, got: Any, remedy: str = CORRECT) -> ValueError:
        """Return the error for a config that does not follow a rule, with the text of `got`."""
        return refusal(self.family, rule, got, remedy)

    def refusal(self, rule: str, value: Any, remedy: str = CORRECT) -> ValueError:
        """Return the error for a value that does not follow a rule."""
        return self.error(rule, repr(value), remedy)

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
        if type(value) is not int or value < 1:
            raise self.refusal(f"{key} to be an integer above 0", value)
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """Take a finite number above 0."""
        value = self.take(key, default)
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

    def only(self, key: str, allowed: Any, default: Any = REQUIRED) -> None:
        """Take a key, and refuse any value but the given one."""
        value = self.take(key, default)
        if value != allowed:
            raise self.refusal(f"{key} to be {allowed!r}", value, UNSUPPORTED)

    def fixed(self, values: Mapping[str, Any]) -> None:
        """Take keys, and refuse any value but the given one, which a missing key has, too."""
        for key, value in values.items():
            self.only(key, value, value)

    def activation(self, key: str, default: Any = REQUIRED) -> str:
        """Take the name of an activation, and return our name of it."""
        value = self.take(key, default)
        if value not in ACTIVATIONS:
            raise self.refusal(f"{key} to be one of {', '.join(ACTIVATIONS)}", value, UNSUPPORTED)
        return ACTIVATIONS[value]

    def per_layer(self, key: str) -> List[Any]:
        """Take a list with an entry for each layer; an empty one if it is missing or null."""
        entries = self.take(key, None)
        if entries is None:
            return []
        if not isinstance(entries, list) or len(entries) != self.layers:
            got = len(entries) if isinstance(entries, list) else entries
            raise self.refusal(f"{key} with an entry for each of {self.layers} layers", got)
        return entries

    def window(self, key: str) -> Optional[int]:
        """Take the size of a window, which includes the query's own key; None for no window."""
        value = self.take(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self.refusal(f"{key} to be null or an integer above 0", value)
        return value

    def finish(self) -> None:
        """Check that all keys were taken."""
        usual = DEFAULTS.items()
        unread = {key: value for key, value in self._remaining.items() if (key, value) not in usual}
        if unread:
            got = ", ".join(f"{key}={unread[key]!r:.80}" for key in sorted(unread))
            remedy = "remove what does not affect the outputs of the model"
            raise self.error("only known keys in config.json", got, remedy)
