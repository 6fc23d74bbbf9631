"""A config.json on its way to a description: each key is taken once, and what nobody took is refused by name."""

import math
from typing import Any, Dict, Mapping, Optional

from posenc_export.models.hugging_face import Spec, rope_spec

# Keys that say nothing about the computation of logits from tokens.
IGNORED = frozenset(
    """_name_or_path _attn_implementation architectures attn_implementation auto_map bos_token_id dtype embd_pdrop eos_token_id hidden_dropout
    attention_dropout id2label initializer_range is_llama_config keys_to_ignore_at_inference label2id max_window_layers output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type resid_pdrop return_dict torch_dtype transformers.js_config transformers_version
    use_cache""".split()
)
ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "original_max_position_embeddings")
GIVEN = object()  # the default of a key that a config must have


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
        self._left = {key: value for key, value in values.items() if key != "model_type" and key not in IGNORED}
        self.trained_positions = self.whole("max_position_embeddings")
        self.max_positions = self.trained_positions if max_positions is None else max_positions
        if isinstance(self.max_positions, bool) or not isinstance(self.max_positions, int):
            raise ValueError(f"{self.family}: max_positions is a whole number, got {max_positions!r}; leave it out for {self.trained_positions}")

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

    def number(self, key: str) -> float:
        """A finite number above 0."""
        value = self.take(key)
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

    def only(self, key: str, allowed: Any, default: Any = GIVEN) -> None:
        """Refuse any other value than this one."""
        value = self.take(key, default)
        if value != allowed:
            raise ValueError(f"{self.family}: {key} is {allowed!r}, got {value!r}; nothing else of it can be exported yet")

    def window(self, key: str, default: Any = GIVEN) -> None:
        """Refuse a window that hides a position of the range.

        Raises:
            ValueError: such a window.
        """
        value = self.take(key, default)
        if value is not None and not (isinstance(value, int) and value >= self.max_positions):
            rule = f"null or at least the {self.max_positions} positions of the model"
            raise ValueError(f"{self.family}: {key} is {rule}, got {value!r}; give max_positions={value!r} or fewer")

    def full_attention(self) -> None:
        """Refuse layers that do not see all that came before."""
        types = self.take("layer_types", None) or []
        other = next((kind for kind in types if kind != "full_attention"), None)
        if other is not None:
            raise ValueError(f"{self.family}: layer_types are full_attention, got {other!r}; nothing else of them can be exported yet")

    def rotation_keys(self, theta: float = 10000.0) -> Dict[str, Any]:
        """What hugging_face.rope_spec reads, with the family's own theta where the config names none. Sizes are not taken: they serve elsewhere too."""
        keys = {key: self._left.pop(key) for key in ROTATION if key in self._left}
        nested = [part for part in (keys.get("rope_parameters"), keys.get("rope_scaling")) if isinstance(part, dict)]
        if not any("rope_theta" in part for part in (keys, *nested)):
            keys["rope_theta"] = theta
        sizes: Dict[str, Any] = {key: self._left[key] for key in ("head_dim", "hidden_size", "num_attention_heads", "num_hidden_layers") if key in self._left}
        return {**keys, **sizes, "max_position_embeddings": self.trained_positions}

    def rotation(self, partial: bool = False) -> Spec:
        """The rotation of all layers; to be asked for before sizes are taken.

        Args:
            partial: whether a part of each head may turn; where False, transformers has no such model of the family.

        Raises:
            ValueError: as rope_spec; a rotation for each layer type, a part of a head.
        """
        spec = rope_spec(self.rotation_keys())
        if "name" not in spec:
            raise ValueError(f"{self.family}: all layers turn alike, got rope_parameters for {', '.join(spec)}; nothing else of them can be exported yet")
        if "rotary" in spec and not partial:
            raise ValueError(f"{self.family}: whole heads turn, got partial_rotary_factor for {spec['rotary']} entries; correct config.json")
        return spec

    def finish(self) -> None:
        """Refuse the keys that nobody took.

        Raises:
            ValueError: the first of them.
        """
        if self._left:
            key = sorted(self._left)[0]
            raise ValueError(f"{self.family}: every key of config.json is understood, got {key}={self._left[key]!r}; remove it if the model computes the same without")
