"""Compare every tensor of model.pt or model.pt2 with its module, bit by bit."""

from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import torch

from posenc_export.export.signatures import wrap
from posenc_export.models.user_module import Model
from posenc_export.runtime.artefact.certificate import MOST_FAILURES, Check
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.graphs.quiet import quiet
from posenc_export.runtime.graphs.torch_files import read_program

FEWEST = 64  # numbers of a constant that is no tensor of the module


def compare(folder: Path, manifest: Manifest, model: Model) -> Check:
    """Compare the tensors of a torch program with those of its module.

    Tensors of model.pt2 have the names of the module. Freezing takes them from model.pt, so that
    each of its constants has to be equal to some tensor of the module, and each tensor of the
    module that is not stored there is listed.
    """
    module = wrap(model, manifest.signature)
    wanted = {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
    }
    path = folder / graph_file(manifest)
    if manifest.target == "pt2":
        program = read_program(path, manifest)
        return _by_name({**program.constants, **program.state_dict}, wanted)
    if manifest.target == "torchscript":
        return _by_content(list(_constants(path)), wanted)
    return Check(0, "numbers", skipped={path.name: "native code, compiled from model.pt2"})


def _by_name(stored: Dict[str, torch.Tensor], wanted: Dict[str, torch.Tensor]) -> Check:
    failures, skipped, compared = {}, {}, 0
    for name, tensor in stored.items():
        if name in wanted:
            compared += tensor.numel()
            if not _equal(tensor, wanted[name]):
                failures[name] = "other numbers than in the module"
        elif tensor.numel() < FEWEST:
            skipped[name] = "a constant of the module's code"
        else:
            failures[name] = f"{list(tensor.shape)} that is no tensor of the module"
    skipped |= {name: "the program has it not" for name in wanted if name not in stored}
    return Check(compared, "numbers", failures=_first(failures), skipped=skipped)


def _by_content(stored: List[Tuple[str, torch.Tensor]], wanted: Dict[str, torch.Tensor]) -> Check:
    by_shape: Dict[Tuple[int, ...], List[str]] = {}
    for name, tensor in wanted.items():
        by_shape.setdefault(tuple(tensor.shape), []).append(name)
    failures, skipped, compared, held = {}, {}, 0, set()
    for place, tensor in stored:
        names = [n for n in by_shape.get(tuple(tensor.shape), []) if _equal(tensor, wanted[n])]
        held.update(names)
        compared += tensor.numel() if names else 0
        if not names and tensor.numel() < FEWEST:
            skipped[place] = "a constant of the module's code"
        elif not names:
            failures[place] = f"{list(tensor.shape)} that is no tensor of the module"
    skipped |= {name: "the program has it not" for name in wanted if name not in held}
    return Check(compared, "numbers", failures=_first(failures), skipped=skipped)


def _constants(path: Path) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yield the tensors of a TorchScript program with their places."""
    with quiet(DeprecationWarning):  # every call of torch.jit warns that it is deprecated
        module = torch.jit.load(str(path))
    yield from module.named_parameters()
    yield from module.named_buffers()
    for index, node in enumerate(module.graph.findAllNodes("prim::Constant")):
        if isinstance(value := node.output().toIValue(), torch.Tensor):
            yield f"constant {index}", value


def _equal(tensor: torch.Tensor, wanted: torch.Tensor) -> bool:
    return tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)


def _first(failures: Dict[str, str]) -> Dict[str, str]:
    return dict(list(failures.items())[:MOST_FAILURES])
