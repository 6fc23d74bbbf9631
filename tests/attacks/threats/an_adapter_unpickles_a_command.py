"""Run a command while an adapter of a checkpoint is unpickled."""

import json
from pathlib import Path

from tests.attacks.folders import attacks


def write(folder: Path, trace: Path) -> Path:
    attacks()["adapter_model.bin with a pickle: command"](folder, trace)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return folder
