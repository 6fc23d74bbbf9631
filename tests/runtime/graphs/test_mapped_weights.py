"""Weights of ONNX artefacts: which memory they take after and during a load."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import List, Optional

import numpy as np
import pytest

from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime import load
from posenc_export.runtime.artefact.rules import WEIGHTS
from posenc_export.runtime.graphs import mapped_weights
from tests.traces import sources

TIED = decoder_config(
    1024, 1, 64, block_config(128, 4, 64, kv_heads=2, encoding={"name": "rope"})
)  # a table of 0.5 MB, which is also the head
SMAPS = Path("/proc/self/smaps")
# Of a load relative to the file. ONNX Runtime packs int4 to 1.35 times its size, and keeps the
# scales in float32, which are float16 in the file. 1 more if pages stay.
PEAKS = {None: 1.3, "int4": 1.7}
# A tiny artefact is loaded first, so that memory of libraries is not counted.
PROGRAM = """
import sys
from pathlib import Path
from posenc_export.runtime import load
def memory(name):
    return 1024 * int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])
tiny = load(sys.argv[1], provider="cpu")
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model = load(sys.argv[2], provider="cpu")
print(memory("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "ort"
    export(sources(TIED), "ort", folder, verify=False)
    return folder


@pytest.mark.skipif(not SMAPS.exists(), reason="resident memory is read from /proc")
def test_no_page_of_the_weights_is_resident_after_a_load(artefact: Path) -> None:
    model = load(artefact, "cpu")
    assert _resident(artefact / WEIGHTS) == [0]
    del model
    assert _resident(artefact / WEIGHTS) == []


@pytest.mark.parametrize("target", ["ort", pytest.param("onnx", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("weights", [None, "int4"])
def test_weights_mapped_by_onnx_runtime_itself_give_the_same_logits(
    weights: Optional[str], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(sources(TIED), target, tmp_path / "made", verify=False, weights=weights)
    ours = load(tmp_path / "made", "cpu", 1).session().prefill([[1, 2, 3, 4]])
    monkeypatch.setattr(mapped_weights, "SINCE", (99, 0))
    np.testing.assert_array_equal(
        load(tmp_path / "made", "cpu", 1).session().prefill([[1, 2, 3, 4]]), ours
    )


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc"
)
@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", PEAKS)
def test_the_peak_of_a_load_is_little_more_than_the_file(
    weights: Optional[str], artefact: Path, tmp_path: Path
) -> None:
    shape = block_config(1024, 8, 64, kv_heads=4, encoding={"name": "rope"})
    export(
        seeded(decoder_config(16384, 12 if weights else 4, 3072, shape)),
        "ort",
        tmp_path / "large",
        verify=False,
        weights=weights,
    )
    program = [sys.executable, "-c", PROGRAM, str(artefact), str(tmp_path / "large")]
    run = subprocess.run(
        program,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
    )
    size = (tmp_path / "large" / WEIGHTS).stat().st_size
    assert int(run.stdout) <= PEAKS[weights] * size, (
        f"{int(run.stdout) / size:.2f} times the file of {size >> 20} MB"
    )


def _resident(path: Path) -> List[int]:
    """Return the resident bytes of each mapping of a file in this process."""
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text())
    return [
        1024 * int(one.split("\nRss:")[1].split()[0])
        for one in mappings
        if one.splitlines()[0].endswith(f" {path}")
    ]
