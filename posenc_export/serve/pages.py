"""Pages of HTML that describe the server, without scripts and without other servers."""

import html
import json
import shlex
from typing import Any, Dict, Iterable, List

from fastapi import Request
from fastapi.responses import HTMLResponse

STYLE = (
    "body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "td,th{text-align:left;vertical-align:top;padding:.2em 1em .2em 0}"
    "pre{white-space:pre-wrap;background:#eee;padding:1em}"
)
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
REFERENCE = "#/$defs/"
EXAMPLES: Dict[str, Dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 32},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/embeddings": {"input": "Hello"},
}


def start(described: Dict[str, Any], request: Request) -> HTMLResponse:
    """Return the page at /: what is served, and how to call it. described: the API, as OpenAPI."""
    url, paths = str(request.base_url).rstrip("/"), described["paths"]
    parts = ["<p>Fields of requests: <a href='docs'>/docs</a></p>"]
    for path, example in EXAMPLES.items():
        if path in paths:
            header, body = "-H 'Content-Type: application/json'", shlex.quote(json.dumps(example))
            parts.append(f"<pre>{html.escape(f'curl {url}{path} {header} -d {body}')}</pre>")
    return _page(described, [*parts, _routes(paths)])


def reference(described: Dict[str, Any]) -> HTMLResponse:
    """Return the page at /docs: all routes, with the fields of their requests."""
    parts = [_routes(described["paths"])]
    for path, methods in described["paths"].items():
        if "requestBody" in methods.get("post", ()):
            content = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            parts.append(f"<h2>POST {html.escape(path)}</h2>{_fields(content)}")
            for name, part in content.get("$defs", {}).items():
                parts.append(f"<h3>{html.escape(name)}</h3>{_fields(part)}")
    return _page(described, parts)


def _page(described: Dict[str, Any], parts: Iterable[str]) -> HTMLResponse:
    title = html.escape(described["info"]["summary"])
    head = f"<!doctype html><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
    return HTMLResponse(f"{head}<h1>{title}</h1>{''.join(parts)}", headers=HEADERS)


def _table(rows: Iterable[Iterable[str]]) -> str:
    cells = ("".join(f"<td>{html.escape(text)}</td>" for text in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _routes(paths: Dict[str, Any]) -> str:
    return _table(
        (f"{method.upper()} {path}", route["summary"])
        for path, methods in paths.items()
        for method, route in methods.items()
    )


def _fields(schema: Dict[str, Any]) -> str:
    needed = schema.get("required", ())
    rows: List[List[str]] = []
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in needed else f"default {json.dumps(field.get('default'))}"
        rows.append([name, _kind(field), default, field.get("description", "")])
    return _table(rows)


def _kind(field: Dict[str, Any]) -> str:
    """Return what a field of a JSON schema may be, in words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(kind) for kind in field["anyOf"]))
    if "const" in field or "enum" in field:
        return " or ".join(json.dumps(v) for v in field.get("enum", [field.get("const")]))
    if "$ref" in field:
        return str(field["$ref"]).removeprefix(REFERENCE)
    items = f" of {_kind(field['items'])}" if field.get("items") else ""
    return f"{field.get('type', 'any value')}{items}"
