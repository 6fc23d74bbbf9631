"""Write artefact folders: graph and manifest are made in a temporary folder, verified, then published in one step (export/publish.py)."""

import difflib
import shutil
from importlib import metadata
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from posenc_export.export import calibration, deviation, loaders
from posenc_export.export.calibration import Sample
from posenc_export.export.describe import Model, bound_of, describe, text_of
from posenc_export.export.expected import of_module
from posenc_export.export.fewer_bits import FORMATS
from posenc_export.export.foreign import named
from posenc_export.export.publish import Workshop, check_place, sweep
from posenc_export.export.signatures import NAMES
from posenc_export.export.source import Source, Sources
from posenc_export.export.targets import TARGETS
from posenc_export.export.verify import check
from posenc_export.models.stack import Stack, Text
from posenc_export.runtime import files, reference
from posenc_export.runtime import manifest as manifests
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.proof import Expected
from posenc_export.runtime.schema import Weights

Progress = Callable[[str], None]
CACHES = ("int8",)
MAKERS = ("torch", "onnx", "onnxscript")
TOKENIZER = "tokenizer.json"  # as the tokenizers library writes it


class FewBits(NamedTuple):
    """Formats of weights and caches of few bits, None for dtype, and the sample by which they are made."""

    weights: Optional[str]
    cache: Optional[str]
    sample: Optional[Sample]


def silent(_: str) -> None:
    """Progress callback that does nothing."""


def export(
    model: Union[Model, Sources, torch.nn.Module],
    target: str,
    folder: Union[str, Path],
    signature: str = "positions",
    dtype: Optional[str] = None,
    verify: bool = True,
    progress: Optional[Progress] = None,
    weights: Optional[str] = None,
    calibrate: Union[str, Path, None] = None,
    cache: Optional[str] = None,
) -> Manifest:
    """Write `model` to `folder` for `target`, and verify it (export/verify.py) before it is published.

    Args:
        model: a Stack, an AttentionBlock, or a torch.nn.Module around one of them (models.own.OwnModule says of what form), float32, which is not changed; or
            Sources(model), which several exports share so that it is traced once.
        target: a name in TARGETS.
        folder: created; replaced where it holds an artefact.
        signature: "positions" (position_ids) or "mask" (attention_mask).
        dtype: "float32" or "float16", of weights, activations and caches; the first of the target's dtypes where None.
        verify: run the parity grid and write its certificate.
        progress: called with a line at each stage.
        weights: "int8", "int4" or "int4-128" for linear layers and the token table in few bits (fewer_bits.FORMATS); None for weights in dtype.
        calibrate: file with a sample by which weights of 4 bits are rounded and scales of caches chosen: text, or hidden states float32 [tokens,E] in .npy for a
            model that reads them.
        cache: "int8" for cached keys and values in 8 bits, which needs a sample; None for those in dtype.

    Raises:
        ValueError: unknown target, signature, dtype or format of weights or caches, a folder that holds other files, a module that the target cannot represent, a sample
            that the model cannot read.
        VerificationError: the artefact does not agree with the module; nothing is written.
        OSError: the folder cannot be written, or the disk is full; an artefact that was there is unchanged.
    """
    return export_all(model, [target], folder, signature, dtype, verify, progress, weights, calibrate, cache)[0]


def export_all(
    model: Union[Model, Sources, torch.nn.Module],
    targets: Sequence[str],
    output: Union[str, Path],
    signature: str = "positions",
    dtype: Optional[str] = None,
    verify: bool = True,
    progress: Optional[Progress] = None,
    weights: Optional[str] = None,
    calibrate: Union[str, Path, None] = None,
    cache: Optional[str] = None,
) -> List[Manifest]:
    """As `export`, for several targets: all artefacts are published when the last one is verified, or none is.

    Args:
        output: the folder of the artefact for one target; for several, the folder that holds one subfolder for each, with its name.
    """
    output, say = Path(output), progress or silent
    check_export(targets, output, signature, dtype, weights, calibrate, cache)
    sources = model if isinstance(model, Sources) else Sources(model)
    few_bits = FewBits(weights, cache, None if calibrate is None else calibration.read(calibrate, sources.model))
    places = folders(targets, output)
    whole = len(targets) > 1 and not output.exists()  # then the outer folder is published in one step
    if len(targets) > 1:
        sweep(output.parent)
    workshop = Workshop([output] if whole else places)
    with workshop as path:
        made = [path / "made" / target for target in targets]
        manifests_made = [_make(sources, target, folder, signature, dtype, few_bits, verify, say) for target, folder in zip(targets, made, strict=True)]
        workshop.publish([path / "made"] if whole else made)
    return manifests_made


def folders(targets: Sequence[str], output: Path) -> List[Path]:
    """The folder of each target in export_all."""
    return [output / target for target in targets] if len(targets) > 1 else [output]


