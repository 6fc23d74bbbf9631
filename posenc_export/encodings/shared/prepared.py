"""Tables that are computed from trained weights, again after weights have changed."""

from typing import Any, List, Self

from posenc_export.encodings.shared.base import PositionEncoding


def _loaded(encoding: PositionEncoding, _: object) -> None:
    encoding.prepare()


class Prepared(PositionEncoding):
    """An encoding whose `tabulate` computes tables from its weights. It calls `prepare` when its
    weights exist; loaded weights and the return from training to eval mode do so again.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_load_state_dict_post_hook(_loaded)

    def tabulate(self) -> None:
        """Compute the tables on the CPU."""
        raise NotImplementedError

    def prepare(self) -> None:
        self.tabulate()
        self.to(next(self.parameters()).device)
        self.prepared = self.versions()

    def versions(self) -> List[int]:
        """Return the version counters of parameters, which grow when they are modified."""
        return [parameter._version for parameter in self.parameters()]

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the return to eval rebuilds the tables if weights changed."""
        super().train(mode)
        if not mode and self.prepared != self.versions():
            self.prepare()
        return self
