"""Compare every tensor of model.pt or model.pt2 with its module, bit by bit."""

import hashlib
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import torch

from posenc_export.export.read_module import Model
from posenc_export.export.signatures import wrap
from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.graphs.torch_files import read_program, read_script

FEWEST = 64  # numbers of a constant that is no tensor of the module


def compare(folder: Path, manifest: Manifest, model: Model) -> Check:
    """Compare the tensors of a torch program with those of its module.

    Tensors of model.pt2 have the names of the module. Freezing takes them from model.pt, so that
    each of its constants has to be equal to some tensor of the module, and each tensor of the
    module that is not stored there is listed.
    """
    module = wrap(model, manifest.signature)
    wanted = dict(module.named_buffers(remove_duplicate=False))
    wanted |= dict(module.named_parameters(remove_duplicate=False))
    path = folder / graph_file(manifest)
    if manifest.target == "pt2":
        program = read_program(path, manifest)
        return _by_name({**program.constants, **program.state_dict}, wanted)
    return _by_content(list(_constants(path)), wanted)


def _by_name(stored: Dict[str, torch.Tensor], wanted: Dict[str, torch.Tensor]) -> Check:
    failures, skipped, compared = {}, {}, 0
    for name, tensor in stored.items():
        if name in wanted:
            compared += tensor.numel()
            if tensor.dtype != wanted[name].dtype or not torch.equal(tensor, wanted[name]):
                failures[name] = "other numbers than in the module"
        elif tensor.numel() < FEWEST:
            skipped[name] = "a constant of the module's code"
        else:
            failures[name] = f"{list(tensor.shape)} that is no tensor of the module"
    skipped |= {name: "the program has it not" for name in wanted if name not in stored}
    return Check(compared, "numbers", failures=failures, skipped=skipped)


def _by_content(stored: List[Tuple[str, torch.Tensor]], wanted: Dict[str, torch.Tensor]) -> Check:
    """Compare tensors that freezing left without names: some it turned, and some it computed."""
    known: Dict[Tuple[int, ...], Dict[bytes, List[str]]] = {}
    for name, tensor in wanted.items():
        known.setdefault(_sizes(tensor), {}).setdefault(_digest(tensor), []).append(name)
    compared, present, others = 0, set(), []
    for place, tensor in stored:
        names = known.get(_sizes(tensor), {}).get(_digest(tensor), [])
        present.update(names)
        if names:
            compared += tensor.numel()
        else:
            others.append((place, tensor))
    # Encodings compute further numbers from their own, and freezing keeps only the result.
    plain = [name for name in wanted if name not in present and "encoding." not in name]
    lost = {_sizes(wanted[name]): name for name in plain}
    failures, skipped = {}, {}
    for place, tensor in others:
        if _sizes(tensor) in lost:
            failures[place] = f"other numbers than {lost[_sizes(tensor)]}"
        else:
            skipped[place] = f"{list(tensor.shape)}, which torch computed when it froze the program"
    skipped |= {name: "the program has it not" for name in wanted if name not in present}
    return Check(compared, "numbers", failures=failures, skipped=skipped)


def _sizes(tensor: torch.Tensor) -> Tuple[int, ...]:
    """Return the sizes above 1 in ascending order, which are those of any transpose."""
    return tuple(sorted(size for size in tensor.shape if size > 1))


def _digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of dtype and numbers that does not depend on their order along axes."""
    numbers = tensor.detach().cpu().contiguous()
    axes = [axis for axis, size in enumerate(numbers.shape) if size > 1]
    axes.sort(key=lambda axis: numbers.shape[axis])
    sizes = [numbers.shape[axis] for axis in axes]
    if len(set(sizes)) < len(sizes):  # no order of equal axes is known
        ordered = numbers.reshape(-1).sort().values
    else:
        singletons = [axis for axis in range(numbers.dim()) if axis not in axes]
        ordered = torch.permute(numbers, [*axes, *singletons])
    content = ordered.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(str(numbers.dtype).encode() + content).digest()


def _constants(path: Path) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yield the tensors of a TorchScript program with their places."""
    module = read_script(path)
    yield from module.named_parameters()
    yield from module.named_buffers()
    for index, node in enumerate(module.graph.findAllNodes("prim::Constant")):
        if isinstance(value := node.output().toIValue(), torch.Tensor):
            yield f"constant {index}", value
