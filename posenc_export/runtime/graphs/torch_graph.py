"""Load model.pt and model.pt2, and run a torch module of any form. torch is imported late."""

import io
import logging
import threading
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from posenc_export.runtime.artefact import archive, pt2_archive, rules
from posenc_export.runtime.artefact.files import utf8
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.quiet import quiet
from posenc_export.runtime.session.caches import BoundRun, Feeds, RunMemory
from posenc_export.shared.foreign import explained
from posenc_export.shared.refusal import expect

_lock = threading.Lock()
_limits: list[int] = []  # one entry per running call: the number of threads of its graph
_outside = [0]  # the number of threads when the first of these calls started


class TorchGraph:
    """A torch module of any form as a graph (runtime.session.caches.Graph), without states with the
    update rule "append". Its arguments are the inputs, past_positions if there is a cache, and the
    list of states and encoder outputs.
    """

    provider = device = "cpu"

    def __init__(self, module: Any, manifest: Manifest) -> None:
        self.module, self.manifest = module, manifest

    def bind(self, feeds: Feeds, states: RunMemory, outputs: Feeds, once: bool = False) -> BoundRun:
        import torch

        # Arguments share the memory of feeds and buffers.
        given, encoder = (
            [torch.from_numpy(feeds[value.name]) for value in values]
            for values in (self.manifest.inputs, self.manifest.encoder)
        )
        past = [torch.from_numpy(m.past.array[m.first : m.first + m.before[0]]) for m in states]
        single = self.manifest.stores_positions  # number of states before the list
        arguments = [*given, *past[:single], [*past[single:], *encoder]]
        # Encoders have no states, and return further outputs in their place.
        module, names = self.module, [value.name for value in self.manifest.outputs]
        copied = [(names.index(name), array) for name, array in outputs.items()]
        for index, m in enumerate(states, 1 - single):  # to the buffers that the next call reads
            if m.state.replaced:
                copied.append((index, m.present.array[m.first : m.first + m.after[0]]))

        def run() -> None:
            with torch.inference_mode():
                results = module(*arguments)
            results = (results[0], *results[-1])
            for index, array in copied:
                array[...] = results[index].numpy()

        return run


def limited(run: Callable[..., Any], threads: int) -> Callable[..., Any]:
    """Return `run` with a number of threads per operator that leaves torch's own as it was.

    torch keeps one number per thread of the process. A thread that uses torch for the first time
    gets the number that any thread set last.
    """
    import torch

    def call(*arguments: Any) -> Any:
        own = torch.get_num_threads()
        if own == threads and not _limits:
            return run(*arguments)
        with _lock:
            if not _limits:
                _outside[0] = own
            # A thread that started during another call may have the number of that call.
            usual = _outside[0] if own in _limits else own
            _limits.append(threads)
            torch.set_num_threads(threads)
        try:
            return run(*arguments)
        finally:
            with _lock:
                _limits.remove(threads)
                torch.set_num_threads(usual)

    return call


def load_torch(folder: Path, manifest: Manifest, threads: int | None) -> TorchGraph:
    """Load the file of a torch target. Its digest must have been compared before (files.check).

    A TorchScript file is a program, which can run any code of its own. model.pt2 is loaded only if
    nothing in it is unpickled or evaluated (runtime/artefact/pt2_archive.py). Raises ValueError if
    the file is damaged, ModuleNotFoundError without torch.
    """
    try:
        import_module("torch")
    except ModuleNotFoundError as error:
        rule = f"runtime: expected torch for target {manifest.target}"
        remedy = "pip install 'posenc-export[export]'"
        raise ModuleNotFoundError(f"{rule}, got none; {remedy}", name="torch") from error
    path = folder / rules.graph_file(manifest)
    # Scripts run without the hooks of torch.nn.Module, which take several us.
    of_program = manifest.target == "pt2"
    run = _program(path, manifest) if of_program else read_script(path).forward
    return TorchGraph(limited(run, threads) if threads else run, manifest)


def read_script(path: Path) -> Any:
    """Read the torch.jit.ScriptModule of model.pt. Raise ValueError as `load_torch` does."""
    import torch

    with rules.named(path.name), path.open("rb") as stream:
        archive.check_archive(stream)
    # torch.jit warns at every call.
    with _refusing_damage(path), quiet(DeprecationWarning, FutureWarning):
        return torch.jit.load(utf8(path))


def _program(path: Path, manifest: Manifest) -> Any:
    """Return a function that calls the graph with single tensors, and nests them as TorchGraph."""
    program, first_state = read_program(path, manifest), 2 if manifest.stores_positions else 1
    with _refusing_damage(path):
        # The graph itself, whose first arguments are the weights. `program.module()` looks up each
        # weight in its submodules, flattens nested arguments, and compares every size with its
        # range: most of the time of a small model's step.
        run = partial(program.graph_module.forward, *weights_of(program))

    def call(*arguments: Any) -> tuple[Any, Sequence[Any]]:
        *single, states = arguments
        outputs = run(*single, *states)
        return outputs[0], outputs[first_state:]

    return call


def weights_of(program: Any) -> list[Any]:
    """Return the tensors that are the first arguments of the graph of an ExportedProgram."""
    values = {**program.constants, **program.state_dict}
    specs = program.graph_signature.input_specs
    return [values[spec.target] for spec in specs if spec.target is not None]


def read_program(path: Path, manifest: Manifest) -> Any:
    """Read the ExportedProgram of model.pt2 without running code. Raises as `load_torch`."""
    import torch

    with rules.named(path.name), path.open("rb") as stream:
        entries = archive.read_checked(stream, pt2_archive.is_tensor)
        pt2_archive.check(entries)
    # torch reads the checked entries even if its zip reader would find others in the file.
    content = io.BytesIO(archive.packed(entries))
    del entries  # and their memory
    with _refusing_damage(path):
        program = torch.export.load(content)
    with rules.named(path.name):
        _check_arguments(program, manifest)
    return program


def _check_arguments(program: Any, manifest: Manifest) -> None:
    """Raise ValueError unless a program takes and returns tensors as the manifest nests them."""
    from torch.utils import _pytree

    positions = [0] * manifest.stores_positions
    others = [0] * (len(manifest.states) - len(positions))
    inputs, encoder = [0] * len(manifest.inputs), [0] * len(manifest.encoder)
    given = [*others, *[0] * (len(manifest.outputs) - 1)]
    wanted: dict[str, tuple[Any, Any]] = {
        "takes": (program.call_spec.in_spec, ((*inputs, *positions, [*others, *encoder]), {})),
        "returns": (program.call_spec.out_spec, (0, *positions, given)),
    }
    for what, (spec, nesting) in wanted.items():
        expected = _pytree.tree_structure(nesting)
        rule = f"a program that {what} {expected.num_leaves} tensors, nested as in the manifest"
        got = "none" if spec is None else f"{spec.num_leaves} tensors in another nesting"
        expect(spec == expected, rule, got)


@contextmanager
def _refusing_damage(path: Path) -> Iterator[None]:
    """Replace what torch raises for a damaged file by ValueError."""
    import torch

    rule = f"runtime: {path.name}: expected a file that torch loads"
    error = torch._export.verifier.SpecViolationError  # whose base is Exception
    # torch logs tracebacks of exceptions that are handled here.
    silent = quiet(logger="torch.export", level=logging.CRITICAL)
    with silent, explained(rule, "export again", error):
        yield
