"""What linear layers and tables read and return while a model runs, whatever its code."""

from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from posenc_export.export.quantization.uses import Use

aten = torch.ops.aten
LINEAR = {torch.nn.functional.linear, aten.linear, aten.linear.default}
TABLE = {torch.nn.functional.embedding, aten.embedding, aten.embedding.default}
# Takes an input, and a function that returns the output; returns the output.
Watcher = Callable[[Tensor, Callable[[], Tensor]], Tensor]


class Watching(TorchFunctionMode):
    """While it is entered, calls of linear layers and look-ups in tables go through watchers.

    Args:
        watchers: pairs of the use of a weight, and the function that its calls go through.
    """

    def __init__(self, watchers: Iterable[Tuple[Use, Watcher]]) -> None:
        super().__init__()
        self._watchers = {(id(use.weight), use.linear): one for use, one in watchers}

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        named = kwargs or {}
        if function in LINEAR or function in TABLE:
            linear = function in LINEAR
            first, second = args[:2]
            ids_first = function is torch.nn.functional.embedding
            x, weight = (first, second) if linear or ids_first else (second, first)
            watcher = self._watchers.get((id(weight), linear))
            if watcher is not None:
                return watcher(x, lambda: function(*args, **named))
        return function(*args, **named)
