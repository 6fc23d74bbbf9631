"""Weights of artefacts: which memory they take during a load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from tests.tiny import block
from tests.traces import artefact

# By target, format and number of layers, of a load relative to the files. Of ort, 1.25 and 1.72
# were measured: ONNX Runtime packs int4 to 1.35 times its size, and keeps the scales in float32,
# which are float16 in the file. torch reads the checked entries of a program from memory.
PEAKS = {
    ("ort", None, 4): 1.4,
    ("ort", "int4", 12): 1.9,
    ("pt2", None, 2): 2.3,
    ("torchscript", None, 2): 1.2,
}
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


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc"
)
@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "weights", "layers"), PEAKS)
def test_the_peak_of_a_load_is_that_of_the_files(
    target: str, weights: str | None, layers: int, tmp_path: Path
) -> None:
    shape = block_config(1024, 8, 64, kv_heads=4, encoding={"name": "rope"})
    config = decoder_config(16384, layers, 3072, shape)
    listed = export(seeded(config), target, tmp_path, verify=False, weights=weights).files
    folders = str(artefact(block("rope"), target)), str(tmp_path)
    run = subprocess.run(
        [sys.executable, *"-W ignore -c".split(), PROGRAM, *folders],
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
    )
    size = sum(file.bytes for file in listed.values())
    assert int(run.stdout) <= PEAKS[target, weights, layers] * size, (
        f"{int(run.stdout) / size:.2f} times the files of {size >> 20} MB"
    )
