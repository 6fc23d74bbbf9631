"""The folder of a page: the model, onnxruntime-web, the document, the scripts and page.json."""

import contextlib
import json
import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from posenc_export.page import graph
from posenc_export.runtime.artefact import certificate as certificates
from posenc_export.runtime.artefact import chat_template, destinations, files, publish, tokenizer
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.graph_inputs import new_row
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.summary import summary
from posenc_export.shared.refusal import refusal

# Assets by their names in a page.
SHARED = {name: name for name in ("model.js", "certificate.js", "style.css")}
BYTE_PAGE = {**SHARED, "index.html": "index.html", "page.js": "page.js"}
SCRIPTS = {name: name for name in ("chat.js", "text.js", "pieces.js")}
TEXT_PAGE = {**SHARED, "index.html": "chat.html", **SCRIPTS}
IDS_PAGE = {**TEXT_PAGE, "text.js": "ids.js"}  # a page that shows token ids in place of text
TOKENIZER = "tokenizer.json"
WEB = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
OLDEST = (1, 24)  # version of onnxruntime-web; 1.23 lacks kernels of int8, 1.22 runs no page
TARGETS = ("ort", "onnx")
# By kind of a model that has no page: what runs it.
PRINTED = "posenc inspect --runtime web prints a page that runs it"
NO_PAGE = {
    "encoder": "posenc embed and posenc serve run encoders with sentence embeddings",
    "decoder": "posenc generate runs it with its encoder",
    "block": PRINTED,
    "module": f"its outputs are no logits of token ids; {PRINTED}",
}
DISTANCES = 48  # distances in tokens, from 0 on, for which attention is drawn
CONTEXT = 1024  # most bytes or tokens that the page feeds to the model
IDS = 60  # token ids that a page without text compares in calls of different lengths
# Files of npm packages, by their names in the page.
LIBRARIES = {
    "tokenizers.min.mjs": "@huggingface/tokenizers/dist/tokenizers.min.mjs",
    "jinja.js": "@huggingface/jinja/dist/index.js",
}
TEXTS = (
    "The same text gives the same tokens on every machine, and the same logits however it is "
    "split into calls.",
    "  Two spaces,\n\ta tab\r\n\n\nand lines; it's 1,234.5e-06 + x_1 -> {'y': [z]} // 100 %",
    "naïve Ångström, Straße, \u65e5\u672c\u8a9e, \u0645\u0631\u062d\u0628\u0627, "
    "\U0001f642\U0001f1eb\U0001f1f7 and e\u0301",
)
TALKS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": " What is 2 + 2? "}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!\n"},
        {"role": "user", "content": TEXTS[2]},
    ],
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Why?"}],
]


def write_page(folder: Path, output: Path, onnxruntime_web: Path | None = None) -> Manifest:
    """Write the page for an artefact. Return the artefact's manifest.

    Args:
        folder: artefact of a decoder or of a module with logits for each token id, target ort or
            onnx, float32 or with weights in few bits; or the name of a preset. The page of one
            without a tokenizer reads bytes if the vocabulary is 256, otherwise token ids.
        output: folder of the page; created, or replaced if it already holds a page.
        onnxruntime_web: folder of the npm package onnxruntime-web. None searches node_modules in
            the working folder, in build and in the parent folders.

    Raises:
        ValueError: the artefact is of another kind, onnxruntime-web or a library for its text is
            not found, or the folder holds other files.
        OSError: the folder cannot be written, or the disk is full; an existing page is unchanged.
        ModuleNotFoundError: the extra `text` is not installed, for a model with a tokenizer.
    """
    folder = files.locate(folder)
    manifest = manifests.read(folder)
    check(manifest)
    web, staging = _web(onnxruntime_web), publish.StagingFolder([output], destinations.PAGE)
    with staging as path:
        _fill(path / "made", folder, manifest, web)
        staging.publish([path / "made"])
    return manifest


def _fill(page: Path, folder: Path, manifest: Manifest, web: Path) -> None:
    (page / "onnxruntime-web").mkdir(parents=True)
    has_tokenizer = TOKENIZER in manifest.files
    reads_bytes = manifest.vocabulary == tokenizer.BYTES and not has_tokenizer
    for name in WEB:
        shutil.copyfile(web / "dist" / name, page / "onnxruntime-web" / name)
    shutil.copyfile(folder / "model.onnx.data", page / "model.onnx.data")
    origin = manifest.source
    name = str(origin.get("preset", origin.get("checkpoint", folder.resolve().name)))
    data = _page_data(name, manifest)
    data["onnxruntime_web"] = json.loads((web / "package.json").read_bytes())["version"]
    source, made = folder / "model.onnx", page / "model.onnx"
    slots = min(manifest.max_positions, CONTEXT)
    if reads_bytes:
        assets, ids = BYTE_PAGE, list(graph.PROMPT[: manifest.max_positions])
        data["attention"] = graph.with_attention(source, made)
        data["distances"] = min(DISTANCES, manifest.max_positions)
    else:
        assets = TEXT_PAGE if has_tokenizer else IDS_PAGE
        data |= {"attention": [], **_texts(page, folder, manifest, web)}
        ids = data["samples"][0]["ids"]
        shutil.copyfile(source, made)
        # GroupQueryAttention takes caches without free slots; a page copies less of them then.
        slots = 0 if graph.fuses_all_caches(made, manifest) else slots
    data["states"] = new_row(manifest.states, slots)
    graph.check_calls(folder, made, manifest, data["states"], ids)
    for name, asset in assets.items():
        (page / name).write_bytes(_asset(asset))
    listed = [path.relative_to(page).as_posix() for path in page.rglob("*") if path.is_file()]
    listing = json.dumps({**data, "files": sorted(listed)}, indent=1) + "\n"
    (page / destinations.PAGE.listing).write_text(listing, encoding="utf-8")


