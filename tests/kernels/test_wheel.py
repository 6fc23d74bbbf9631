"""The wheel of packages/kernels."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
LIBRARY = "posenc_export_kernels/libposenc_kernels.so"
CHECK = "from tests.kernels.calls import Case; Case().run()"
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]


def test_the_wheel_holds_the_library_for_every_python_and_onnxruntime_loads_it(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    shutil.copytree(TOP / "packages" / "kernels", source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", tmp_path, source], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "installed")
    assert files == {LIBRARY, "posenc_export_kernels/__init__.py"}
    environment = {
        **os.environ,
        "POSENC_KERNELS": str(tmp_path / "installed" / LIBRARY),
        "PYTHONPATH": str(TOP),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
