"""Write artefact folders: graph and manifest, verified and then published in one step."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Iterable, Sequence

import torch

from posenc_export.export import half_precision, loader_configs, numbers, quality
from posenc_export.export.describe import Model, describe, text_of
from posenc_export.export.expected import accuracy_of, expected_outputs
from posenc_export.export.options import MAX_LOSS, ExportOptions
from posenc_export.export.quantization import mixed, samples
from posenc_export.export.quantization.formats import format_of
from posenc_export.export.quantization.samples import FEW, TOKENS, default_sample, with_text
from posenc_export.export.read_module import ReadAs, ReadModule
from posenc_export.export.sources import Sources, check_half, in_dtype
from posenc_export.export.targets import WRITERS
from posenc_export.export.trace import Source
from posenc_export.export.verify import VerificationError, check_written
from posenc_export.models.block import AttentionBlock
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.destinations import check_folder
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.publish import StagingFolder
from posenc_export.runtime.artefact.schema import TARGETS
from posenc_export.runtime.artefact.tokenizer import check_tokenizer
from posenc_export.runtime.verification import proof
from posenc_export.runtime.verification.grid_inputs import grid_of
from posenc_export.runtime.verification.proof import Accuracy, Expected
from posenc_export.shared.progress import Progress
from posenc_export.shared.refusal import path_of, refusal

# What targets take of the code of others.
TAKES = {"torchscript": "TorchScript compiles", "pt2": "torch.export traces with dynamic sizes"}
LONGEST = 300  # characters of an error of torch
TOKENIZER = "tokenizer.json"  # the file name of the tokenizers library


def export_model(
    model: Model | Sources | torch.nn.Module,
    target: str,
    folder: str | Path,
    signature: str = "positions",
    dtype: str | None = None,
    verify: bool | str = True,
    progress: Progress | None = None,
    weights: str | None = None,
    calibrate: str | Path | None = None,
    cache: str | None = None,
    tolerance: float | None = None,
    text: str | Path | None = None,
    max_loss: float = MAX_LOSS,
    size: float | None = None,
    example: torch.Tensor | None = None,
    max_positions: int | None = None,
    positions: str | None = None,
    causal: bool = True,
    output: str | None = None,
    axes: int = 0,
) -> Manifest:
    """Export `model` for `target`, verify the artefact and publish it as `folder`.

    Args:
        model: a float32 Stack or AttentionBlock, or any other torch.nn.Module, which is read as it
            is; it is not modified. Pass Sources(model) to share one trace among several exports.
        target: a name in TARGETS.
        folder: created, or replaced if it already holds an artefact.
        signature, dtype, verify, progress, weights, calibrate, cache: fields of ExportOptions.
        tolerance, text, max_loss, size: fields of ExportOptions.
        example, max_positions, positions, causal, output, axes: how to read a module (ReadAs).

    Raises:
        ValueError: unknown target, signature, dtype, weight or cache format; a folder that holds
            other files; a module that the target cannot represent; calibration data that the model
            cannot read; a size that is too small, or for a model that reads no text; a tokenizer
            that cannot be read; on text, a perplexity above `max_loss` times that in float32.
        VerificationError: the artefact does not agree with the module; nothing is written.
        OSError: the folder cannot be written, or the disk is full; an old artefact stays.
    """
    options = ExportOptions(signature, dtype, verify, progress, weights, calibrate, cache)
    options = replace(options, tolerance=tolerance, text=text, max_loss=max_loss, size=size)
    read = ReadAs(example, max_positions, positions, causal, output, axes)
    return export_all(model, [target], folder, options, read=read)[0]


def export_all(
    model: Model | Sources | torch.nn.Module,
    targets: Sequence[str],
    output: str | Path,
    options: ExportOptions = ExportOptions(),
    failed: dict[str, Exception] | None = None,
    read: ReadAs = ReadAs(),
) -> list[Manifest]:
    """Export for several targets. Artefacts are published after the last one is verified.

    Args:
        model: as for `export_model`, like the exceptions.
        targets: names in TARGETS.
        output: with one target, the artefact's folder; with several, the parent of one subfolder
            per target, named after it.
        failed: gets the error of each target that cannot represent the module or whose artefact
            does not agree with it, while the others are published; None to publish none if one
            fails.
        read: how to read a module that is not of this package.

    Returns:
        The manifests of the published artefacts, in the order of `targets`.
    """
    output = path_of("export", output)
    check_export(targets, output, options)
    sources = model if isinstance(model, Sources) else Sources(model, how=read)
    check_read(sources.model, options)
    check_tokenizer(text_of(sources.model).tokenizer)
    places = folders(targets, output)
    whole = len(targets) > 1 and not output.exists()  # a new parent folder is published in one step
    staging = StagingFolder([output] if whole else places)
    with staging as path:
        sources.keep_in(staging.parent)
        data = _read_data(sources, options)
        manifests: dict[Path, Manifest] = {}
        for target, place in zip(targets, places if whole else list(staging.places), strict=True):
            folder = path / "made" / target
            try:
                manifests[folder] = _make(sources, target, folder, options, data)
            except (VerificationError, ValueError) as error:
                if failed is None:
                    raise
                failed[target] = error
                shutil.rmtree(folder, ignore_errors=True)  # there is none if tracing failed
                staging.places = [other for other in staging.places if other != place]
        if manifests:
            staging.publish([path / "made"] if whole else list(manifests))
    return list(manifests.values())


def check_read(model: Model, options: ExportOptions) -> None:
    """Refuse to round weights that a module that was read does not have, or before which it
    chooses. ValueError.
    """
    if not isinstance(model, ReadModule):
        return
    products, format_ = model.products, options.format
    rounds = products.routers and not products.experts  # what routers read, in products of 8 bits
    if rounds and format_ and format_of(format_).projections.bits == 8:
        rule = "weights of 4 bits for a module that chooses experts"
        got = f"{format_}, for which products round what its routers read"
        raise refusal(model.where, rule, got, "choose int4, or export it in float32")
    if format_ and not products.linear:
        got = "none: its products read weights in other ways"
        raise refusal(model.where, "linear layers to round", got, "export it in float32")


def _read_data(sources: Sources, options: ExportOptions) -> quality.Inputs:
    sample = None if options.calibrate is None else samples.read(options.calibrate, sources.model)
    kept, measured = sample, None
    if options.rounds:
        tokens = FEW if options.verify == "quick" else TOKENS
        kept, measured = with_text(sample, options.text, sources.model, tokens)
    if kept is None and options.format and format_of(options.format).calibrated:
        kept = default_sample(sources.model)
    formats = None
    if options.size is not None:
        model = in_dtype(sources.model, "float32")
        formats = mixed.formats_within(model, kept, options.size, options.say)
    return quality.Inputs(sources.model, kept, measured, options.max_loss, formats)


def folders(targets: Sequence[str], output: Path) -> list[Path]:
    """Return the folder that export_all writes for each target."""
    return [output / target for target in targets] if len(targets) > 1 else [output]


def check_export(targets: Sequence[str], output: Path, options: ExportOptions) -> None:
    """Check options and folders before exporting.

    Raises:
        ValueError: ExportOptions.check refuses the options, or an artefact must not replace a
            folder.
    """
    options.check(targets)
    for place in folders(targets, output):
        check_folder(place)


def _make(
    sources: Sources, target: str, folder: Path, options: ExportOptions, read: quality.Inputs
) -> Manifest:
    dtypes = TARGETS[target].dtypes
    dtype = options.dtype or dtypes[0]
    check_half(sources.model, target, dtype)
    cache, format_ = options.cache or "", options.format
    source = sources.of(dtype, format_, read.sample, cache, read.formats, options.say)
    half_precision.check_model(sources.model, dtype)
    options.say(f"{target}: tracing and lowering")
    described = describe(source.model, target, options.signature).replace(**source.rounded)
    accuracy = accuracy_of(source.model, described)
    if options.tolerance is not None:
        accuracy = replace(accuracy.with_stated(options.tolerance), fixed=True)
    manifest, expected, compared = _written(source, described, folder, accuracy, options)
    manifests.write(manifest, folder)
    if options.size is not None:
        mixed.check_written(manifest, options.size)
    if not options.verify:
        return manifest
    manifest = check_written(folder, source, manifest, expected, compared, accuracy, options)
    if accuracy.rounds and ("float32" in dtypes or (options.weights and manifest.certificate)):
        options.say(f"{target}: measuring the loss against float32")
        inputs = read._replace(model=sources.of("float32").model)
        manifest = manifest.replace(quality=quality.measured(folder, manifest, inputs, options.say))
    manifests.write(manifest, folder)
    return manifest


def _written(
    source: Source, described: Manifest, folder: Path, accuracy: Accuracy, options: ExportOptions
) -> tuple[Manifest, Expected, Check]:
    """Write the files of an artefact to a new folder, without the manifest. Return the manifest,
    the outputs of the module, and the comparison of constants with the module. ValueError: the
    target cannot represent the module, as when torch cannot compile code of others.
    """
    folder.mkdir(parents=True)
    try:
        manifest = WRITERS[described.target](source, described, folder)
    except (RuntimeError, torch.jit.frontend.FrontendError) as error:
        what = _foreign(source.model, described.packages)
        if not what:
            raise
        takes = TAKES.get(described.target, "torch.onnx.export traces")
        raise ValueError(
            f"export: target {described.target}: {what}: expected code that {takes}, got "
            f"{_cause(error)}; change the code or choose another target"
        ) from error
    options.say(f"{described.target}: computing the outputs of the module")
    long = bool(options.verify)
    expected = source.once(
        ("expected", long, *grid_of(manifest)),
        lambda: expected_outputs(source.exact, manifest, long, options.say),
    )
    stored = proof.write(manifest, expected, accuracy, folder)
    text = text_of(source.model)
    kept = {TOKENIZER: text.tokenizer, **text.files} if text.tokenizer else text.files
    for name, content in kept.items():
        files.write(folder / name, content)
    if not isinstance(source.model, AttentionBlock):
        loader_configs.write(source.model, manifest, folder)
    compared, digests = Check(0, "numbers"), dict[str, str]()
    if options.verify:
        compared, digests = numbers.compare(folder, manifest, source)
    # The files of the graph were hashed as they were written.
    paths = sorted(folder.iterdir())
    listed = {path.name: manifest.files.get(path.name) or files.entry(path) for path in paths}
    manifest = manifest.replace(reference=stored, files=listed, constants=digests)
    return manifest, expected, compared


def _foreign(model: Model, packages: Iterable[str]) -> str:
    """Return which code of a model is that of others; empty for none. packages: those of foreign
    encodings, by encoding name.
    """
    if isinstance(model, ReadModule):
        return model.where
    return f"encodings {', '.join(packages)}" if packages else ""


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = map(str.strip, str(error).partition('File "')[0].splitlines())
    return f"{type(error).__name__}: {' '.join(filter(None, lines))[:LONGEST]}".rstrip(".:; ")
