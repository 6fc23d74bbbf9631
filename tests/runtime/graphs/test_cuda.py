"""The CUDA provider: the parity grid for all artefacts that run on it, and caches that stay on
the device.
"""

from pathlib import Path

import numpy as np
import pytest

from posenc_export.export import export, verify
from posenc_export.models.presets import seeded
from posenc_export.runtime import load
from posenc_export.runtime.graphs import cuda
from tests.tiny import block, decoder
from tests.traces import sources

pytestmark = pytest.mark.skipif(
    cuda.obstacle() is not None, reason=f"CUDA does not run here: {cuda.obstacle()}"
)


@pytest.mark.parametrize("variant", ["rope", "rope-interleaved", "alibi", "learned", "nope"])
@pytest.mark.parametrize("target", ["ort-cuda", "onnx", "onnx-static"])
def test_decoder_matches_eager_at_every_cut_on_cuda(
    variant: str, target: str, tmp_path: Path
) -> None:
    model = seeded(decoder(variant))
    export(model, target, tmp_path / "artefact", verify=False)
    certificate = verify(tmp_path / "artefact", provider="cuda")
    assert certificate["passed"] and certificate["provider"] == "cuda"


def test_auto_takes_cuda_where_the_artefact_runs_there(tmp_path: Path) -> None:
    export(sources(block("rope")), "ort-cuda", tmp_path / "artefact", verify=False)
    session = load(tmp_path / "artefact").session()
    assert session.provider == "cuda"
    assert np.isfinite(session.prefill(np.ones((1, 4, 48), np.float16))).all()
