"""Models for the CUDA provider, by name: every encoding in a decoder and in a block, models with
other parts, checkpoints, trained presets, and some of them in few bits.
"""

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Callable

from posenc_export.encodings import REGISTRY
from posenc_export.export import Sources
from posenc_export.export.quantization.formats import FORMATS, KEEP
from posenc_export.models.presets import load_preset, seeded
from posenc_export.models.pretrained import from_pretrained
from posenc_export.models.short_forms import block_config, decoder_config
from tests.tiny import VARIANTS, block, decoder

DEPTHS = (2, 12)
FEW_BITS = " as "  # before the format of weights in a name
ENCODINGS = (
    "rope", "alibi", "t5", "nope", "learned", "sinusoidal", "kerple", "fire", "rope_yarn", "shaw"
)  # fmt: skip
CHECKPOINTS = ("llama", "llama with biases", "mistral", "mistral with a window")
FILES = ("Q4_0", "Q4_K", "Q8_0")  # types of weights in GGUF files
Models = dict[str, Callable[[], Sources]]  # functions that make the sources of an export


def decoders() -> Models:
    return {name: lambda name=name: Sources(seeded(decoder(name))) for name in REGISTRY}  # type: ignore[misc]


def variants() -> Models:
    names = [name for name in VARIANTS if name not in REGISTRY]
    return {name: lambda name=name: Sources(seeded(decoder(name))) for name in names}  # type: ignore[misc]


def blocks() -> Models:
    # complex_order reads token ids, which a block does not have.
    names = [name for name in REGISTRY if name != "complex_order"]
    return {f"block-{name}": lambda name=name: Sources(seeded(block(name))) for name in names}  # type: ignore[misc]


def parts() -> Models:
    from tests.models import test_parts

    return {
        f"part-{name}": lambda config=config: Sources(test_parts._spread(seeded(config)))
        for name, (config, *_) in test_parts.MODELS.items()
    }  # type: ignore[misc]


def checkpoints() -> Models:
    from tests.models.checkpoints import saved

    def sources(name: str) -> Sources:
        folder = Path(tempfile.mkdtemp())
        saved(name, folder)
        return Sources(from_pretrained(folder))

    return {f"checkpoint-{name}": lambda name=name: sources(name) for name in CHECKPOINTS}  # type: ignore[misc]


def presets() -> Models:
    return {
        name: lambda name=name: Sources(load_preset(name)) for name in ("tiny-rope", "tiny-alibi")
    }  # type: ignore[misc]


def depths() -> Models:
    """Decoders of width 768 with heads of 64: their difference is what a layer costs."""

    def sources(name: str, layers: int) -> Sources:
        attention = block_config(768, 12, 1100, encoding={"name": name})
        return Sources(seeded(decoder_config(61, layers, 2048, attention)))

    return {
        f"{name}, {layers} layers": lambda name=name, layers=layers: sources(name, layers)
        for name in ("rope", "alibi")
        for layers in DEPTHS
    }  # type: ignore[misc]


def few_bits() -> Models:
    """Ten encodings, checkpoints, a model of width 768 and GGUF files, in every format."""
    plain = {name: make for name, make in decoders().items() if name in ENCODINGS}
    plain |= {**checkpoints(), "rope, 2 layers": depths()["rope, 2 layers"]}
    each = itertools.product(FORMATS, plain.items())
    made = {f"{name}{FEW_BITS}{weights}": make for weights, (name, make) in each}
    return made | {f"{k}{FEW_BITS}{KEEP}": functools.partial(_of_file, k) for k in FILES}


def _of_file(kind: str) -> Sources:
    from gguf import GGMLQuantizationType as Types

    from tests.models import gguf_files

    path = Path(tempfile.mkdtemp()) / "model.gguf"
    gguf_files.write("llama wide", gguf_files.made("llama wide"), path, Types[kind])
    return Sources(from_pretrained(path))


def weights_of(name: str) -> str | None:
    """Return the format of weights of a model by its name; None for that of activations."""
    return name.partition(FEW_BITS)[2] or None


KINDS: dict[str, Callable[[], Models]] = {
    "decoders": decoders, "presets": presets, "depths": depths, "variants": variants,
    "blocks": blocks, "parts": parts, "checkpoints": checkpoints, "few bits": few_bits,
}  # fmt: skip
