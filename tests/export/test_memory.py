"""Memory of an export: the module, the loaded graph, and little more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Peak relative to the weights: 1 for the module, 1 for the weights packed by ONNX Runtime, and the
# rest for calls.
MOST = 2.5
CALLS = (
    32 << 20
)  # bytes of activations, caches and expected outputs, which do not depend on the weights
# The export of a tiny model imports all libraries, so that their memory is not counted.
PROGRAM = """
import sys
from pathlib import Path
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
def memory(name):
    return 1024 * int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])
def decoder(width, hidden):
    how = {"heads": 8, "kv_heads": 4, "max_positions": 24, "encoding": {"name": "rope"}}
    return seeded(decoder_config(64, 2, hidden, block_config(width=width, **how)))
folder, target = Path(sys.argv[1]), sys.argv[2]
export(decoder(64, 64), target, folder / "tiny")
before = memory("VmRSS")
model = decoder(1024, 8192)
Path("/proc/self/clear_refs").write_text("5")
export(model, target, folder / "model")
print(memory("VmHWM") - before, sum(4 * parameter.numel() for parameter in model.parameters()))
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc"
)
@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_an_export_takes_no_more_than_two_and_a_half_times_the_weights(
    target: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), target],
        check=True,
        env=environment,
        capture_output=True,
        text=True,
    )
    peak, weights = map(int, run.stdout.split())
    assert weights > 100 << 20
    assert peak <= MOST * weights + CALLS, f"{peak / weights:.2f} times the weights"
