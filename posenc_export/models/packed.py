"""Checkpoints of transformers that others quantized, read as float32, one tensor at a time."""

from pathlib import Path
from typing import Any, Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from posenc_export.models import packed_layouts
from posenc_export.models.weight_blocks import Blocks, Matrix
from posenc_export.shared.refusal import refusal

Source = tuple[Any, str]  # a file of tensors, and the name of one of its tensors
AGAIN = "download the model again"
# Scales of activations, which are not rounded here.
IGNORED = (".input_scale", ".input_zero_point", ".output_scale", ".input_global_scale")


def unpacked(config: Mapping[str, Any], sources: dict[str, Source]) -> dict[str, Source]:
    """Return the sources of a checkpoint with quantized tensors replaced by the weights that they
    hold. config: quantization_config. ValueError: one that cannot be read, or no tensor in its
    layout.
    """
    layout = packed_layouts.layout_of(config)
    plain = {name: source for name, source in sources.items() if not name.endswith(IGNORED)}
    quantized: dict[str, Source] = {}
    for name in [name for name in plain if _is_packed(plain, name, layout)]:
        module = name.removesuffix(layout.mark)
        ends = [layout.mark]
        for other in layout.others:
            end = other.removesuffix("?")
            if module + end in plain:
                ends.append(end)
            elif end == other:
                raise refusal("checkpoint", f"{module + end} beside {name}", "none", AGAIN)
        weight = module + layout.name
        parts = {end: plain.pop(module + end) for end in ends}
        quantized[weight] = (PackedTensor(weight, layout, parts), weight)
    if not quantized:
        method = packed_layouts.method_of(config)
        rule = f"tensors NAME{layout.mark} by quantization_config {method}"
        remedy = "remove quantization_config from config.json if the weights are not quantized"
        raise refusal("checkpoint", rule, "none", remedy)
    return {**plain, **quantized}


def _is_packed(sources: Mapping[str, Source], name: str, layout: packed_layouts.Layout) -> bool:
    """Whether a tensor has codes: modules that were left out have plain weights of that name."""
    marked = name.endswith(layout.mark)
    first = name.removesuffix(layout.mark) + layout.others[0]
    return marked and (layout.mark != ".weight" or first in sources)


class PackedTensor(Matrix):
    """A file of one tensor, and a matrix."""

    def __init__(
        self, name: str, layout: packed_layouts.Layout, sources: Mapping[str, Source]
    ) -> None:
        self.path = Path(sources[layout.mark][0].path)
        self._name, self._layout, self._sources = name, layout, sources
        self.rows = next(iter(self.shape(name)), 0)

    def shape(self, name: str) -> packed_layouts.Shape:
        shapes = {end: file.shape(name) for end, (file, name) in self._sources.items()}
        if packed_layouts.WHOLE_SHAPE in shapes:
            file, place = self._sources[packed_layouts.WHOLE_SHAPE]
            return tuple(file.raw(place).tolist())
        codes = [shapes[end] for end in (".qweight", ".weight_packed") if end in shapes]
        return self._layout.shape(shapes) if all(len(shape) == 2 for shape in codes) else ()

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.weight())

    def weight(self) -> np.ndarray:
        return self._read(packed_layouts.Whole.weight, lambda numbers: numbers)

    def blocks(self) -> Blocks | None:
        return self._read(packed_layouts.Whole.blocks, lambda numbers: None)

    def _read(self, of_whole: Callable[[Any], Any], of_numbers: Callable[[Any], Any]) -> Any:
        parts = {end: file.raw(name) for end, (file, name) in self._sources.items()}
        try:
            read = self._layout.read(parts)
            return of_whole(read) if isinstance(read, packed_layouts.Whole) else of_numbers(read)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            sizes = ", ".join(f"{end} {list(part.shape)}" for end, part in parts.items())
            got = f"{sizes} ({(str(error).splitlines() or [''])[0][:120]})"
            rule = f"{self._name} in the layout of its method"
            raise refusal("checkpoint", rule, got, AGAIN) from None
