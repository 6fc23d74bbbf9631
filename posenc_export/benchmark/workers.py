"""Worker processes, of which one runs at a time; all are killed at the end."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

from posenc_export.shared.refusal import refusal

COMMAND = [sys.executable, "-m", "posenc_export.benchmark.worker"]
PATIENCE = 600.0  # seconds for one reply
ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """Process that runs only while `ask` waits for its reply, and is stopped otherwise. On systems
    without the signals to stop it (Windows), it waits for input.

    Args:
        label: name of the contestant, for error messages.
        threads: number of threads, for libraries that read it from the environment.
        sleeping: whether threads of OpenMP sleep while they wait. Those of torch spin by default,
            and take the core that the awaited thread needs: steps of 0.05 ms took 24 ms.
    """

    def __init__(self, label: str, threads: int, sleeping: bool = False) -> None:
        self.label = label
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  closed by end()
        environment = _environment(threads, sleeping)
        pipes: Dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.child = subprocess.Popen(
            COMMAND, **pipes, stderr=self.log, env=environment, start_new_session=True
        )
        self._replies: "queue.SimpleQueue[bytes]" = queue.SimpleQueue()
        # A thread, because Windows cannot wait for a pipe for a limited time.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, do: str, **request: Any) -> Dict[str, Any]:
        """Send a request and return its reply. Raise ValueError if the contestant fails."""
        assert self.child.stdin is not None
        self._signal("SIGCONT")
        try:
            self.child.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            raise self._died(do) from None
        try:
            line = self._replies.get(timeout=PATIENCE)
        except queue.Empty:
            rule = f"{do} to end within {PATIENCE:.0f} s"
            remedy = "omit this contestant or give smaller contexts"
            raise refusal(f"benchmark {self.label}", rule, "no reply", remedy) from None
        if not line:
            raise self._died(do)
        self._signal("SIGSTOP")
        reply: Dict[str, Any] = json.loads(line)
        if "error" in reply:
            rule, remedy = f"{do} to succeed", "omit this contestant or correct the error"
            raise refusal(f"benchmark {self.label}", rule, f"'{reply['error']}'", remedy)
        return reply

    def end(self) -> None:
        """Kill the process and its children, also if they are stopped."""
        self._signal("SIGKILL")
        self.child.wait()
        self._reader.join()
        for stream in (self.child.stdout, self.log):
            if stream is not None:
                stream.close()
        if self.child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.child.stdin.close()

    def _read(self) -> None:
        assert self.child.stdout is not None
        line = b"\n"
        while line:
            line = self.child.stdout.readline()
            self._replies.put(line)

    def _signal(self, name: str) -> None:
        """Signal the process and its children; without process groups (Windows), kill it only."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.Signals[name])
        elif name == "SIGKILL":
            self.child.kill()

    def _died(self, do: str) -> ValueError:
        code = self.child.wait()
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        rule, got = f"the worker to complete {do}", f"exit code {code} ({last[0]})"
        return refusal(f"benchmark {self.label}", rule, got, "omit this contestant or free memory")


@contextlib.contextmanager
def started(labels: Sequence[str], threads: int, sleeping: bool = False) -> Iterator[List[Worker]]:
    """Context manager that starts a worker per label, and kills all of them at exit."""
    with contextlib.ExitStack() as stack:
        workers = []
        for label in labels:
            worker = Worker(label, threads, sleeping)
            stack.callback(worker.end)
            workers.append(worker)
        yield workers


def _environment(threads: int, sleeping: bool) -> Dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    libraries = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"} if sleeping else {}
    own = {**dict.fromkeys(libraries, str(threads)), "PYTHONPATH": os.pathsep.join(paths)}
    return {**waiting, **os.environ, **own}
