"""A graph of a stranger in a process of its own, with limits (shared/confinement.py): a library
that a file misleads ends that process, and writes nothing.

Both processes exchange data alone: messages of msgpack.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Mapping

import msgspec
import numpy as np

from posenc_export.auditing.facts import Claim, Facts
from posenc_export.auditing.graph import Arrays, Graph
from posenc_export.auditing.inputs import Interface, NotPossible, NotUnrounded, Value
from posenc_export.runtime.graphs.onnx_files import external_files
from posenc_export.runtime.session.errors import GraphError
from posenc_export.shared.confinement import confine
from posenc_export.shared.foreign import FOREIGN, brief
from posenc_export.shared.refusal import refusal

SECONDS = 3600.0  # that a graph may compute in one audit, by default
LONGEST = 8 << 30  # bytes of a message
START = (
    "import sys; sys.path[:] = {}; from posenc_export.auditing import confined; confined.serve()"
)
EXECUTORCH = b"ET12"  # bytes 4 to 7 of its programs (schema/program.fbs)
Packed = dict[str, tuple[str, list[int], bytes]]  # name of the dtype, shape and content, by name
Form = tuple[dict[str, tuple[str, str, str]], Packed]  # attributes of Unrounded
OF_FOLDERS = ("model.onnx", "model.pt2")
MOST_SECONDS = 10**7  # seconds of an audit
LARGEST = 1 << 31  # numbers of the inputs and outputs of one call


class Opened(msgspec.Struct):
    """What is known of a graph: the attributes of Graph."""

    inputs: list[Value]
    outputs: list[Value]
    operators: set[str] = set()
    unread: set[str] = set()
    precision: str = ""
    code: str = ""
    needs: str = ""
    rounded: str = ""


class Failed(GraphError):
    """The error of a graph that runs in another process, by its message."""

    def __init__(self, text: str) -> None:
        RuntimeError.__init__(self, text)


ERRORS: dict[str, type[Exception]] = {
    "refused": ValueError, "missing": ModuleNotFoundError, "impossible": NotPossible,
    "failed": Failed, "rounded": NotUnrounded,
}  # fmt: skip
# What reading and running a graph raises. Others are bugs, and end the process.
HANDLED: tuple[type[Exception], ...] = (
    ModuleNotFoundError,
    NotPossible,
    NotUnrounded,
    OSError,
    *FOREIGN,
)


class Confined:
    """A graph in a process of its own, which ends with this object.

    Args:
        path: of the file of the graph.
        seconds: that the process may take for all of its answers.

    Attributes: as for Graph. Raises ValueError, also if the process ends or takes longer.
    """

    def __init__(self, path: Path, seconds: float = SECONDS) -> None:
        self.path, self.seconds, self._left = path, seconds, seconds
        folders = [str(Path(folder).resolve()) for folder in sys.path if folder]
        self._connection, theirs = Pipe()
        arguments = [str(path), str(seconds), str(theirs.fileno())]
        nothing: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        # Not inherited: other files of this process, and what the libraries print.
        command = [sys.executable, "-I", "-c", START.format(folders), *arguments]
        self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()], **nothing)
        theirs.close()
        try:
            vars(self).update(msgspec.structs.asdict(self._answer(Opened)))
        except BaseException:
            self.close()
            raise

    def run(self, feeds: Mapping[str, np.ndarray], what: str = "run") -> Arrays:
        """Run the graph as Graph.run does. Raise ValueError if the process ends. what: the request
        (serve).
        """
        return _unpacked(self._answer(Packed, what, _packed(feeds)))

    def unrounded(self) -> SimpleNamespace:
        """Return the float32 form, which has the attributes of Unrounded and keeps this graph open.
        Raise NotUnrounded if it is not known, and as `run`.
        """
        weights, packed = self._answer(Form, "unrounded")
        run, numbers = partial(self.run, what="run unrounded"), _unpacked(packed)
        return SimpleNamespace(run=run, weights=weights, numbers=numbers)

    def prove(self, interface: Interface, facts: Facts) -> list[Claim]:
        """As Graph.prove, of the float32 form if it was opened."""
        answer: list[Claim] = self._answer(list[Claim], "prove", (interface, facts))
        return answer

    def close(self) -> None:
        """End the process."""
        self._child.kill()
        self._child.wait()
        self._connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_child"):
            self.close()

    def _answer(self, kind: Any, what: str = "", content: Any = None) -> Any:
        """Send a request, if there is one, and return the answer."""
        began, timer = time.monotonic(), threading.Timer(self._left, self._child.kill)
        timer.daemon = True
        timer.start()
        try:
            if what:
                self._connection.send_bytes(msgspec.msgpack.encode((what, content)))
            received = self._connection.recv_bytes(LONGEST)
        except (EOFError, OSError):
            raise self._ended() from None
        finally:
            timer.cancel()
            self._left = max(0.0, self._left - (time.monotonic() - began))
        what, answer = msgspec.msgpack.decode(received, type=tuple[str, msgspec.Raw])
        if what in ERRORS:
            raise ERRORS[what](msgspec.msgpack.decode(answer, type=str))
        return msgspec.msgpack.decode(answer, type=kind)

    def _ended(self) -> ValueError:
        status = self._child.wait()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        got = f"{self.path}: the process that ran it ended with {how}"
        if not self._left:
            got = f"{self.path}: it took more than {self.seconds:g} s"
        return refusal("audit", "a graph that can be read and run", got, "give another graph")


def _packed(arrays: Mapping[str, np.ndarray]) -> Packed:
    return {n: (a.dtype.name, list(a.shape), a.tobytes()) for n, a in arrays.items()}


def _unpacked(packed: Packed) -> Arrays:
    if any(dtype == "bfloat16" for dtype, _, _ in packed.values()):
        import ml_dtypes  # noqa: F401  gives numpy the name
    parts = {name: (np.dtype(part[0]), *part[1:]) for name, part in packed.items()}
    return {
        name: np.frombuffer(bytearray(content), dtype).reshape(shape)
        for name, (dtype, shape, content) in parts.items()
    }


def serve() -> None:
    """Open the graph of the command line, and run it for each message until the last one."""
    path, seconds, connection = Path(sys.argv[1]), float(sys.argv[2]), Connection(int(sys.argv[3]))
    # torch looks for a folder of its cache when it is imported, and makes it if there is none.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.gettempdir()
    confine(seconds)
    graph: Any = None
    what = "open"
    while True:
        try:
            if graph is None:
                graph = graph_of(path)
                answer: Any = msgspec.convert(graph, Opened, from_attributes=True)
            else:
                request = connection.recv_bytes()
                what, content = msgspec.msgpack.decode(request, type=tuple[str, msgspec.Raw])
                if what == "unrounded":
                    form = graph.unrounded()
                    answer = form.weights, _packed(form.numbers)
                elif what == "prove":
                    asked = msgspec.msgpack.decode(content, type=tuple[Interface, Facts])
                    answer = graph.prove(*asked)
                else:
                    run = graph.run if what == "run" else graph.form.run
                    answer = _packed(run(_unpacked(msgspec.msgpack.decode(content, type=Packed))))
            connection.send_bytes(msgspec.msgpack.encode(("value", answer)))
        except EOFError:
            return
        except HANDLED as error:
            connection.send_bytes(msgspec.msgpack.encode(_failure(error, what)))
            if graph is None:
                return


def _failure(error: Exception, what: str) -> tuple[str, str]:
    """Return the kind (ERRORS) and the text of an error of a request."""
    if what == "unrounded":
        return "rounded", str(error) if isinstance(error, NotUnrounded) else brief(error)
    for kind in ("missing", "impossible", "refused"):
        if isinstance(error, ERRORS[kind]):
            return kind, str(error)
    if isinstance(error, GraphError):
        return "failed", str(error)
    return "refused", f"audit: expected a graph that can be run, got {brief(error)}"


def opened(graph: Any, seconds: float) -> tuple[Path, Any]:
    """Open a file in a process of its own, which may take some seconds, or what an exporter
    writes into a folder.
    """
    path = Path(graph)
    if not 0 < seconds <= MOST_SECONDS:
        rule = f"seconds above 0, at most {MOST_SECONDS}"
        raise refusal("audit", rule, seconds, "give another limit")
    if path.is_dir():
        files = [path / name for name in OF_FOLDERS if (path / name).is_file()]
        if not files:
            rule = f"a folder with {' or '.join(OF_FOLDERS)}"
            raise refusal("audit", rule, f"{path} without these", "give the file of the graph")
        path = files[0]
    if not path.is_file():
        why = "is no file" if path.exists() else "does not exist"
        raise refusal("audit", "the file of a graph", f"{path}, which {why}", "check the path")
    graph = Confined(path, seconds)
    _check_sizes(graph)
    return path, graph


def _check_sizes(graph: Any) -> None:
    """Raise ValueError if the fixed axes of a graph ask for more memory than a call gets."""
    values = (*graph.inputs, *graph.outputs)
    fixed = [[axis for axis in value.axes if isinstance(axis, int)] for value in values]
    size = sum(math.prod(axes) for axes in fixed)
    if size > LARGEST or any(axis < 0 for axes in fixed for axis in axes):
        rule = f"inputs and outputs whose fixed axes ask for at most {LARGEST:,} numbers"
        got = f"{size:,} in {len(values)} values"
        raise refusal("audit", rule, got, "export it with smaller axes, or open ones")


def graph_of(path: Path) -> Any:
    """Open a graph in this process by its content, whatever its suffix says. Raise ValueError for
    other content.
    """
    with path.open("rb") as stream:
        head = stream.read(64)
    if head.startswith(b"PK"):
        from posenc_export.auditing.program import Program

        return Program(path)
    is_xml = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<")
    if is_xml or head[4:8] == EXECUTORCH:
        got = "XML, as in OpenVINO IR" if is_xml else "a program of ExecuTorch"
        remedy = "export the model to ONNX, or audit the program before its conversion"
        raise refusal("audit", "a graph in ONNX or of torch", f"{path}: {got}", remedy)
    _check_external(path)
    return Graph(path)


def _check_external(path: Path) -> None:
    """Raise ValueError for an ONNX file that reads others than files of its folder."""
    try:
        names = external_files(path)
    except ValueError as error:
        rule, got = "a graph that ONNX Runtime loads on the CPU", f"{path}: {error}"
        raise refusal("audit", rule, got, "give another file") from None
    for name in names:
        place, outside = path.parent / name, Path(name).is_absolute() or ".." in Path(name).parts
        if outside or (place.exists() and not place.is_file()):
            rule = "a graph that reads files of its folder alone"
            raise refusal("audit", rule, f"{path} that reads {name[:200]!r}", "give another file")
