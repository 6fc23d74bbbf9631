"""Tables that `prepare` computes from trained weights, again after weights have changed."""

from typing import List, Self

from posenc_export.encodings.shared.base import PositionEncoding


def prepare_loaded(encoding: PositionEncoding, _: object) -> None:
    """Rebuild tables after load_state_dict."""
    encoding.prepare()


def weight_versions(encoding: PositionEncoding) -> List[int]:
    """Return the version counters of parameters, which grow when they are modified."""
    return [parameter._version for parameter in encoding.parameters()]


class Prepared(PositionEncoding):
    """An encoding whose `prepare` sets `prepared` to its weight_versions."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the return to eval rebuilds the tables if weights changed."""
        super().train(mode)
        if not mode and self.prepared != weight_versions(self):
            self.prepare()
        return self
