"""The page of HTML that describes the server, without scripts and without other servers."""

import html
import json
import shlex
from typing import Any, Dict, Iterable, List

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


def page(described: Dict[str, Any], url: str) -> HTMLResponse:
    """Return the page: what is served, how to call it at `url`, and all routes with the fields of
    their requests. described: the API, as OpenAPI.
    """
    paths, title = described["paths"], html.escape(described["info"]["summary"])
    routes = [(p, method, route) for p, all in paths.items() for method, route in all.items()]
    parts = [_table([f"{m.upper()} {path}", route["summary"]] for path, m, route in routes)]
    for path, _, route in routes:
        if "requestBody" in route:
            schema = route["requestBody"]["content"]["application/json"]["schema"]
            body = shlex.quote(json.dumps(EXAMPLES[path]))
            command = f"curl {url}{path} -H 'Content-Type: application/json' -d {body}"
            parts.append(f"<h2>{path}</h2><pre>{html.escape(command)}</pre>{_fields(schema)}")
            for name, part in schema.get("$defs", {}).items():
                parts.append(f"<h3>{html.escape(name)}</h3>{_fields(part)}")
    head = f"<!doctype html><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
    return HTMLResponse(f"{head}<h1>{title}</h1>{''.join(parts)}", headers=HEADERS)


def _table(rows: Iterable[Iterable[str]]) -> str:
    cells = ("".join(f"<td>{html.escape(text)}</td>" for text in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


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
