"""Tables that `prepare` computes from trained weights, again after weights have changed."""

from typing import List

from posenc_export.encodings.shared.base import PositionEncoding


def prepare_loaded(encoding: PositionEncoding, _: object) -> None:
    """Rebuild tables after load_state_dict."""
    encoding.prepare()


def weight_versions(encoding: PositionEncoding) -> List[int]:
    """Return the version counters of parameters, which grow when they are modified."""
    return [parameter._version for parameter in encoding.parameters()]


def prepare_if_changed(encoding: PositionEncoding) -> None:
    """Rebuild tables if weights differ from those of `prepared`, set by `prepare`."""
    if encoding.prepared != weight_versions(encoding):
        encoding.prepare()
