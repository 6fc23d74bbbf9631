"""The machine that runs an artefact, and whether compiled native code still fits it."""

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, List, NoReturn

from msgspec import Meta, Struct

from posenc_export.shared.refusal import refusal

Text = Annotated[str, Meta(max_length=256)]


class Compiled(Struct, frozen=True, forbid_unknown_fields=True):
    """Native code of an artefact, and the machine and libraries it was compiled for."""

    # Digest of the pt2 artefact it was compiled from.
    artefact: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    torch: Text  # version of torch that compiled it
    processor: Text  # name of the CPU
    # Instruction sets of the CPU, as torch names them.
    instructions: Annotated[List[Text], Meta(max_length=256)]

    def check(self) -> None:
        """Raise ValueError unless torch and processor are those that the code was compiled for."""
        here = on_this_machine(self.artefact)
        if self.torch != here.torch:
            _refuse(f"torch {self.torch}", here.torch)
        if self.processor != here.processor:
            _refuse(f"the processor {self.processor}", here.processor)
        for name in sorted({*self.instructions} ^ {*here.instructions}):
            word = "with" if name in here.instructions else "without"
            _refuse("the instruction sets", f"a processor {word} {name}")


def _refuse(rule: str, got: str) -> NoReturn:
    rule = f"{rule} that the native code was compiled for"
    raise refusal("runtime", rule, got, "run `posenc compile` again on this machine")


def on_this_machine(artefact: str) -> Compiled:
    """Describe native code that torch compiles here from the artefact with this digest."""
    import torch

    known = torch.cpu.get_capabilities().items()
    instructions = sorted(name for name, present in known if present is True)
    return Compiled(artefact, str(torch.__version__), processor(), instructions)


def processor() -> str:
    """Return the name of the CPU."""
    return _in_cpuinfo("model name") or platform.processor() or platform.machine()


def features() -> List[str]:
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
