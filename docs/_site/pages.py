"""Hooks of MkDocs: pages that stand above docs/, notebooks, and patterns in the navigation."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ABOVE = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}  # page: file beside mkdocs.yml


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each pattern of the navigation by the pages that no earlier entry names."""
    config.nav = _expanded(config.nav or [], Path(config.docs_dir), set())
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that stand above docs/."""
    for page, source in ABOVE.items():
        text = Path(config.config_file_path).with_name(source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    for notebook in Path(config.docs_dir).glob("*.ipynb"):
        files.append(
            File.generated(
                config,
                f"{notebook.stem}.md",
                content=_markdown(json.loads(notebook.read_text(encoding="utf-8"))),
            )
        )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to the pages that stand above docs/, and to the pages of notebooks."""
    markdown = markdown.replace(".ipynb)", ".md)")
    for page, source in ABOVE.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    return markdown


def _markdown(notebook: Any) -> str:
    """Return the cells of a notebook with their stored outputs, texts and PNG pictures."""
    out: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        out.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                out.append(f"```text\n{''.join(output['text'])}```")
            elif "image/png" in output.get("data", {}):
                out.append(
                    '<img alt="output" src="data:image/png;base64,'
                    f'{output["data"]["image/png"].strip()}">'
                )
    return "\n\n".join(out)


def _expanded(entries: list[Any], docs: Path, named: set[str]) -> list[Any]:
    out: list[Any] = []
    for entry in entries:
        title, below = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(below, list):
            out.append({title: _expanded(below, docs, named)})
            continue
        pages = (
            sorted(str(PurePosixPath(path.relative_to(docs))) for path in docs.glob(below))
            if "*" in below
            else [below]
        )
        out += [{title: page} if title else page for page in pages if page not in named]
        named.update(pages)
    return out
