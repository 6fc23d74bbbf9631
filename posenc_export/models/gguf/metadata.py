"""Typed access to the metadata of a GGUF file. Each key is taken once, others are refused."""

import math
from typing import Any, Collection, Dict, Mapping, Optional

import numpy as np

from posenc_export.shared.refusal import refusal

# Keys of an architecture that say nothing that the tensors and the other keys do not say.
REPEATED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
LONGEST = 2**12  # entries of an array that is read, one for each layer
AGAIN, SAFETENSORS = "convert the model again", "convert the model to safetensors"


class Metadata:
    """The metadata of a GGUF file with tensors of these names. ValueError: no architecture, or the
    file of an adapter or of another part of a model.
    """

    def __init__(self, values: Mapping[str, Any], tensors: Collection[str]) -> None:
        self.values, self.tensors = values, tensors
        self.architecture = values.get("general.architecture")
        if not isinstance(self.architecture, str):
            rule, got = "general.architecture to be a name", f"{self.architecture!r:.80}"
            raise refusal("gguf", rule, got, "give the file of a language model")
        if str(kind := values.get("general.type", "model")) != "model":
            remedy = "give the file of the model; an adapter must be merged into it first"
            raise refusal("gguf", "general.type to be model", f"{kind!r:.80}", remedy)
        start = f"{self.architecture}."
        own = {key.removeprefix(start): values[key] for key in values if key.startswith(start)}
        self._remaining = {key: value for key, value in own.items() if key not in REPEATED}

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a key, named without the architecture, and return its value; an array as a list,
        or as one value if all entries are equal. ValueError: more than LONGEST other entries.
        """
        value = self._remaining.pop(key, default)
        if not isinstance(value, np.ndarray):
            return value
        if len(value) and (value == value[0]).all():
            return value[0].item()
        if len(value) > LONGEST:
            raise self._refusal(key, f"with at most {LONGEST} entries", len(value))
        return value.tolist()

    def whole(self, key: str, default: Optional[int] = None) -> int:
        """Take an integer above 0. ValueError: another value, or none without a default."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refusal(key, "to be an integer above 0", f"{value!r:.80}")
        return value

    def number(self, key: str, default: Optional[float] = None) -> float:
        """Take a finite number. ValueError: another value, or none without a default."""
        value = self.take(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._refusal(key, "to be a number", f"{value!r:.80}")
        return value

    def holds(self, name: str) -> bool:
        """Whether the file holds a tensor."""
        return name in self.tensors

    def finish(self) -> None:
        """Raise ValueError if there are keys that were not taken."""
        if self._remaining:
            rule = f"only keys of {self.architecture} that change nothing or are read"
            got = f"also {', '.join(sorted(self._remaining))}"
            raise refusal("gguf", rule, got, f"{SAFETENSORS} and export that")

    def _refusal(self, key: str, rule: str, got: object) -> ValueError:
        return refusal("gguf", f"{self.architecture}.{key} {rule}", got, AGAIN)


def present(**keys: Any) -> Dict[str, Any]:
    """Return the keys whose values are not None."""
    return {key: value for key, value in keys.items() if value is not None}
