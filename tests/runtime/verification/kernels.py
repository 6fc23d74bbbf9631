"""Kernels that the exporter's graphs need, and faults in them.

    python -m tests.runtime.verification.kernels

writes the kernels of tiny models, which `posenc conformance` tries without an artefact, and the
table of faults of docs/proof-results.md.
"""

import functools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import msgspec
import numpy as np
import torch
from msgspec.structs import replace as changed

from bench import marked
from posenc_export.encodings import REGISTRY
from posenc_export.export import ReadAs, Sources, export
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.graphs.onnx_parts import constant
from posenc_export.runtime.verification.conformance import geometry, suite
from posenc_export.runtime.verification.conformance.attention import INPUTS
from posenc_export.runtime.verification.conformance.trial import (
    Feeds,
    Kernel,
    Outputs,
    Run,
    Trial,
    opened,
    worst,
)
from tests.reading import own_modules
from tests.runtime.verification.test_indices import MASKS
from tests.tiny import block, encoder, works
from tests.traces import sources

PAGE = Path("docs/proof-results.md")
PRODUCTS: Any = decoder_config(64, 1, 72, block_config(40, 5, 64, kv_heads=1))
# Products of packages/kernels, which takes rows of 32 inputs.
OF_LIBRARY: Any = decoder_config(64, 1, 96, block_config(64, 4, 64))
FORMATS = ("int8", "int8-32", "int4", "int4-128")
Change = Callable[[np.ndarray], np.ndarray]


@functools.cache
def experts() -> Sources:
    """Return the sources of a decoder with experts whose gates are limited."""
    torch.manual_seed(0)
    layer = own_modules.Experts(3, biased=True, unit=(1.702, 1.0, 0.4))
    module = own_modules.Decoder((own_modules.Rotated(), layer)).eval()
    return Sources(module, how=ReadAs(own_modules.inputs(module, 2, 12), 24))


