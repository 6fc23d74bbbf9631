"""A worker without a model, which sleeps. The name of the artefact folder can make it fail, exit
or start a child process.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from posenc_export.benchmark import worker
from posenc_export.runtime.artefact import manifest as manifests


class FakeSession:
    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds, self.length = folder, seconds, 0

    def reset(self) -> None:
        self.length = 0

    def prefill(self, inputs, logits_to_keep) -> None:
        assert len(inputs) == int(os.environ.get("FAKE_WORKER_BATCH", "1"))
        self.length += inputs.shape[1]

    def step(self, inputs) -> None:
        if "fails" in self.folder.name:
            raise ValueError("the fake fails as told")
        if "dies" in self.folder.name:
            print("the fake dies as told", file=sys.stderr, flush=True)
            os._exit(7)
        self.length += 1
        time.sleep(self.seconds)

    def rewind(self, count: int) -> None:
        assert self.length >= count
        self.length -= count


def open_fake(request):
    folder = Path(request["folder"])
    if os.environ.get("FAKE_WORKER_PIDS"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.environ["FAKE_WORKER_PIDS"], "a", encoding="ascii") as stream:
            stream.write(f"{os.getpid()}\n{child.pid}\n")
    print("libraries print to stdout")
    seconds = 0.002 if request["runtime"] == "artefact" and "slow" in folder.name else 0.0005
    manifest = manifests.read(folder)
    return FakeSession(folder, seconds), 0.25, manifest


if __name__ == "__main__":
    worker.main(open_fake)
