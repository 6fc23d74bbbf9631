"""Adapters of peft beside the weights of their base: LoRA (Hu et al. 2021) of linear layers, whose
weight becomes W + s B A with s = alpha / r, or alpha / sqrt(r) with use_rslora.
"""

import math
import re
from typing import Any, Dict, List, Mapping, Tuple

from torch import Tensor

from posenc_export.models.folder_files import WHERE
from posenc_export.models.packed import Source
from posenc_export.shared.refusal import refusal

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
MERGE = "save the model that merge_and_unload of peft returns"
# Keys of adapter_config.json that the tensors repeat, or that belong to training.
IGNORED = """auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    exclude_modules inference_mode layers_pattern layers_to_transform loftq_config lora_dropout
    lora_ga_config megatron_config megatron_core modules_to_save peft_version qalora_group_size r
    rank_pattern revision runtime_config target_modules task_type""".split()
READ = ("alpha_pattern", "fan_in_fan_out", "lora_alpha", "use_rslora")
# Other ways of initialisation change the weights of the base.
ONLY: Mapping[str, Tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "peft_type": ("LORA",),
}
NAME = re.compile(r"[\w.]+", re.ASCII)  # of a layer in alpha_pattern, which may be other patterns


class Merged:
    """A file of one weight, W + s B A; `turned` if W is stored as [inputs, outputs] (GPT-2).

    Args:
        base, a, b: files and names of W, A [r,inputs] and B [outputs,r].
    """

    def __init__(self, base: Source, a: Source, b: Source) -> None:
        self.path, self._parts, self.scale, self.turned = base[0].path, (base, a, b), 1.0, False

    def shapes(self) -> List[Tuple[int, ...]]:
        """Return the shapes of W, A and B."""
        return [tuple(file.shape(name)) for file, name in self._parts]

    def shape(self, _: str) -> Tuple[int, ...]:
        return self.shapes()[0]

    def tensor(self, _: str) -> Tensor:
        weight, a, b = (file.tensor(name) for file, name in self._parts)
        change = self.scale * (b @ a)
        return weight + (change.t() if self.turned else change)


def merged(
    config: Mapping[str, Any], adapter: Mapping[str, Source], base: Mapping[str, Source]
) -> Dict[str, Source]:
    """Return the sources of a model with its adapter. Tensors of modules_to_save take the place of
    those of the base.

    Args:
        config: contents of adapter_config.json.
        adapter, base: sources by name.

    Raises:
        ValueError: another kind of adapter; tensors of layers that are not linear, or that the base
            does not have.
    """
    _check(config)
    sources, layers = dict(base), dict[str, Merged]()
    for name, source in adapter.items():
        layer, own = name.removesuffix(A), name.removeprefix(PREFIX)
        if name.endswith(A) and layer + B in adapter:
            weight = layer.removeprefix(PREFIX) + ".weight"
            if weight not in base:
                rule, got = "the base of the adapter beside it", f"no {weight} for {name}"
                raise refusal(WHERE, rule, got, "copy the adapter to the weights of its base")
            layers[weight] = Merged(base[weight], source, adapter[layer + B])
            sources[weight] = layers[weight], weight
        elif ".lora_" not in name:
            sources[own] = source
        elif not (name.endswith(B) and name.removesuffix(B) + A in adapter):
            rule = f"an adapter with NAME{A} and NAME{B} of linear layers"
            raise refusal(WHERE, rule, name, MERGE)
    _fit(config, layers)
    return sources


def _check(config: Mapping[str, Any]) -> None:
    """Check that an adapter is LoRA without further parts."""
    known, unset = (*IGNORED, *READ, *ONLY), tuple[Any, ...]((None, False, [], {}, ""))
    got = {key: config.get(key) for key in ONLY if config.get(key, ONLY[key][0]) not in ONLY[key]}
    got |= {key: value for key, value in config.items() if key not in known and value not in unset}
    if "peft_type" not in config or got:
        shown = ", ".join(f"{key}={value!r:.80}" for key, value in got.items())
        rule = f"{CONFIG} of LoRA (peft_type LORA) of linear layers, without other parts"
        raise refusal(WHERE, rule, shown or "no peft_type", MERGE)


def _fit(config: Mapping[str, Any], layers: Mapping[str, Merged]) -> None:
    """Set scale and orientation of each layer, after its shapes were checked."""
    rooted, flag = (config.get(key) is True for key in ("use_rslora", "fan_in_fan_out"))
    patterns = config.get("alpha_pattern") or {}
    plain = isinstance(patterns, dict) and all(map(NAME.fullmatch, patterns))
    alphas = [config.get("lora_alpha", 8), *(patterns.values() if plain else ())]
    if not plain or not all(type(alpha) in (int, float) for alpha in alphas):
        rule = "lora_alpha to be a number, and alpha_pattern to map names of layers to numbers"
        raise refusal(WHERE, rule, f"{alphas[0]!r:.40} and {patterns!r:.80}", MERGE)
    turned = set[bool]()
    for weight, layer in layers.items():
        shape, a, b = layer.shapes()
        (rank, inputs), (outputs, columns) = (part if len(part) == 2 else (0, 0) for part in (a, b))
        if not rank or rank != columns or sorted(shape) != sorted((outputs, inputs)):
            rule = f"matrices A [r,inputs] and B [outputs,r] for {weight} {list(shape)}"
            raise refusal(WHERE, rule, f"{list(a)} and {list(b)}", MERGE)
        module = f".{weight.removesuffix('.weight')}"
        named = (alpha for key, alpha in patterns.items() if module.endswith(f".{key}"))
        layer.scale = next(named, alphas[0]) / (math.sqrt(rank) if rooted else rank)
        layer.turned = shape != (outputs, inputs)
        if inputs != outputs:
            turned.add(layer.turned)
    for layer in layers.values():  # square ones are stored as the others
        if len(set(layer.shape(""))) == 1:
            layer.turned = any(turned) if turned else flag
