"""One contestant in a process of its own: JSON requests on stdin, one JSON reply each on stdout.

Started by workers.Worker as `python -m posenc_export.benchmark.worker`; imports torch or onnxruntime only as its contestant needs.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, TextIO, Tuple

import numpy as np

from posenc_export.benchmark.disturbance import watched
from posenc_export.benchmark.opened import Opened
from posenc_export.benchmark.runtimes import ARTEFACT, RUNTIMES
from posenc_export.runtime import manifest as manifests
from posenc_export.runtime.manifest import Manifest

BURST = 16  # steps on an append cache before they are taken back together
READ_WIDTH = 512  # numbers in a row of the buffer that the bandwidth is measured on
WARM = 5  # untimed steps after a pause, in which other contestants used the processor's caches
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
Request = Dict[str, Any]


def open_session(request: Request) -> Tuple[Opened, Manifest]:
    """The session of a request, and the manifest of its folder."""
    folder = Path(request["folder"])
    manifest = manifests.read(folder)
    if request["runtime"] == ARTEFACT:
        return _open_artefact(folder, manifest, request), manifest
    peer = importlib.import_module(RUNTIMES[request["runtime"]].peer)
    opened: Opened = peer.open_session(folder, manifest, request["threads"], request["batch"])
    return opened, manifest


def _open_artefact(folder: Path, manifest: Manifest, request: Request) -> Opened:
    """Imports first, then the timed load."""
    from posenc_export.runtime import load

    if manifest.target in ("torchscript", "pt2"):
        import torch

        torch.set_num_threads(request["threads"])
    else:
        import onnxruntime  # noqa: F401  loaded here, so that it does not count as load time
    if "torch" in sys.modules and "onnxruntime" in sys.modules:  # two thread pools would slow each other down
        raise RuntimeError("bench: an artefact's process holds torch or onnxruntime, got both")
    start = time.perf_counter()
    session = load(folder, provider=request["provider"], threads=request["threads"]).session(request["batch"])
    return Opened(session, any(state.update == "append" for state in manifest.states), time.perf_counter() - start, manifest.source)


class Bench:
    """The timed calls on one session.

    Args:
        open_session: gives an opened session and its manifest for a request.
    """

    def __init__(self, open_session: Callable[[Request], Tuple[Opened, Manifest]]) -> None:
        self.open_session = open_session
        self.buffer = np.zeros((0, READ_WIDTH), np.float32)

    def load(self, request: Request) -> Dict[str, Any]:
        """Load, then a short prompt and a few steps, so that nothing later compiles or allocates for the first time."""
        opened, self.manifest = self.open_session(request)
        self.session, self.grows, self.batch = opened.session, opened.grows, request["batch"]
        self.burst = min(BURST, self.manifest.max_positions // 2)
        self.token = self._prompt(1)[:, 0]
        start = time.perf_counter()
        length = min(16, self.manifest.max_positions - 1)
        self.session.prefill(self._prompt(length), logits_to_keep=1)
        if self.manifest.states:
            self.session.step(self.token)
        return {"load": opened.seconds, "warm_up": time.perf_counter() - start, "weights": dict(opened.weights)}

    def prefill(self, request: Request) -> Dict[str, Any]:
        """One prompt of `context` tokens a row from an empty cache."""
        values, reading = watched(lambda: [self._prefill(request["context"])])
        return {"seconds": values, "reading": reading.to_json()}

    def decode(self, request: Request) -> Dict[str, Any]:
        """Steps at `context` for about `duration` seconds; the context is there already if the last request left it."""
        context = request["context"]
        start = min(context - self.burst // 2, self.manifest.max_positions - self.burst) if self.grows else context - 1
        if request["fresh"]:
            self._prefill(max(1, start))
        turn = self._grown_steps if self.grows else self._steps
        turn(min(WARM, self.burst))
        values, reading = watched(lambda: _repeat(lambda: turn(self.burst), request["duration"]))
        return {"seconds": values, "reading": reading.to_json()}

    def memory(self, request: Request) -> Dict[str, Any]:
        return {"peak": peak_bytes()}

    def bandwidth(self, request: Request) -> Dict[str, Any]:
        """Seconds to read `bytes` bytes once, by the quickest of three numpy loops: a sum, a dot product, a matrix times a vector on all threads."""
        rows = -(-request["bytes"] // (4 * READ_WIDTH))
        if self.buffer.shape[0] != rows:
            self.buffer, self.vector = np.ones((rows, READ_WIDTH), np.float32), np.ones(READ_WIDTH, np.float32)
        matrix, vector, flat = self.buffer, self.vector, self.buffer.reshape(-1)
        reads: List[Callable[[], Any]] = [flat.sum, lambda: flat.dot(flat), lambda: matrix.dot(vector)]
        values, reading = watched(lambda: [min(_median(read, request["duration"] / len(reads)) for read in reads)])
        return {"seconds": values, "reading": reading.to_json()}

    def gemm(self, request: Request) -> Dict[str, Any]:
        """Seconds of a float32 product of square matrices, `width` rows and columns, by numpy."""
        matrix = np.ones((request["width"], request["width"]), np.float32)
        return {"seconds": [_median(lambda: matrix @ matrix, request["duration"])]}

    def empty_run(self, request: Request) -> Dict[str, Any]:
        """Seconds of a run of one Identity node with everything bound; no number without the packages that it needs."""
        try:
            from posenc_export.benchmark.empty_graph import bound
        except ModuleNotFoundError:
            return {"seconds": []}
        return {"seconds": [_median(bound(request["threads"]), request["duration"])]}

    def _prompt(self, tokens: int) -> Any:
        """[B,S] int64 token ids or [B,S,E] hidden states, all equal: the cost of a call does not depend on values."""
        source = self.manifest.inputs[0]
        if source.dtype == "int64":
            return np.zeros((self.batch, tokens), np.int64)
        return np.full((self.batch, tokens, source.axes[-1]), 0.5, source.dtype)

    def _prefill(self, tokens: int) -> float:
        self.session.reset()
        prompt = self._prompt(tokens)
        start = time.perf_counter()
        self.session.prefill(prompt, logits_to_keep=1)
        return time.perf_counter() - start

    def _steps(self, count: int) -> List[float]:
        """Steps at one context; each is taken back, which is not timed."""
        times = []
        for _ in range(count):
            times.append(_timed(self.session.step, self.token))
            self.session.rewind(1)
        return times

    def _grown_steps(self, count: int) -> List[float]:
        """Steps around the context, taken back together: after a rewind the next step would copy a growing cache."""
        times = [_timed(self.session.step, self.token) for _ in range(count)]
        self.session.rewind(count)
        return times[1:]  # the first one copies the cache


def peak_bytes() -> int:
    """Largest resident memory so far. ru_maxrss is not used: it includes the parent's at the time of exec."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def serve(open_session: Callable[[Request], Tuple[Opened, Manifest]], requests: TextIO, replies: TextIO) -> None:
    """Answer until the input ends; an error becomes a reply, so that the caller can name the contestant."""
    bench = Bench(open_session)
    named = (bench.load, bench.prefill, bench.decode, bench.memory, bench.bandwidth, bench.gemm, bench.empty_run)
    actions = {action.__name__: action for action in named}
    for line in requests:
        request = json.loads(line)
        try:
            reply = actions[request["do"]](request)
        except Exception as error:  # the caller reports it, whatever it is, and ends every worker
            known = isinstance(error, ValueError)  # of this package, whose messages name the place
            reply = {"error": str(error) if known else f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main(opener: Callable[[Request], Tuple[Opened, Manifest]] = open_session) -> None:
    """Replies keep the real stdout; what libraries print goes to stderr."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)  # otherwise a stopped worker outlives a caller that is killed
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        serve(opener, sys.stdin, replies)


def _timed(call: Callable[[Any], Any], argument: Any) -> float:
    start = time.perf_counter()
    call(argument)
    return time.perf_counter() - start


def _repeat(turn: Callable[[], List[float]], duration: float) -> List[float]:
    """One value, the median of all steps taken in `duration` seconds."""
    times = turn()
    end = time.perf_counter() + duration - sum(times)
    while time.perf_counter() < end:
        times += turn()
    return [float(np.median(times))]


def _median(read: Callable[[], Any], duration: float) -> float:
    read()
    end = time.perf_counter() + duration
    times: List[float] = []
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        read()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


if __name__ == "__main__":
    main()
