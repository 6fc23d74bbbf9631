"""Write a file by `aten::save`, an operator of a program of torch.export whose name looks harmless,
to a path that looks like the mode of an operator.
"""

import json
from pathlib import Path

from tests.attacks.grammar import PROGRAM, _program, pt2


def write(folder: Path, trace: Path) -> Path:
    content = json.loads(_program()[PROGRAM])
    node = content["graph_module"]["graph"]["nodes"][-1]
    node["target"] = "torch.ops.aten.save.default"
    node["inputs"][1:] = [{"name": "filename", "arg": {"as_string": str(trace)}, "kind": 1}]
    path = folder / "model.onnx"  # whatever the suffix says
    path.write_bytes(pt2({PROGRAM: json.dumps(content).encode()}))
    return path
