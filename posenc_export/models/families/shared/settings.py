"""The settings of a model in its config.json: sizes, kinds of layers, rotation."""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from posenc_export.models.config import LayerConfig, Named
from posenc_export.models.families.shared.keys import SPELLINGS
from posenc_export.models.families.shared.typed_keys import UNSUPPORTED, Keys
from posenc_export.models.hugging_face import Spec, rope_spec

ROTATION = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
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

    def by_type(
        self,
        kind: LayerConfig,
        encodings: Union[Sequence[Named], Mapping[str, Sequence[Named]]],
        window: Optional[int],
        default: Sequence[str],
    ) -> Tuple[Dict[str, LayerConfig], Sequence[str]]:
        """Take layer_types, with a default for each layer, and return kinds and order of the
        layers: `kind` with full_attention, or sliding_attention with a window, and with
        encodings of all layers or by layer type.
        """
        types = self.per_layer("layer_types", default)
        visible: Dict[str, Named] = {
            "full_attention": {"name": "causal"},
            "sliding_attention": {"name": "window", "size": window},
        }
        other = next((name for name in types if name not in visible), None)
        if other is not None or (window is None and "sliding_attention" in types):
            got = other or "sliding_attention without a window"
            rule = "layer_types to be full_attention, or sliding_attention with a window"
            raise self.error(rule, got, UNSUPPORTED)
        kinds = {}
        for name in dict.fromkeys(types):
            chosen = encodings[name] if isinstance(encodings, Mapping) else encodings
            kinds[name] = kind.with_attention(encodings=tuple(chosen), sees=visible[name])
        return kinds, types

    def full_every(self, period: int) -> List[str]:
        """Return layer types: full_attention for every `period`-th layer, else with a window."""
        names = ("full_attention", "sliding_attention")
        return [names[(index + 1) % period > 0] for index in range(self.layers)]

    def pattern(self, period: int) -> List[str]:
        """Take sliding_window_pattern, `period` if it is missing, and return layer types as
        `full_every`.
        """
        keys = ("sliding_window_pattern", "_sliding_window_pattern")
        periods = {key: self.whole(key) for key in keys if key in self._remaining}
        if len(set(periods.values())) > 1:
            got = " and ".join(map(str, periods.values()))
            raise self.error(" or ".join(periods), got, "remove one")
        return self.full_every(next(iter(periods.values()), period))

    def full_attention(self) -> None:
        """Take layer_types, and refuse any type but full_attention."""
        types = self.per_layer("layer_types", [])
        if others := [name for name in types if name != "full_attention"]:
            raise self.refusal("layer_types to be full_attention", others[0], UNSUPPORTED)

    def rotation_keys(self, theta: float = 10000.0, share: float = 1.0) -> Dict[str, Any]:
        """Take the rotary keys, and return them with the sizes that hugging_face.rope_spec reads,
        and defaults of rope_theta and partial_rotary_factor. head_dim is copied and not taken.
        """
        keys = {key: self._remaining.pop(key) for key in ROTATION if key in self._remaining}
        for key in ("rope_parameters", "rope_scaling"):
            if not isinstance(keys.get(key), (dict, type(None))):
                raise self.refusal(f"{key} to be a mapping", keys[key])
        nested = [keys.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
        for key, default in (("rope_theta", theta), ("partial_rotary_factor", share)):
            if not any(key in part for part in (keys, *nested)):
                keys[key] = default
        return {
            **keys,
            **{"hidden_size": self.width, "num_attention_heads": self.heads},
            "head_dim": self._remaining.get("head_dim"),
            **{"max_position_embeddings": self.trained_positions, "model_type": self.family},
        }

    def rotation(self, partial: bool = False, theta: float = 10000.0, layout: str = "half") -> Spec:
        """Return the rotation of all layers; call this before head_dim is taken. partial: whether
        the family rotates parts of heads; theta: its default of rope_theta.
        """
        spec = rope_spec(self.rotation_keys(theta))
        if "name" not in spec:
            got = f"rope_parameters for {', '.join(spec)}"
            raise self.error("one rotation for all layers", got, UNSUPPORTED)
        if "rotary" in spec and not partial:
            got = f"partial_rotary_factor for {spec['rotary']} entries"
            raise self.error("rotation of whole heads", got)
        return spec if layout == "half" else {**spec, "layout": layout}

    def rotation_in_chunks(self) -> Spec:
        """Return `rotation`, in dual chunk attention if dual_chunk_attention_config is given, which
        vLLM reads and transformers ignores. Within the first chunk both are the same.
        """
        rotation, prefix = self.rotation(), "dual_chunk_attention_config"
        if self._remaining.get(prefix) is None:
            self.ignore([prefix])
            return rotation
        self.flatten(prefix)
        chunk, local = (self.whole(f"{prefix}.{key}") for key in ("chunk_size", "local_size"))
        trained = self.integer(f"{prefix}.original_max_position_embeddings", 0, least=0)
        if rotation["name"] != "rope":
            got = f"rope_type {rotation['name'].removeprefix('rope_')}"
            raise self.error(f"rope_type default with {prefix}", got, UNSUPPORTED)
        if self.max_positions <= min(chunk - local, trained or chunk):
            return rotation
        sizes = {"chunk_size": chunk, "local_size": local, "original_max_positions": trained}
        return {**rotation, "name": "dual_chunk", **sizes}
