"""What a stranger's file would do: by what it would do, how the attack is written.

`write` of a threat writes the attack below `folder` and returns the path to give to a command;
`trace` is a file that exists afterwards only if the attack succeeded.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import onnx
import torch

from tests.attacks import folders, grammar


class Threat(NamedTuple):
    """An attack, and the commands that it is given to; none for all of them.

    Args:
        refused: False if a command may succeed, having ignored the attack.
        ends: whether it uses memory or time or ends a process, so that only the child process of
            the audit may read it.
    """

    write: folders.Write
    commands: Sequence[str] = ()
    refused: bool = True
    ends: bool = False


def _code_and_kernels(folder: Path, trace: Path) -> Path:
    module, repository = {"AutoModelForCausalLM": "evil.Model"}, "org/evil"
    names = dict.fromkeys(("_attn_implementation", "experts_implementation"), repository)
    keys: dict[str, Any] = {"auto_map": module, "_name_or_path": repository, **names}
    folders.checkpoint(folder, custom_pipelines=module, **keys)
    folders.code(folder, trace)
    tokens = {"auto_map": {"AutoTokenizer": ["evil.Model", None]}, "tokenizer_class": "evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "generation_config.json").write_text(json.dumps({"custom_generate": repository}))
    return folder


def _fifo(folder: Path, trace: Path) -> Path:
    os.mkfifo(folder / "model.onnx")
    return folder / "model.onnx"


def _fifos(folder: Path, trace: Path) -> Path:
    names = "model.onnx model.pt2 posenc.json model.safetensors model.safetensors.index.json"
    for name in (*names.split(), *folders.KEYS, "tokenizer.json"):
        if not (folder / name).exists():
            os.mkfifo(folder / name)
    return folder


def _written(file: str, content: Any) -> folders.Write:
    """Return a function that writes a file with the content that a trace gives."""

    def write(folder: Path, trace: Path) -> Path:
        (folder / file).write_bytes(content(trace))
        return folder / file

    return write


def _saving_a_tensor(trace: Path) -> bytes:
    """A program of torch.export with `aten::save`, whose name looks harmless, to a path that looks
    like the mode of an operator.
    """
    content = json.loads(grammar._program()[grammar.PROGRAM])
    node = content["graph_module"]["graph"]["nodes"][-1]
    node["target"] = "torch.ops.aten.save.default"
    node["inputs"][1:] = [{"name": "filename", "arg": {"as_string": str(trace)}, "kind": 1}]
    return grammar.pt2({grammar.PROGRAM: json.dumps(content).encode()})


class Writing(torch.nn.Module):
    """Creates a file by an operator of TorchScript that maps one."""

    path: str

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.from_file(self.path, shared=True, size=8) + input_ids


def _onnx(change: Any) -> folders.Write:
    """Return a function that writes the right decoder after a change, whose first node is made to
    write `first` in place of the logits.
    """

    def content(_: Path) -> bytes:
        model = grammar._onnx()
        change(model, onnx.helper, onnx.TensorProto)
        return bytes(model.SerializeToString())

    return _written("model.onnx", content)


def _loop(model: Any, helper: Any, kinds: Any) -> None:
    """A Loop of 2^62 rounds."""
    kind = [helper.make_tensor_value_info(n, kinds.FLOAT, None) for n in ("x", "y")]
    rounds = [helper.make_tensor_value_info("i", kinds.INT64, [])]
    going = [helper.make_tensor_value_info(n, kinds.BOOL, []) for n in ("c", "d")]
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Identity", ["c"], ["d"])]
    body = helper.make_graph(nodes, "b", [*rounds, going[0], kind[0]], [going[1], kind[1]])
    model.graph.node[0].output[0] = "first"
    model.graph.node.append(helper.make_node("Loop", ["most", "", "first"], ["logits"], body=body))
    model.graph.initializer.append(helper.make_tensor("most", kinds.INT64, [], [2**62]))


def _many_heads(model: Any, helper: Any, kinds: Any) -> None:
    """GroupQueryAttention of 2^40 heads."""
    inputs, heads = [*["first"] * 3, "", "", "n", "n"], {"num_heads": 2**40, "kv_num_heads": 2**40}
    domain, operator = "com.microsoft", "GroupQueryAttention"
    node = helper.make_node(operator, inputs, ["logits", "k", "v"], domain=domain, **heads)
    model.graph.node[0].output[0] = "first"
    model.graph.node.append(node)
    model.graph.initializer.append(helper.make_tensor("n", kinds.INT32, [1], [3]))
    model.opset_import.add(domain=domain, version=1)


def _fixed_axes(model: Any, helper: Any, kinds: Any) -> None:
    """An input of 2^40 numbers."""
    for value in (model.graph.input[0], model.graph.output[0]):
        for axis in (0, 1):
            value.type.tensor_type.shape.dim[axis].dim_value = 2**20


SAMPLES = "data/sample_inputs/model.pt"
# Attacks of tests.attacks.folders, given to all commands.
OF_FOLDERS = (
    "tokenizer_config.json as a link out",  # publishes a file of the user
    "config.json as a pipe",
    "model.safetensors.index.json weight_map path",
    "gguf with a long array",
    "pytorch_model.bin with a pickle: command",
    "safetensors of more than 64 bits",
)
THREATS: dict[str, Threat] = {
    **{name: Threat(folders.attacks()[name]) for name in OF_FOLDERS},
    "code and kernels named by a checkpoint": Threat(_code_and_kernels, refused=False),
    "a fifo": Threat(_fifo),
    "a folder of fifos": Threat(_fifos),
    "a pickled module": Threat(_written("model.pt", grammar.pickled)),
    "pickled sample inputs": Threat(
        _written("model.pt2", lambda trace: grammar.pt2({SAMPLES: grammar.pickled(trace)}))
    ),
    # Whatever the suffix says.
    "a program that saves a tensor": Threat(_written("model.onnx", _saving_a_tensor)),
    "a script that creates a file": Threat(
        _written("model.pt", lambda trace: grammar.scripted(Writing(str(trace))))
    ),
    "a loop without end": Threat(_onnx(_loop), ("audit",), ends=True),
    "too many heads": Threat(_onnx(_many_heads), ("audit",), ends=True),
    "axes that allocate": Threat(_onnx(_fixed_axes), ("audit",)),
}
