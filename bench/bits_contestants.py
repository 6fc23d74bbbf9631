"""The contestants of bench.bits: artefacts, and other runtimes in processes of their own."""

import functools
import json
import math
import os
import statistics
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any, Dict, Optional, Protocol, Sequence

import numpy as np

from bench.timing import seconds
from posenc_export.runtime import load

PEERS = Path(__file__).with_name("bits_peers.py")
OTHERS = {
    "onnxruntime-genai int4": ("genai", ("onnxruntime-genai==0.18.0", "accelerate")),
    "llama.cpp": ("llama.cpp", ("xllamacpp==2026.10.11549",)),
}
OFFLINE = {"HF_HUB_OFFLINE": "1"}


class Contestant(Protocol):
    """A model in one runtime."""

    bytes: int

    def logits(self, ids: np.ndarray) -> Optional[np.ndarray]:
        """Return logits [S,V] of ids [S], or None."""

    def times(self, ids: Sequence[int], steps: int) -> Dict[str, float]:
        """Return the seconds of a prompt, as prefill, and of a step after it."""


class Own:
    """An artefact."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.session = load(folder, provider="cpu", threads=threads).session()
        names = ("model.onnx", "model.onnx.data")
        self.bytes = sum((folder / name).stat().st_size for name in names)

    def logits(self, ids: np.ndarray) -> Optional[np.ndarray]:
        self.session.reset()
        return np.asarray(self.session.prefill(ids[None], chunk=len(ids))[0])

    def times(self, ids: Sequence[int], steps: int) -> Dict[str, float]:
        self.session.reset()
        prompt, tokens = np.array([ids], np.int64), np.array(ids[:steps], np.int64)[:, None]
        prefill = seconds(functools.partial(self.session.prefill, prompt, logits_to_keep=1))
        step = [seconds(functools.partial(self.session.step, token)) for token in tokens]
        return {"prefill": prefill, "step": statistics.median(step)}


class Peer:
    """Another runtime in a process of its own (bits_peers.py)."""

    def __init__(self, python: Path, name: str, place: Path, threads: int) -> None:
        files = [place] if place.is_file() else place.glob("*.onnx*")
        self.bytes = sum(path.stat().st_size for path in files)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [python, PEERS, name, place, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def _ask(self, request: Dict[str, Any]) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():  # libraries print lines of their own
            if line.startswith(b"answer "):
                return json.loads(line.removeprefix(b"answer "))
        raise RuntimeError(
            f"bench.bits: expected an answer of {self.process.args}, got none; run it alone "
            "to see why"
        )

    def logits(self, ids: np.ndarray) -> Optional[np.ndarray]:
        answer = self._ask({"logits": ids.tolist()})
        if answer is None:
            return None
        assert self.process.stdout
        shape = answer["shape"]
        return np.frombuffer(self.process.stdout.read(4 * math.prod(shape)), "<f4").reshape(shape)

    def times(self, ids: Sequence[int], steps: int) -> Dict[str, float]:
        return dict(self._ask({"ids": list(ids), "steps": steps}))


def peer(label: str, model: Path, folder: Path, threads: int) -> Peer:
    """Open another runtime in its own environment."""
    name, python = OTHERS[label][0], environment(label, folder)
    if name == "llama.cpp":
        return Peer(python, name, model, threads)
    place = folder / "genai-int4"
    if not place.is_dir():
        _build(python, model, folder, place)
    return Peer(python, name, place, threads)


def environment(label: str, folder: Path) -> Path:
    """Return the Python of a runtime's own environment, which sees the packages of this one."""
    name, packages = OTHERS[label]
    python = folder / f"env-{name}" / "bin" / "python"
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
        site = next(python.parents[1].glob("lib/python*/site-packages"))
        (site / "base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return python


def _build(python: Path, model: Path, folder: Path, place: Path) -> None:
    """Build the model of onnxruntime-genai in 4 bits from the file, with the builder's defaults."""
    checkpoint, offline = folder / "checkpoint", {**os.environ, **OFFLINE}
    if not checkpoint.is_dir():
        command = [python, PEERS, "checkpoint", model, checkpoint]
        subprocess.run(command, check=True, env=offline)
    command = [python, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", place]
    command += ["-p", "int4", "-e", "cpu", "-c", folder / "cache"]
    subprocess.run(command, check=True, env=offline)
