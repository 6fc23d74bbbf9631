"""The settings of a model in its config.json: sizes, rotation."""

from typing import Any, Mapping, Optional

from posenc_export.models.families.shared.keys import SPELLINGS
from posenc_export.models.families.shared.typed_keys import UNSUPPORTED, Keys
from posenc_export.models.hugging_face import Spec, rope_spec

ROTATION = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


class Settings(Keys):
    """The keys of a model's config.json; max_positions: None for max_position_embeddings."""

    def __init__(self, values: Mapping[str, Any], max_positions: Optional[int] = None) -> None:
        super().__init__(values)
        for key, others in SPELLINGS.items():
            for other, readers in others.items():
                if other in self._remaining:
                    self._spell(other, key, self.family in readers)
        self.layers, self.width, self.heads = (
            self.whole(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        # A missing or null value becomes 0 here; an explicit 0 is refused.
        self._remaining.setdefault("max_position_embeddings", None)
        trained = self.whole("max_position_embeddings", 0)
        if not trained and max_positions is None:
            rule = "max_position_embeddings in config.json"
            raise self.error(rule, "none", "give max_positions")
        self.max_positions = trained if max_positions is None else max_positions
        if type(self.max_positions) is not int:
            remedy = f"leave it out for {trained}"
            raise self.refusal("max_positions to be an integer", max_positions, remedy)
        self.trained_positions = trained or self.max_positions

    def _spell(self, other: str, key: str, read: bool) -> None:
        """Rename a key. One that transformers does not read here may only repeat the other."""
        value = self._remaining.pop(other)
        if key not in self._remaining and not read:
            rule = f"{key} in place of {other}, which transformers does not read"
            raise self.error(rule, f"{other}={value!r}", "rename or remove it")
        if self._remaining.setdefault(key, value) != value:
            got = f"{value!r} and {self._remaining[key]!r}"
            raise self.error(f"{other} or {key}", got, "remove one")

    def full_attention(self) -> None:
        """Take layer_types, and refuse any type but full_attention."""
        types = self.per_layer("layer_types")
        if others := [name for name in types if name != "full_attention"]:
            raise self.refusal("layer_types to be full_attention", others[0], UNSUPPORTED)

    def rotation(self) -> Spec:
        """Return the rotation of all layers; call this before head_dim is taken."""
        keys = {key: self._remaining.pop(key) for key in ROTATION if key in self._remaining}
        for key in ("rope_parameters", "rope_scaling"):
            if not isinstance(keys.get(key), (dict, type(None))):
                raise self.refusal(f"{key} to be a mapping", keys[key])
        nested = [keys.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
        if not any("rope_theta" in part for part in (keys, *nested)):
            keys["rope_theta"] = 10000.0
        keys |= {"hidden_size": self.width, "num_attention_heads": self.heads}
        keys |= {"head_dim": self._remaining.get("head_dim"), "model_type": self.family}
        spec = rope_spec({**keys, "max_position_embeddings": self.trained_positions})
        if "name" not in spec:
            got = f"rope_parameters for {', '.join(spec)}"
            raise self.error("one rotation for all layers", got, UNSUPPORTED)
        if "rotary" in spec:
            got = f"partial_rotary_factor for {spec['rotary']} entries"
            raise self.error("rotation of whole heads", got)
        return spec
