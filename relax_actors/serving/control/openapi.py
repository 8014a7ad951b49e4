"""OpenAPI description of the operators' routes, made from handlers and bodies.

The page is plain HTML: it loads nothing from elsewhere, and asks for no token.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from relax_actors.serving.control import bodies
from relax_actors.serving.control.routes import Handler

BODIES: dict[str, type[bodies.Strict]] = {
    "/v1/rollouts/scale": bodies.ScaleBody,
    "/v1/operations/{number}/cancel": bodies.CancelBody,
    "/v1/engines": bodies.EngineBody,
    "/v1/engines/{number}": bodies.RemoveBody,
    "/v1/roles": bodies.RoleBody,
    "/v1/roles/{role}": bodies.RemoveRoleBody,
    "/v1/roles/{role}/replace": bodies.ReplaceBody,
    "/v1/roles/{role}/move": bodies.MoveBody,
    "/rollout/scale_out": bodies.ScaleOutBody,
    "/rollout/scale_out_cancel": bodies.CancelOutBody,
    "/rollout/scale_in": bodies.ScaleInBody,
}
"""Body of each route that changes something, and reads one."""
_PARAMETER = re.compile(r"\{(\w+)\}")
_ERRORS = {
    "400": "The request is wrong; the message says what to change.",
    "401": "No token.",
    "403": "The token is not an operator's.",
    "404": "No such operation or engine.",
    "409": "Another operation is in the way, or has the same idempotency key.",
}


def description(routes: Iterable[tuple[str, str, Handler]]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of some routes."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for method, path, handler in routes:
        summary = " ".join((handler.__doc__ or "").split())
        entry: dict[str, Any] = {
            "summary": summary,
            "operationId": f"{handler.__self__.__class__.__name__}.{handler.__name__}",  # type: ignore[attr-defined]
            "responses": {"2XX": {"description": "Done or accepted."}}
            | {code: {"description": text} for code, text in _ERRORS.items()},
        }
        if names := _PARAMETER.findall(path):
            entry["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if method != "GET" and path in BODIES:
            model = BODIES[path]
            schemas[model.__name__] = model.model_json_schema()
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
            entry["requestBody"] = {"content": content}
        paths.setdefault(path, {})[method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "relax-actors: operations on a live run", "version": version("relax-actors")},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"operator": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"operator": []}],
        "paths": paths,
    }


def page(document: dict[str, Any]) -> str:
    """Return the document as an HTML page."""
    rows = []
    for path, methods in document["paths"].items():
        for method, entry in methods.items():
            model = entry.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = model.get("$ref", "").rpartition("/")[2]
            fields = document["components"]["schemas"].get(name, {}).get("properties", {})
            listed = ", ".join(fields) or "none"
            cells = (f"{method.upper()} {path}", entry["summary"], listed)
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    title = html.escape(document["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>'
        "body{font:16px/1.5 sans-serif;margin:2rem;max-width:70rem}td,th{padding:.4rem .8rem;text-align:left;"
        "border-bottom:1px solid #ccc;vertical-align:top}td:first-child{font-family:monospace;white-space:nowrap}"
        f"</style></head><body><h1>{title}</h1><p>Send the token of <code>gateway/operator-token</code> in the run's "
        "folder as <code>Authorization: Bearer TOKEN</code>. Programs read <a href='openapi.json'>openapi.json</a>."
        "</p><table><tr><th>Route</th><th>What it does</th><th>Fields</th></tr>"
        f"{''.join(rows)}</table></body></html>"
    )