def check_export(
    targets: Sequence[str],
    output: Path,
    signature: str = "positions",
    dtype: Optional[str] = None,
    weights: Optional[str] = None,
    calibrate: Union[str, Path, None] = None,
    cache: Optional[str] = None,
) -> None:
    """Validate targets, options and folders before exporting.

    Raises:
        ValueError: unknown target, signature, dtype or format of weights or caches, one that a target does not take, a cache of 8 bits without a sample, a sample
            that nothing needs, a folder that an artefact cannot replace.
    """
    for target in targets:
        _check_names(target, signature, dtype, weights, cache)
        kind = TARGETS[target]
        if dtype is not None and dtype not in kind.dtypes:
            raise ValueError(f"export: expected dtype {' or '.join(kind.dtypes)} for target {target}, got {dtype}; give that or choose another target")
        if signature not in kind.layout:
            raise ValueError(f"export: expected signature {' or '.join(kind.layout)} for target {target}, got {signature}; choose target ort or onnx")
        _check_format("weights", weights, target, dtype, [name for name, other in TARGETS.items() if other.few_bits])
        _check_format("cache", cache, target, dtype, [name for name, other in TARGETS.items() if other.int8_cache])
    if calibrate is None and cache is not None:
        raise ValueError(f"export: expected a sample for the scales of cache {cache}, got none; give text of the kind that the model will read as calibrate")
    if calibrate is not None and cache is None and not (weights and FORMATS[weights].calibrated):
        raise ValueError(f"export: expected weights of 4 bits or cache int8 beside a sample for calibration, got {weights or 'neither'}; leave the sample out")
    for place in folders(targets, output):
        check_place(place)


def _check_format(what: str, format_: Optional[str], target: str, dtype: Optional[str], able: Sequence[str]) -> None:
    if format_ is not None and not (target in able and dtype in (None, "float32")):
        rule = f"one of the targets {', '.join(able)}" if len(able) > 1 else f"target {able[0]}"
        found = target if dtype is None else f"{target} in {dtype}"
        raise ValueError(f"export: expected {rule} in float32 for {what} {format_}, got {found}; choose that or leave {what} out")


def _make(sources: Sources, target: str, folder: Path, signature: str, dtype: Optional[str], few_bits: FewBits, verify: bool, say: Progress) -> Manifest:
    """Write and verify one artefact in `folder`."""
    kind, (weights, cache, sample) = TARGETS[target], few_bits
    source = sources.of(dtype or kind.dtypes[0], weights, sample, cache is not None)
    say(f"{target}: tracing and lowering")
    bits = {"weights": weights and Weights(weights), "cache": cache or "", "calibration": sample and sample.described}
    described = describe(source.model, target, signature, kind.layout[signature], kind.update, **bits, **kind.geometry)
    manifest, expected = _written(source, described, folder, verify)
    if not verify:
        return manifest
    manifest = check(folder, manifest, source.model, expected, say)
    if manifest.weights is None and not manifest.cache:
        return manifest
    aside = folder.with_name(f"{folder.name}.float32")
    say(f"{target}: the same in float32")
    plain = check(aside, _written(source, described.replace(weights=None, cache="", calibration=None), aside, verify)[0], source.model, expected, say)
    shutil.rmtree(aside)
    return deviation.write(folder, manifest, plain, sources.of("float32").model)


def _written(source: Source, described: Manifest, folder: Path, verify: bool) -> Tuple[Manifest, Expected]:
    """An artefact in a new folder, not verified yet, and what its module gives."""
    folder.mkdir(parents=True)
    with named(described.target, source.model, described.packages):
        manifest = TARGETS[described.target].write(source, described, folder)
    expected = of_module(source.model, manifest, filled=verify)
    stored = reference.write(manifest, expected, bound_of(source.model, manifest), folder)
    _write_text(text_of(source.model), folder)
    if isinstance(source.model, Stack):
        loaders.write(source.model, manifest, folder)
    listed = {path.name: manifest.files.get(path.name) or files.entry(path) for path in sorted(folder.iterdir())}  # weights were hashed as they were written
    manifest = manifest.replace(reference=stored, files=listed, versions={name: metadata.version(name) for name in MAKERS})
    manifests.write(manifest, folder)
    return manifest, expected


def _write_text(text: Text, folder: Path) -> None:
    """The tokenizer, with the files beside it."""
    kept = {TOKENIZER: text.tokenizer, **text.files} if text.tokenizer else text.files
    for name, content in kept.items():
        files.write(folder / name, content)


def _check_names(target: str, signature: str, dtype: Optional[str], weights: Optional[str], cache: Optional[str]) -> None:
    known = {"target": list(TARGETS), "signature": list(NAMES), "dtype": ["float32", "float16"], "weights": list(FORMATS), "cache": list(CACHES)}
    for (what, names), name in zip(known.items(), (target, signature, dtype, weights, cache), strict=True):
        if name is not None and name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise ValueError(f"export: expected {what} to be one of {', '.join(names)}, got {name!r}; " + (f"did you mean {near[0]}?" if near else "choose among these"))
