"""The machine that runs an artefact."""

import platform
import shutil
import subprocess
from pathlib import Path


def processor() -> str:
    """Return the name of the CPU."""
    return _in_cpuinfo("model name") or platform.processor() or platform.machine()


def features() -> list[str]:
    """Return the instruction sets of the CPU, as Linux names them; elsewhere its architecture."""
    named = _in_cpuinfo("flags") or _in_cpuinfo("Features")
    return [platform.machine(), *sorted(named.split())]


def _in_cpuinfo(field: str) -> str:
    """Return a field of the first processor; empty without it or on another system than Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    parts = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in parts if name.strip() == field), "")


def gpu() -> str:
    """Return the name of the first GPU of NVIDIA."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "GPU"
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    return said.stdout.strip().partition("\n")[0] or "GPU"
