"""Export two trained decoders to every target, verify them, continue a Python file, and time the
runtimes.

python -m bench.demo [FOLDER]
"""

import calendar
import os
import sys
from pathlib import Path

import numpy as np

from bench.presets import LENGTH
from posenc_export.benchmark import run
from posenc_export.commands.terminal import Progress, show, summary
from posenc_export.export import Sources, export
from posenc_export.export.targets import runnable
from posenc_export.models.presets import load_preset
from posenc_export.runtime import load
from posenc_export.runtime.graphs import cuda

PROMPT = 600  # bytes of the prompt, more than twice the trained length
TOKENS = 160
CONTEXTS = (128, 1024)
NEXT = """
The same decoder in a browser (npm once, for WebAssembly; then open http://localhost:8080):
  npm install --prefix {parent} onnxruntime-web
  {bin}/posenc page {folder}/tiny-rope/onnx -o {page} --onnxruntime-web {web}
  {bin}/python -m http.server --directory {page} 8080
and behind an HTTP API like OpenAI's:
  {bin}/posenc serve {folder}/tiny-rope/ort --name tiny-rope
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"prompt": "def read(path):", "max_tokens": 64, "temperature": 0.4}}'"""


def main(folder: Path) -> None:
    progress, rows = Progress(), []
    for name in ("tiny-rope", "tiny-alibi"):
        model = Sources(load_preset(name))
        for target in runnable():
            place = folder / name / target
            certificate = export(model, target, place, progress=progress).certificate
            rows.append({"model": name, "target": target, **summary(certificate)})
    progress.close()
    show(rows)
    text = Path(calendar.__file__).read_bytes()  # not in the training data (models/training.py)
    for name, length in (("tiny-rope", LENGTH - TOKENS), ("tiny-alibi", PROMPT)):
        session = load(folder / name / "ort").session()
        prompt = np.frombuffer(text[:length], np.uint8).astype(np.int64)[None]
        ids = session.generate(prompt, TOKENS, temperature=0.4, top_k=8)
        generated = [int(token[0]) for token in ids]
        now = f"now at position {int(session.position[0])} (trained to {LENGTH})"
        print(f"\n--- {name} continues calendar.py from byte {length}, {now}")
        parts = (text[max(0, length - 120) : length], bytes(generated))
        print("│".join(part.decode(errors="replace") for part in parts))
    timed = [target for target in runnable() if target != "ort-cuda" or cuda.obstacle() is None]
    folders = [folder / "tiny-rope" / target for target in timed]
    print("\n" + run(folders, runtimes=("eager",), contexts=CONTEXTS, progress=progress).table())
    print(
        NEXT.format(
            bin=os.path.relpath(Path(sys.executable).parent),
            folder=folder,
            page=folder / "page",
            parent=folder.parent,
            web=folder.parent / "node_modules/onnxruntime-web",
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo"))
