"""Every generated page is up to date; measurements are read from the committed JSON."""

import json
from pathlib import Path
from typing import Any, Callable

import pytest

from bench import clients, cuda_dry_run, decode_cost, encoding_pages, parity, runtime_pages
from posenc_export.encodings import REGISTRY

TOP = Path(__file__).parents[1]
DOCS, RESULTS = TOP / "docs", TOP / "bench" / "results"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


PAGES: dict[str, Callable[[], str]] = {
    "runtimes/inputs.md": runtime_pages.inputs_page,
    "parity.md": lambda: parity.table(_read(DOCS / "parity.json")),
    "runtimes/table.md": lambda: clients.table(_read(RESULTS / "clients.json")),
    "runtimes/cuda-dry-run.md": lambda: cuda_dry_run.page(_read(RESULTS / "cuda_dry_run.json")),
    "decode.md": lambda: decode_cost.page(_read(RESULTS / "decode_cost.json")),
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_agrees_with_its_json_or_table(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == PAGES[page]()


def test_the_page_of_every_encoding_agrees_with_its_class() -> None:
    assert [
        name
        for name in REGISTRY
        if (DOCS / "encodings" / f"{name}.md").read_text(encoding="utf-8")
        != encoding_pages.page(name)
    ] == []


@pytest.mark.exhaustive
def test_the_catalogue_writes_the_committed_files_and_no_others(tmp_path: Path) -> None:
    encoding_pages.write(tmp_path)
    written = {
        path.relative_to(tmp_path): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert [
        str(path) for path, content in written.items() if (DOCS / path).read_bytes() != content
    ] == []
    committed = {
        path.relative_to(DOCS) for path in (DOCS / "encodings").rglob("*") if path.is_file()
    }
    assert committed == {path for path in written if path.parts[0] == "encodings"}