def models(folder: Path) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Yield descriptions or sources, targets and options of exports whose kernels are listed."""
    plain, targets = block("rope"), ("onnx", "onnx-static", "ort", "ort-native")
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((2048, 48), np.float32))
    for target in targets:
        yield block("rope-interleaved"), target, {}
        for mask in MASKS.values():
            yield changed(plain, attention=changed(plain.attention, sees=mask)), target, {}
        softcap = changed(plain.attention, softcap=5.0)
        yield changed(plain, attention=softcap), target, {"signature": "mask"}
        yield encoder("alibi"), target, {}
    for name in REGISTRY:
        for target in ("ort", "ort-native") if works(name, "causal") else ():
            yield block(name), target, {}
    for weights in FORMATS:
        for target in ("ort", "onnx", "ort-cuda"):
            dtype = "float16" if target == "ort-cuda" else "float32"
            yield PRODUCTS, target, {"weights": weights, "dtype": dtype}
    for target in ("ort", "onnx"):
        yield PRODUCTS, target, {"dtype": "float16"}
    for weights in ("int4", "int8"):
        yield experts(), "ort", {"weights": weights}
    for cache, target in (("int8", "ort"), ("int8", "ort-native"), ("float16", "ort-native")):
        sample = {"calibrate": folder / "x.npy"} if cache == "int8" else {}
        yield plain, target, {"cache": cache, **sample}
    for weights in FORMATS:
        yield OF_LIBRARY, "ort-native", {"weights": weights}


def of_models() -> dict[Kernel, None]:
    """Export the models, and return their kernels."""
    found: dict[Kernel, None] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, (config, target, options) in enumerate(models(Path(temporary))):
            folder = Path(temporary) / str(number)
            model = config if isinstance(config, Sources) else sources(config)
            try:
                export(model, target, folder, verify=False, **options)
            except ValueError as refused:
                print(refused)
                continue
            found |= dict.fromkeys(geometry.kernels(folder, manifests.read(folder)).contracts)
    return found


@dataclass(frozen=True)
class Fault:
    """A wrong kernel: the right one with other nodes or constants, which reads other inputs or
    whose outputs are others.
    """

    kernel: Kernel
    trial: Callable[[Trial], Trial] = lambda trial: trial
    reads: Callable[[Feeds], Mapping[str, Any]] = lambda feeds: {}
    writes: Callable[[Feeds, Outputs], Mapping[int, Any]] = lambda feeds, outputs: {}

    def opened(self, trial: Trial, threads: int | None) -> Run:
        """Open the wrong kernel (trial.opened)."""
        run = opened(self.trial(trial), threads)

        def faulty(feeds: Feeds) -> Outputs:
            read = {**feeds, **self.reads(feeds)}
            outputs = run({name: np.array(array, order="C") for name, array in read.items()})
            others = self.writes(feeds, outputs)
            return [others.get(n, array) for n, array in enumerate(outputs)]

        return faulty

    def error(self) -> float:
        """Return the largest error over its bound."""
        return worst(suite.trial(self.kernel), self.opened)[0]


def other(kernel: Kernel, **attributes: Any) -> Fault:
    """A kernel that computes with other attributes."""
    step = kernel.nodes[-1]
    known = tuple({**dict(step.attributes), **attributes}.items())
    different = replace(kernel, nodes=(*kernel.nodes[:-1], step._replace(attributes=known)))
    return Fault(kernel, lambda trial: trial._replace(nodes=suite.trial(different).nodes))


def stored(kernel: Kernel, name: str, change: Change) -> Fault:
    """A kernel that reads a constant otherwise."""

    def altered(trial: Trial) -> Trial:
        values = {value.name: value for value in trial.constants}
        numbers = values[name].array(Path())
        values[name] = constant(name, change(numbers).astype(numbers.dtype))
        return trial._replace(constants=[*values.values()])

    return Fault(kernel, altered)


def read(kernel: Kernel, index: int, change: Change) -> Fault:
    """A kernel that reads an input otherwise, but writes the right caches."""
    name, caches = f"0.{index}", {3: 1, 4: 2}

    def restored(feeds: Feeds, outputs: Outputs) -> Mapping[int, Any]:
        if index not in caches or kernel.operator not in geometry.CACHED:
            return {}
        right, after = feeds[name], outputs[caches[index]]
        return {caches[index]: np.where(change(right) == after, right, after)}

    return Fault(kernel, reads=lambda feeds: {name: change(feeds[name])}, writes=restored)


def written(kernel: Kernel, index: int, change: Callable[[Feeds, np.ndarray], Any]) -> Fault:
    """A kernel that writes an output otherwise."""
    return Fault(kernel, writes=lambda feeds, outputs: {index: change(feeds, outputs[index])})


def _last_slots(change: Callable[[np.ndarray, np.ndarray], Any]) -> Any:
    """Change what the last slot of each row has after a call, from that and what it had before."""

    def altered(feeds: Feeds, keys: np.ndarray) -> np.ndarray:
        keys = keys.copy()
        for row, slot in enumerate(feeds["0.5"]):
            keys[row, :, slot] = change(keys[row, :, slot], feeds["0.3"][row, :, slot])
        return keys

    return altered


def _saturated(kernel: Kernel) -> Any:
    """Add products of two codes in 16 bits, as the instruction vpmaddubsw does."""
    values = {value.name: value.array(Path()) for value in suite.trial(kernel).constants}
    weight, scales = values["1.1"].astype(np.int32), values["1.3"]

    def sums(feeds: Feeds, y: np.ndarray) -> np.ndarray:
        codes = np.rint(feeds["0.0"].astype(np.float64) / feeds["0.1"]).clip(-128, 127) + 128
        pairs = codes[..., None].astype(np.int32) * weight
        pairs = (pairs[:, 0::2] + pairs[:, 1::2]).clip(-32768, 32767).sum(1)
        return ((pairs - 128 * weight.sum(0)) * scales).astype(np.float32)

    return sums


def _slots(cache: np.ndarray) -> np.ndarray:
    """Exchange slots 1 and 2."""
    return cache[:, :, [0, 2, 1, *range(3, cache.shape[2])]] if cache.shape[2] > 3 else cache


def faults() -> Mapping[str, Fault]:
    """Return the faults by name."""
    kernels = suite.listed()

    def first(operator: str, *words: str) -> Kernel:
        fits = (k for k in kernels if k.operator == operator and all(w in repr(k) for w in words))
        return next(fits)

    fused, window = "GroupQueryAttention", "'local_window_size', 9)"
    windows, rotary = first(fused, window), first(fused, "'do_rotary', 1)")
    capped, scaled = first(fused, "softcap"), first(fused, "int8")
    blocked, whole = first("MatMulNBits", "'bits', 4)", "0.3"), first("MatMulIntegerToFloat")
    rows, chosen, masked = first("GatherBlockQuantized"), first("QMoE"), first("Attention", "0.4")
    cos, scale = INPUTS.index("cos"), INPUTS.index("v_scale")
    distances = first("CachedAttention", f"0.{INPUTS.index('distances')}'")
    decays = first("CachedAttention", f"0.{INPUTS.index('decays')}'")
    return {
        "window one token long": other(windows, local_window_size=10),
        "window one token short": other(windows, local_window_size=8),
        "window ignored": other(windows, local_window_size=-1),
        "softcap left out": other(capped, softcap=0.0),
        "pairs in halves": other(rotary, rotary_interleaved=0),
        "scale 1 % off": other(rotary, scale=0.2525),
        "keys of another slot": read(rotary, 3, _slots),
        "values of another slot": read(rotary, 4, _slots),
        "rotated by the position before": read(rotary, cos, lambda x: np.roll(x, 1, 0)),
        "last slot not written": written(rotary, 1, _last_slots(lambda new, old: old)),
        "rows exchanged": written(rotary, 0, lambda feeds, y: y[::-1]),
        "heads of another group": written(rotary, 0, lambda feeds, y: np.roll(y, 16, 2)),
        "scores of keys in float16": read(
            rotary, 3, lambda x: x.astype(np.float16).astype(np.float32)
        ),
        "scales of the channel before": read(scaled, scale, lambda x: np.roll(x, 1)),
        "codes rounded down": written(scaled, 1, _last_slots(lambda new, old: new - (new > -128))),
        "biases of the distance before": read(distances, 14, lambda x: np.roll(x, 1, 1)),
        "decays of the key before": read(decays, 21, lambda x: np.roll(x, 1, 2)),
        "zero points one higher": stored(blocked, blocked.nodes[-1].inputs[3], lambda x: x ^ 1),
        "scales of the output before": stored(
            blocked, blocked.constants[0].name, lambda x: np.roll(x, 1, 0)
        ),
        "high nibble first": stored(
            blocked, blocked.nodes[-1].inputs[1], lambda x: x >> 4 | x << 4
        ),
        "first output zero": written(blocked, 0, lambda feeds, y: y * (np.arange(y.shape[-1]) > 0)),
        "sums of two products limited to 16 bits": written(whole, 0, _saturated(whole)),
        "codes without their zero point": stored(whole, "1.4", lambda x: x - 1),
        "row of the token before": written(rows, 0, lambda feeds, y: np.roll(y, 1, 1)),
        "bias of the gates left out": stored(chosen, "0.4", np.zeros_like),
        "experts of another token": read(chosen, 1, lambda x: np.roll(x, 1, 1)),
        "mask of the key before": read(masked, 3, lambda x: np.roll(x, 1, 3)),
        "cached tokens left out": written(masked, 1, lambda feeds, keys: keys * 0),
        "sines of the row before": read(first("RotaryEmbedding"), 2, lambda x: np.roll(x, 1, 0)),
        "written a slot late": written(
            first("TensorScatter", "'axis', 2)"), 0, lambda feeds, y: np.roll(y, 1, 2)
        ),
    }


def main() -> None:
    """Write both."""
    listed = b",\n".join(msgspec.json.encode(kernel) for kernel in of_models())
    suite.LISTED.write_bytes(b"[\n" + listed + b"\n]\n")
    lines = [[name, f.kernel.operator, f"{f.error():.0e}"] for name, f in faults().items()]
    content = marked.markdown(["fault in a kernel", "operator", "error / bound"], lines)
    marked.replace(PAGE, "ruined kernels", f"{content}\n")


if __name__ == "__main__":
    main()
