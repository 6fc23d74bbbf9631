"""Worker processes, of which one runs at a time; all are killed at the end."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, Iterator, Sequence

from posenc_export.shared.refusal import refusal

COMMAND = [sys.executable, "-m", "posenc_export.benchmark.worker"]
PATIENCE = 600.0  # seconds for one reply
ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """Process that runs only while `ask` waits for its reply, and is stopped otherwise.

    Args:
        label: name of the contestant, for error messages.
        threads: number of threads, for libraries that read it from the environment.
    """

    def __init__(self, label: str, threads: int) -> None:
        self.label = label
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self.connection, theirs = Pipe()
        self.child = subprocess.Popen(
            [*COMMAND, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env=_environment(threads),
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and return its reply. Raise ValueError if the contestant fails."""
        self._signal(signal.SIGCONT)
        try:
            self.connection.send({"do": do, **request})
            if not self.connection.poll(PATIENCE):
                rule = f"{do} to end within {PATIENCE:.0f} s"
                remedy = "omit this contestant or give smaller contexts"
                raise refusal(f"benchmark {self.label}", rule, "no reply", remedy)
            reply: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            raise self._died(do) from None
        self._signal(signal.SIGSTOP)
        if "error" in reply:
            rule, remedy = f"{do} to succeed", "omit this contestant or correct the error"
            raise refusal(f"benchmark {self.label}", rule, f"'{reply['error']}'", remedy)
        return reply

    def close(self) -> None:
        """Kill the process and its children, also if they are stopped."""
        self._signal(signal.SIGKILL)
        self.child.wait()
        self.connection.close()
        self.log.close()

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    def _died(self, do: str) -> ValueError:
        code = self.child.wait()
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        rule, got = f"the worker to complete {do}", f"exit code {code} ({last[0]})"
        return refusal(f"benchmark {self.label}", rule, got, "omit this contestant or free memory")


@contextlib.contextmanager
def started(labels: Sequence[str], threads: int) -> Iterator[list[Worker]]:
    """Context manager that starts a worker per label, and kills all of them at exit."""
    with contextlib.ExitStack() as stack:
        starting = (contextlib.closing(Worker(label, threads)) for label in labels)
        yield [stack.enter_context(worker) for worker in starting]


def _environment(threads: int) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    libraries = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    own = {**dict.fromkeys(libraries, str(threads)), "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **own}
