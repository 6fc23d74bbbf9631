"""Typed access to the metadata of a GGUF file. Each key is taken once, others are refused."""

import math
from typing import Any, Collection, Dict, Mapping, Optional

import numpy as np

# Keys of an architecture that say nothing that the tensors and the other keys do not say.
REPEATED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
LONGEST = 2**12  # entries of an array that is read, one for each layer


class Metadata:
    """The metadata of a GGUF file.

    Args:
        values: GGUFFile.values.
        tensors: names of its tensors.

    Raises:
        ValueError: no architecture.
    """

    def __init__(self, values: Mapping[str, Any], tensors: Collection[str]) -> None:
        self.values, self.tensors = values, tensors
        self.architecture = values.get("general.architecture")
        if not isinstance(self.architecture, str):
            raise ValueError(
                "gguf: expected general.architecture to be a name, got "
                f"{self.architecture!r:.80}; give the file of a language model"
            )
        start = f"{self.architecture}."
        self._remaining = {
            key.removeprefix(start): value for key, value in values.items() if key.startswith(start)
        }
        for key in REPEATED:
            self._remaining.pop(key, None)

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a key, given without the architecture, and return its value; an array as a list.

        An array of equal values is one value. Return `default` if the file has no such key.

        Raises:
            ValueError: an array with more than LONGEST entries that are not equal.
        """
        value = self._remaining.pop(key, default)
        if not isinstance(value, np.ndarray):
            return value
        if len(value) and (value == value[0]).all():
            return value[0].item()
        if len(value) > LONGEST:
            raise ValueError(
                f"gguf: expected {self.architecture}.{key} with at most {LONGEST} entries, "
                f"got {len(value)}; convert the model again"
            )
        return value.tolist()

    def whole(self, key: str, default: Optional[int] = None) -> int:
        """Take an integer above 0.

        Raises:
            ValueError: it is missing without a default, or another value.
        """
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"gguf: expected {self.architecture}.{key} to be an integer above 0, got "
                f"{value!r:.80}; convert the model again"
            )
        return value

    def number(self, key: str, default: Optional[float] = None) -> float:
        """Take a finite number.

        Raises:
            ValueError: it is missing without a default, or another value.
        """
        value = self.take(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(
                f"gguf: expected {self.architecture}.{key} to be a number, got "
                f"{value!r:.80}; convert the model again"
            )
        return value

    def holds(self, name: str) -> bool:
        """Whether the file holds a tensor."""
        return name in self.tensors

    def given(self, **keys: Any) -> Dict[str, Any]:
        """Return the keys whose values are not None."""
        return {key: value for key, value in keys.items() if value is not None}

    def finish(self) -> None:
        """Refuse keys that were not taken.

        Raises:
            ValueError: such a key exists.
        """
        if self._remaining:
            rule = f"expected only keys of {self.architecture} that change nothing or are read"
            raise ValueError(
                f"gguf: {rule}, got also {', '.join(sorted(self._remaining))}; convert the "
                "model to safetensors and export that"
            )
