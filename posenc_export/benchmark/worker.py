"""Worker process of one contestant, which workers.Worker starts, and which replies to its requests.
It imports torch or onnxruntime only if the contestant needs them.
"""

import contextlib
import ctypes
import importlib
import signal
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable

import numpy as np

from posenc_export.benchmark.machine import watched
from posenc_export.benchmark.runtimes import ARTEFACT, RUNTIMES
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.manifest import Manifest

BURST = 16  # steps between two rewinds
READ_WIDTH = 512  # columns of the buffer for measuring bandwidth
# Untimed steps after a pause, because other contestants used the processor's caches meanwhile.
WARM = 5
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
Request = dict[str, Any]


def open_session(request: Request) -> tuple[Any, float, Manifest]:
    """Return the session for a load request, whose reset, prefill, step and rewind are timed, the
    seconds that it took, without imports, and the manifest of its folder.
    """
    folder, threads, batch = Path(request["folder"]), request["threads"], request["batch"]
    manifest, own = manifests.read(folder), request["runtime"] == ARTEFACT
    if own and manifest.in_torch:  # imported here, so that this does not count as load time
        importlib.import_module("torch").set_num_threads(threads)
    elif own:
        importlib.import_module("onnxruntime")
    else:
        runtime = RUNTIMES[request["runtime"]]
        peer: Any = importlib.import_module(f"posenc_export.benchmark.peers.{runtime.peer}")
    start = time.perf_counter()
    if own:
        session: Any = load(folder, request["provider"], threads).session(batch)
    else:
        session = peer.open_session(folder, manifest, threads, batch, **runtime.options)
    seconds = getattr(session, "load_seconds", None) or time.perf_counter() - start
    return session, seconds, manifest


class Bench:
    """Timed calls of one session; each public method handles one kind of request."""

    def __init__(self, open_session: Callable[[Request], tuple[Any, float, Manifest]]) -> None:
        self.open_session = open_session
        self.buffer = np.zeros((0, READ_WIDTH), np.float32)

    def load(self, batch: int, **request: Any) -> dict[str, Any]:
        """Load the contestant; a short prompt and a step compile and allocate."""
        self.batch = batch
        self.session, loaded, self.manifest = self.open_session({"batch": batch, **request})
        self.burst = min(BURST, self.manifest.max_positions // 2)
        self.token = self._prompt(1)[:, 0]
        start = time.perf_counter()
        length = min(16, self.manifest.max_positions - 1)
        self.session.prefill(self._prompt(length), logits_to_keep=1)
        if self.manifest.states:
            self.session.step(self.token)
        seconds = time.perf_counter() - start
        return {"load": loaded, "warm_up": seconds}

    def prefill(self, context: int) -> dict[str, Any]:
        """Time one prompt of `context` tokens per row from an empty cache."""
        return watched(lambda: self._prefill(context))

    def decode(self, context: int, duration: float, fresh: bool) -> dict[str, Any]:
        """Time steps around `context` cached tokens for about `duration` seconds. With `fresh` the
        cache is filled first, otherwise kept from the last request.
        """
        start = min(context - self.burst // 2, self.manifest.max_positions - self.burst)
        if fresh:
            self._prefill(max(1, start))
        self._steps(min(WARM, self.burst))
        return watched(lambda: _median(lambda: self._steps(self.burst), duration))

    def memory(self) -> dict[str, Any]:
        return {"peak": _status_bytes("VmHWM"), "resident": _status_bytes("VmRSS")}

    def bandwidth(self, bytes: int, duration: float) -> dict[str, Any]:
        """Time reading `bytes` bytes once: the fastest of three numpy operations, a sum, a dot
        product, and a matrix-vector product on all threads.
        """
        rows = max(1, -(-bytes // (4 * READ_WIDTH)))
        if self.buffer.shape[0] != rows:
            self.buffer = np.ones((rows, READ_WIDTH), np.float32)
        matrix, vector, flat = self.buffer, self.buffer[0], self.buffer.reshape(-1)
        reads = (flat.sum, partial(flat.dot, flat), partial(matrix.dot, vector))
        return watched(lambda: min(_median_of(read, duration / len(reads)) for read in reads))

    def _prompt(self, tokens: int) -> Any:
        """Return equal ids [B,S] int64 or hidden states [B,S,E]; values do not matter."""
        source = self.manifest.inputs[0]
        if source.dtype == "int64":  # not 0, often padding, on which onnxruntime-genai 0.18 crashes
            return np.ones((self.batch, tokens), np.int64)
        return np.full((self.batch, tokens, source.axes[-1]), 0.5, source.dtype)

    def _prefill(self, tokens: int) -> float:
        self.session.reset()
        prompt = self._prompt(tokens)
        return _timed(lambda: self.session.prefill(prompt, logits_to_keep=1))

    def _steps(self, count: int) -> list[float]:
        """Time successive steps, as decode runs them, and rewind them together. The first step is
        not counted, because a growing cache is then copied.
        """
        times = [_timed(lambda: self.session.step(self.token)) for _ in range(count)]
        self.session.rewind(count)
        return times[1:] or times


def _status_bytes(field: str) -> int:
    """Return a field of /proc/self/status in bytes, 0 on systems without: VmRSS is the resident
    memory, and VmHWM its largest size so far. ru_maxrss includes that of the parent before exec.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return 0
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def main(opener: Callable[[Request], tuple[Any, float, Manifest]] = open_session) -> None:
    """Answer requests until the other end closes. Errors are replies: the caller names the
    contestant.
    """
    if sys.platform == "linux":
        # Otherwise stopped workers remain when the caller is killed.
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    bench, connection = Bench(opener), Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError):
        while True:
            request = connection.recv()
            try:
                reply = getattr(bench, request.pop("do"))(**request)
            except Exception as error:  # the caller reports all of them, and ends all workers
                known = isinstance(error, ValueError)  # messages of this package name their origin
                reply = {"error": str(error) if known else f"{type(error).__name__}: {error}"}
            connection.send(reply)


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _median_of(call: Callable[[], Any], duration: float) -> float:
    """Call once untimed, then for `duration` seconds; return the median time of a call."""
    call()
    return _median(lambda: [_timed(call)], duration)


def _median(turn: Callable[[], list[float]], duration: float) -> float:
    """Call `turn` for `duration` seconds, at least once; return the median of all its times."""
    times = turn()
    end = time.perf_counter() + duration - sum(times)
    while time.perf_counter() < end:
        times += turn()
    return float(np.median(times))


if __name__ == "__main__":
    main()