def _texts(page: Path, folder: Path, manifest: Manifest, web: Path) -> dict[str, Any]:
    """Return the part of page.json about text; without a tokenizer, about token ids."""
    if TOKENIZER not in manifest.files:
        size = manifest.vocabulary
        ids = [n % size for n in range(min(IDS, manifest.max_positions))]
        return {"vocabulary": size, "ends": manifest.stop_ids, "samples": [{"ids": ids}]}
    shutil.copyfile(folder / TOKENIZER, page / TOKENIZER)
    (page / "text").mkdir()
    for name, path in LIBRARIES.items():
        if not (web.parent / path).is_file():
            package = path.partition("/dist")[0]
            rule = f"the npm package {package} beside onnxruntime-web for the text of this model"
            raise refusal("page", rule, "none", f"npm install {package}")
        shutil.copyfile(web.parent / path, page / "text" / name)
    return text_data(folder, manifest)


def check(manifest: Manifest) -> None:
    """Raise ValueError unless a page can run an artefact."""
    if not manifest.decodes or manifest.encoder:
        kind = "decoder that reads an encoder" if manifest.encoder else manifest.kind
        raise refusal("page", "a decoder", f"a model of kind {kind}", NO_PAGE[manifest.kind])
    target, dtype = manifest.target, manifest.dtype
    if target not in TARGETS or dtype != "float32":
        rule, remedy = f"target {' or '.join(TARGETS)} in float32", "export it with --target ort"
        raise refusal("page", rule, f"target {target} in {dtype}", f"{remedy} --dtype float32")
    known = inputs_of_pages()
    unknown = [value.name for value in manifest.inputs if value.name not in known]
    if unknown:
        rule, remedy = f"inputs among {', '.join(known)}", "use posenc inspect --runtime node"
        raise refusal("page", rule, unknown[0], remedy)


def inputs_of_pages() -> list[str]:
    """Return the names of the graph inputs that model.js fills."""
    return re.findall(r"^  (\w+): \(ort", _asset("model.js").decode(), re.MULTILINE)


def _asset(name: str) -> bytes:
    return resources.files("posenc_export.page").joinpath("assets", name).read_bytes()


def _web(folder: Path | None) -> Path:
    here = Path.cwd()
    above = (here, here / "build", *here.parents)
    near = [place / "node_modules" / "onnxruntime-web" for place in above]
    for place in near if folder is None else [folder]:
        if all((place / "dist" / name).is_file() for name in WEB):
            version = str(json.loads((place / "package.json").read_bytes())["version"])
            if tuple(map(int, re.findall("[0-9]+", version)[:2])) < OLDEST:
                rule, remedy = "onnxruntime-web 1.24 or newer", "npm install onnxruntime-web@latest"
                raise refusal("page", rule, version, remedy)
            return place
    got = "none" if folder is None else f"{folder} without dist/{WEB[-1]}"
    remedy = "npm install onnxruntime-web, or give --onnxruntime-web FOLDER"
    raise refusal("page", "the npm package onnxruntime-web", got, remedy)


def _page_data(name: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "name": name,
        "summary": summary(manifest),
        "weights": manifest.step_weights,
        "digest": manifest.digest,
        "inputs": [value.name for value in manifest.inputs],
        "output": manifest.outputs[0].name,
        "axes": manifest.axes,
        "stop_ids": manifest.stop_ids,
        "context": min(manifest.max_positions, CONTEXT),
        "positions": manifest.max_positions,
        "certificate": _certificate(manifest),
    }


def _certificate(manifest: Manifest) -> dict[str, Any] | None:
    certificate = manifest.certificate
    if certificate is None:
        return None
    worst = certificates.worst_cell(certificate)
    left_out = {"cells", "bounds", "failures"}
    return {
        **{key: value for key, value in certificate.items() if key not in left_out},
        "tolerance": certificates.bound_of(certificate, worst),
        "cells": certificates.count_cells(certificate),
        "worst": certificate["cells"][worst],
        "exported": certificates.exported_error(certificate),
    }


def text_data(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the part of page.json about text. Errors as of `codec` and `chat_codec`."""
    converter, chat = tokenizer.codec(folder, manifest), chat_template.chat_codec(folder, manifest)
    read = {text: converter.encode(text) for text in TEXTS}
    samples: list[dict[str, Any]] = [{"text": text, "ids": ids} for text, ids in read.items()]
    if chat is None:
        return {"template": None, "special": {}, "ends": manifest.stop_ids, "samples": samples}
    for talk in TALKS:
        with contextlib.suppress(ValueError):  # some templates have no system message
            samples.append({"messages": talk, "ids": chat.encode(talk)})
    data = {"template": chat.template, "special": chat.special, "ends": chat.ends}
    return {**data, "samples": samples}
