"""The folder of a page: its graph gives the artefact's logits and the attention of each head; a
browser generates the same text as a session.
"""

import html
import json
import os
import queue
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from posenc_export.clients import program
from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.models.presets import load_preset
from posenc_export.page import graph, write_page
from posenc_export.page.folder import BYTE_PAGE, WEB, check
from posenc_export.page.graph import PROMPT
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.destinations import check_folder
from posenc_export.runtime.artefact.graph_inputs import new_row
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.numerics import worst_error
from tests.pages_of_modules import COUNT, PAGES, PROMPT, sources
from tests.serve.models import artefact

pytestmark = pytest.mark.xdist_group("serve")  # the worker that exports the same models
NODE_MODULES = Path(os.environ.get("POSENC_NODE_MODULES", "none"))
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
TEXT = "class Reader:\n    def __init__(self, path):\n        self."


def _feeds(manifest: Manifest) -> dict[str, Any]:
    """Return the inputs of a call that feeds PROMPT as one row."""
    states = new_row(manifest.states, len(PROMPT))
    return {**graph.inputs(manifest, list(PROMPT), 0), **graph.empty(states)}


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the file names of onnxruntime-web."""
    folder = tmp_path_factory.mktemp("web") / "onnxruntime-web"
    (folder / "dist").mkdir(parents=True)
    for name in WEB:
        (folder / "dist" / name).write_text(name)
    (folder / "package.json").write_text('{"version": "1.30.0"}')
    return folder


@pytest.fixture(scope="module")
def folder() -> Path:
    return artefact("onnx")


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by their paths in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def shown_by(page: Path) -> Any:
    return json.loads((page / "page.json").read_bytes())


def test_a_page_holds_all_that_a_browser_loads(folder: Path, web: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    write_page(folder, page, web)
    own, of_web = {"page.json", "model.onnx", "model.onnx.data"}, {f"{web.name}/{n}" for n in WEB}
    assert contents(page).keys() == {*BYTE_PAGE} | own | of_web
    shown = shown_by(page)
    assert shown["attention"] == [0] and shown["onnxruntime_web"] == "1.30.0"
    assert shown["digest"] == manifests.read(folder).digest
    # It loads nothing from other servers.
    text = (page / "index.html").read_text()
    assert not re.search(r'(src|href)="(?!page\.js|style\.css|data:)', text)


def test_a_page_is_replaced_by_another_and_by_nothing_else(
    folder: Path, web: Path, tmp_path: Path
) -> None:
    write_page(folder, tmp_path / "page", web)
    (tmp_path / "page" / "index.html").write_text("of an older version")
    write_page(folder, tmp_path / "page", web)
    assert "of an older version" not in (tmp_path / "page" / "index.html").read_text()
    said = "is new, empty or an artefact, got .*page, which contains certificate.js"
    with pytest.raises(ValueError, match=f"export: expected a folder that {said}"):
        check_folder(tmp_path / "page")


PLACES = {
    "got .*, which contains index.html; move that file": "site",
    "got .*, which contains model.onnx; move that file": "artefact",
    "outside any artefact, got .*page in the artefact": "artefact/page",
    "got .*, which contains onnxruntime-web/mine; move that file": "page",
}


@pytest.mark.parametrize("message", PLACES)
def test_a_page_overwrites_no_file_that_is_not_its_own(
    message: str, folder: Path, web: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "artefact")
    listed = '{"files": ["onnxruntime-web/ort.wasm.min.mjs"]}'
    texts = {"site/index.html": "mine", "page/onnxruntime-web/mine": "mine"}
    for path, text in {**texts, "page/page.json": listed}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    before = contents(tmp_path)
    said = f"page: expected a folder that is new, empty or a page.*{message}"
    with pytest.raises(ValueError, match=said):
        write_page(folder, tmp_path / PLACES[message], web)
    assert contents(tmp_path) == before


def _opened(page: Path) -> onnxruntime.InferenceSession:
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(str(page / "model.onnx"), providers=providers)


def test_the_graph_of_a_page_gives_the_attention_that_the_evaluator_of_onnx_gives(
    folder: Path, web: Path, tmp_path: Path
) -> None:
    manifest = write_page(folder, tmp_path, web)
    feeds, names = _feeds(manifest), ["logits", "attention.0"]
    logits, attention = map(np.asarray, _opened(tmp_path).run(names, feeds))
    expected = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(names, feeds)
    bound = manifest.reference.tolerance if manifest.reference else 0.0
    for each, other in zip((logits, attention), expected, strict=True):
        assert worst_error(each, np.asarray(other)) <= bound
    assert np.triu(attention, 1).max() == 0
    assert attention.shape == (1, 6, len(PROMPT), len(PROMPT))


def test_a_page_of_target_ort_gives_the_attention_of_target_onnx(
    folder: Path, web: Path, tmp_path: Path
) -> None:
    fused = artefact("ort")
    results = []
    for name, source in (("onnx", folder), ("ort", fused)):
        feeds = _feeds(write_page(source, tmp_path / name, web))
        found = _opened(tmp_path / name).run(["attention.0"], feeds)[0]
        results.append(np.tril(np.asarray(found)))
    shown, bound = shown_by(tmp_path / "ort"), manifests.read(fused).reference.tolerance
    assert worst_error(results[1], results[0]) <= bound and results[0].max() > 0.5
    assert shown["states"][0]["shape"][2] == shown["context"]


REFUSED: dict[str, dict[str, Any]] = {
    "target ort or onnx in float32, got target ort in float16; export it with": {
        "target": "ort",
        "dtype": "float16",
    },
    "a decoder, got a model of kind encoder; posenc embed and": {"kind": "encoder"},
    "a decoder, got a model of kind block; posenc inspect --runtime web prints": {"kind": "block"},
    "a decoder, got a model of kind module; its outputs are no logits of token ids; posenc": {
        "kind": "module",
        "config": {"kind": "module", "causal": True},
    },
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_a_page_cannot_run_is_refused_by_name(rule: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=f"page: expected {rule}"):
        check(manifests.read(folder).replace(**REFUSED[rule]))


def test_a_refused_artefact_leaves_no_page(web: Path, tmp_path: Path) -> None:
    other = artefact("onnx-static")
    rule = "page: expected target ort or onnx in float32, got target onnx-static in float32; export"
    with pytest.raises(ValueError, match=rule):
        write_page(other, tmp_path / "page", web)
    assert not (tmp_path / "page").exists()


def test_a_missing_onnxruntime_web_is_one_line_with_the_way_to_get_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    page = tmp_path / "page"
    assert main(["page", f"{folder}", "-o", f"{page}", "--onnxruntime-web", f"{tmp_path}"]) == 2
    assert "npm install onnxruntime-web" in capsys.readouterr().err and not page.exists()


# Shows a page in a frame and posts the frame's document when its check is complete, or its program.
# Chromium's own --dump-dom does not wait for a GPU.
FRAME = """<!doctype html><iframe id="page"></iframe><script>
const frame = document.getElementById("page");
frame.src = "page/index.html" + location.search;
const timer = setInterval(() => {
  const found = frame.contentDocument?.body?.dataset;
  if (!found?.checked && !found?.done) return;
  clearInterval(timer);
  fetch("done", { method: "POST", body: frame.contentDocument.documentElement.outerHTML });
}, 100);
</script>"""


class Pages(SimpleHTTPRequestHandler):
    """A file server that keeps the document that a frame posts."""

    documents: "queue.SimpleQueue[str]"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.documents.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()


def with_chromium(test: Any) -> Any:
    """Mark a test that opens a page in Chromium."""
    missing = "POSENC_NODE_MODULES names no node_modules folder with onnxruntime-web"
    test = pytest.mark.skipif("POSENC_NODE_MODULES" not in os.environ, reason=missing)(test)
    test = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")(test)
    return pytest.mark.exhaustive(test)


def opened(folder: Path, query: str, *options: str) -> tuple[dict[str, str], str]:
    """Open the page in folder/page in Chromium. Return the data attributes of its body, and the
    document.
    """
    (folder / "frame.html").write_text(FRAME)
    handler = type("Handler", (Pages,), {"documents": queue.SimpleQueue()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}/frame.html?{query}"
    command = [str(BROWSER), "--headless=new", "--no-sandbox", *options]
    command += [f"--user-data-dir={folder / 'profile'}", address]
    browser = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        document = handler.documents.get(timeout=300)
    finally:
        browser.kill()
        browser.wait()
        server.shutdown()
        thread.join()
        server.server_close()
    body = re.search(r"<body [^>]*>", document)
    assert body is not None, document
    values = re.findall(r'data-(\w+)="([^"]*)"', body[0])
    return {name: html.unescape(value) for name, value in values}, document


@with_chromium
@pytest.mark.parametrize(
    ("preset", "target"),
    [("tiny-rope", "onnx"), ("tiny-rope", "ort"), ("tiny-alibi", "ort"), ("small-t5", "ort")],
)
def test_a_browser_continues_a_text_as_a_session_does(
    preset: str, target: str, tmp_path: Path
) -> None:
    export(load_preset(preset), target, tmp_path / "a", verify=False)
    write_page(tmp_path / "a", tmp_path / "page", NODE_MODULES / "onnxruntime-web")
    result, document = opened(tmp_path, f"temperature=0&text={quote(TEXT)}", "--disable-gpu")
    tokens = _generated(tmp_path / "a", list(TEXT.encode()), 96)
    assert result["added"] == bytes(tokens).decode() and result["checked"] == "true"
    heads = {"tiny-rope": 20, "tiny-alibi": 30, "small-t5": 20}
    assert document.count('class="head"') == heads[preset]


def _generated(folder: Path, prompt: list[int], count: int) -> list[int]:
    session = load(folder, provider="cpu").session()
    return [int(token[0]) for token in session.generate([prompt], count)]


@with_chromium
@pytest.mark.parametrize("target", ["onnx", "onnx-static", "ort"])
def test_the_program_that_inspect_prints_for_a_page_decodes_as_a_session_does(
    target: str, tmp_path: Path
) -> None:
    folder = artefact(target)
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "FOLDER").symlink_to(folder)
    (tmp_path / "page" / "node_modules").symlink_to(NODE_MODULES)
    (tmp_path / "page" / "index.html").write_text(program(manifests.read(folder), "web"))
    _, document = opened(tmp_path, "count=12&prompt=5,7,9", "--disable-gpu")
    tokens = _generated(folder, [5, 7, 9], 12)
    assert f'<pre id="output">{" ".join(map(str, tokens))}\n</pre>' in document


@with_chromium
@pytest.mark.parametrize("target", ["onnx", "ort"])
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("page", PAGES)
def test_a_browser_gives_the_tokens_of_a_module_as_it_is(
    page: str, weights: Any, target: str, tmp_path: Path
) -> None:
    export(sources(page), target, tmp_path / "a", verify=False, weights=weights)
    write_page(tmp_path / "a", tmp_path / "page", NODE_MODULES / "onnxruntime-web")
    message = quote(" ".join(map(str, PROMPT)))
    result, _ = opened(tmp_path, f"temperature=0&tokens={COUNT}&message={message}", "--disable-gpu")
    assert result["reply"].split() == [*map(str, _generated(tmp_path / "a", PROMPT, COUNT))]
    assert result["checked"] == "true"
