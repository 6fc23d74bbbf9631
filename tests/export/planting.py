"""Plant faults in modules and certify the result against the correct module."""

from typing import Any, Callable, Dict, Optional

import torch

from posenc_export.encodings.nope import NoPE
from posenc_export.export.bounds import accuracy_of
from posenc_export.export.describe import Model, eager
from posenc_export.export.expected import expected_outputs
from posenc_export.export.verify import certify
from posenc_export.models.presets import seeded
from posenc_export.runtime import Session
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.verification.measuring import measure
from posenc_export.runtime.verification.proof import Expected, certificate
from tests.traces import sources

Plant = Callable[[Model], None]
_expected: Dict[str, Expected] = {}  # by configuration and manifest


def each(change: Callable[[Any], None]) -> Plant:
    """Return a function that changes every encoding of a model once, except nope."""

    def plant(model: Any) -> None:
        found = [model.token_encoding, *(attention.encoding for attention in model.attentions())]
        for encoding in {id(one): one for one in found if not isinstance(one, NoPE)}.values():
            change(encoding)

    return plant


def certificate_of(config: Any, plant: Optional[Plant] = None, session: type = Session) -> Dict[str, Any]:
    """Certify a model, changed by `plant` and run by `session`, against the correct model."""
    right, planted = sources(config).model, seeded(config)
    if plant:
        with torch.no_grad():
            plant(planted)
    module, manifest = eager(planted)
    graph, expected = TorchGraph(module, manifest), expected_of(config, manifest)
    if plant:
        opened, accuracy = session(graph.open, manifest), accuracy_of(right, manifest)
        found = measure(opened, expected, accuracy, lambda _: None, until_failure=True)
        if found.exceeds(accuracy.tolerance):
            return {**certificate(opened, accuracy, found.cells, found.bounds, found.failures)}
    return certify(session(graph.open, manifest), right, expected, lambda _: None)


def expected_of(config: Any, manifest: Manifest) -> Expected:
    """Return the outputs of the correct model, which are computed once for all its faults."""
    key = repr((config, manifest))
    if key not in _expected:
        _expected[key] = expected_outputs(sources(config).model, manifest)
    return _expected[key]
