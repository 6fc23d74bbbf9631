"""Compare the speed of blocks and decoders with other runtimes; write bench/results/speed.json
and docs/speed.md.

    python -m bench.speed [--only PART]

Each part is measured in one run, in which its contestants take turns, and replaces that part of the
JSON file. Artefacts are exported once to build/speed and used again by later runs; remove that
folder after a change to the export. onnxruntime-genai, openvino, llama-cpp-python and transformers
take part if they are installed.
"""

import argparse
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench import json_rows, speed_page
from posenc_export.benchmark import Report, run
from posenc_export.benchmark.runtimes import RUNTIMES
from posenc_export.commands.terminal import Progress
from posenc_export.models.config import AnyConfig
from posenc_export.models.short_forms import block_config, decoder_config

ENCODINGS = ("rope", "alibi", "t5", "nope")
RESULTS, ARTEFACTS = Path("bench/results/speed.json"), Path("build/speed")


@dataclass(frozen=True)
class Variant:
    """An artefact of a part."""

    encoding: str = "rope"  # its position encoding
    target: str = "ort"
    signature: str = "positions"  # "positions" or "mask"
    weights: str = ""  # format of quantized weights, empty for float32
    cache: str = ""  # format of quantized caches, empty for float32

    @property
    def name(self) -> str:
        """Name of its folder."""
        cache, mask = self.cache and f"cache-{self.cache}", "mask" * (self.signature == "mask")
        return "-".join(filter(None, (self.encoding, self.target, self.weights, cache, mask)))


class Part(NamedTuple):
    """Models of one size."""

    variants: tuple[Variant, ...]  # their artefacts
    contexts: tuple[int, ...]  # tokens in the cache at decode
    prompts: tuple[int, ...]  # tokens of a prompt at prefill
    runtimes: tuple[str, ...]  # other runtimes, which take part if they are installed
    seconds: float  # time per contestant and number of tokens


def on_targets(*targets: str) -> tuple[Variant, ...]:
    """Return rope on these targets and the other encodings on `ort`."""
    others = [Variant(name) for name in ENCODINGS if name != "rope"]
    return (*(Variant(target=target) for target in targets), *others)


ALL = ("ort", "onnx", "onnx-static", "torchscript")
LOADERS = ("genai", "openvino")
LOADED = (Variant(signature="mask"), Variant(target="onnx", signature="mask"))  # which they load
QUANTIZED = tuple(Variant(weights=weights) for weights in ("int8", "int4", "int4-128"))
NATIVE = tuple(Variant(target="ort-native", weights=weights) for weights in ("int8", "int4"))
LLAMA_CPP = ("llama.cpp", "llama.cpp-q8_0", "llama.cpp-q4_0")
DECODERS = ("transformers", *LOADERS)
PROMPTS, SHORT, LONG = (1024,), (128, 1024), (128, 1024, 8192)
PARTS: dict[str, Part] = {
    "block": Part(on_targets(*ALL, "pt2"), LONG, PROMPTS, (), 1.5),
    "layers": Part((*on_targets(*ALL), *LOADED), SHORT, PROMPTS, DECODERS, 1.5),
    "model": Part((*on_targets("ort"), *LOADED), SHORT, PROMPTS, DECODERS, 3.0),
    "bits": Part(
        (Variant(), *QUANTIZED, *NATIVE), SHORT, PROMPTS, ("transformers", *LLAMA_CPP), 3.0
    ),
    "cache": Part((Variant(), Variant(cache="int8")), LONG[1:], PROMPTS, (), 3.0),
}
# Parts with the models of another part, which share its artefacts.
FOLDERS = {"bits": "model", "cache": "block"}
SAMPLE = 4096  # hidden states for the calibration of caches


def described(part: str, encoding: str) -> AnyConfig:
    """Return a part's model: a block of width 512, 4 layers of width 256, or 134M parameters."""
    spec, size = {"name": encoding}, FOLDERS.get(part, part)
    if size == "block":
        return block_config(512, 8, 16384, encoding=spec)
    if size == "layers":
        return decoder_config(4096, 4, 704, block_config(256, 4, 2048, encoding=spec))
    return decoder_config(49152, 30, 1536, block_config(576, 9, 2048, kv_heads=3, encoding=spec))


def exported(part: str, say: Progress) -> list[Path]:
    """Export the artefacts of a part, unless they exist, and return their folders."""
    from posenc_export.export import Sources
    from posenc_export.models.presets import seeded

    sources: dict[str, Sources] = {}
    variants = PARTS[part].variants
    paths = [ARTEFACTS / FOLDERS.get(part, part) / variant.name for variant in variants]
    for variant, path in zip(variants, paths, strict=True):
        if path.is_dir():
            continue
        say(f"export {part} {path.name}")
        if variant.encoding not in sources:  # one model at a time, which has up to 540 MB
            sources = {variant.encoding: Sources(seeded(described(part, variant.encoding)))}
        write(sources[variant.encoding], variant, path)
    return paths


def write(model: Any, variant: Variant, path: Path) -> None:
    """Export one artefact of Sources without verifying it. Caches of blocks are calibrated with
    random hidden states, which have the same scale in every channel.
    """
    from posenc_export.export import export

    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx and torch.jit warn at every export
        how: dict[str, Any] = {"weights": variant.weights or None, "cache": variant.cache or None}
        if variant.cache:
            how["calibrate"] = Path(place) / "sample.npy"
            shape = SAMPLE, model.model.config.width
            np.save(how["calibrate"], np.random.default_rng(0).standard_normal(shape, np.float32))
        export(model, variant.target, path, variant.signature, verify=False, **how)


def measured(name: str, say: Progress) -> Report:
    """Measure all contestants of a part in one run."""
    part = PARTS[name]
    runtimes = [runtime for runtime in part.runtimes if not RUNTIMES[runtime].missing()]
    paths, works = exported(name, say), (part.contexts, part.prompts)
    return run(paths, runtimes, *works, seconds=part.seconds, progress=say)


def main() -> None:
    """Measure the parts and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="part (default: all)")
    options = parser.parse_args()
    say = Progress()
    for name in options.only or PARTS:
        report = measured(name, say)
        say.close()
        print(f"{name}\n{report.table()}", flush=True)
        reports = {**committed(RESULTS), name: report}
        json_rows.write(RESULTS, {part: own.to_json() for part, own in reports.items()})
        speed_page.write(reports, Path("docs"))


def committed(path: Path) -> dict[str, Report]:
    """Return the reports of a JSON file by part; an empty dict if the file does not exist."""
    content = json_rows.read(path, {})
    for report in content.values():
        report.pop("headlines")  # which follow from the rows
    return {name: msgspec.convert(report, Report) for name, report in content.items()}


if __name__ == "__main__":
    main()
