"""docs/reference-api.md: every endpoint, from the OpenAPI document."""

from __future__ import annotations

from typing import Any

from tests.docs.markdown import MADE, table
from xmigd.rest import make_app


def document() -> dict[str, Any]:
    """What the daemon answers at /openapi.json."""
    return dict(make_app().openapi())


def page() -> str:
    found = document()
    parts = [
        _endpoint(method.upper(), path, endpoint)
        for path, methods in found["paths"].items()
        for method, endpoint in methods.items()
    ]
    schemas = [_schema(name, schema) for name, schema in sorted(found["components"]["schemas"].items())]
    return (
        f"""{MADE}
# REST

On the local socket `api.sock` in the runtime directory the kernel says who calls: owners act on their own
jobs, root and the daemon's user on all. Over TCP a request shows a token. Everything is JSON; unknown fields
are refused; lists are arrays, newest first, with `limit` and `before`. Times are Unix seconds, `*_ms`
milliseconds, and what is not known is null. A refused request changes nothing and gets a [problem
document](errors.md). `GET /openapi.json` is the same as a document for programs.

{"".join(parts)}## Bodies

{"".join(schemas)}""".rstrip()
        + "\n"
    )


def _endpoint(method: str, path: str, endpoint: dict[str, Any]) -> str:
    text = f"## {method} {path}\n\n{endpoint.get('description') or endpoint.get('summary', '')}\n\n"
    rows = [
        (f"`{p['name']}`", p["in"], _type(p.get("schema", {})), _note(p, p.get("schema", {})))
        for p in endpoint.get("parameters", [])
    ]
    if rows:
        text += table(("parameter", "in", "type", "what"), rows) + "\n"
    for kind, body in endpoint.get("requestBody", {}).get("content", {}).items():
        text += f"Body: {_type(body.get('schema', {}))}{'' if kind == 'application/json' else f' ({kind})'}.\n\n"
    answers = []
    for status, answer in endpoint["responses"].items():
        if status.startswith(("2", "3")):
            kinds = [_type(content.get("schema", {})) for content in answer.get("content", {}).values()]
            answers.append(f"{status} {' or '.join(filter(None, kinds))}".strip())
    return text + f"Answer: {'; '.join(answers)}.\n\n"


def _schema(name: str, schema: dict[str, Any]) -> str:
    rows = [
        (f"`{field}`" + ("" if field not in schema.get("required", []) else " *"), _type(about), _note({}, about))
        for field, about in schema.get("properties", {}).items()
    ]
    described = " ".join(schema.get("description", "").split())
    if not rows:
        return f"### {name}\n\n{described} {_type(schema)}\n\n"
    return f"### {name}\n\n{described + chr(10) * 2 if described else ''}{table(('field', 'type', 'what'), rows)}\n"


def _note(parameter: dict[str, Any], schema: dict[str, Any]) -> str:
    text = parameter.get("description") or schema.get("description") or ""
    if schema.get("default") not in (None, ""):
        text += f" (default `{schema['default']}`)"
    return str(text)


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    limits = [f"{sign} {schema[key]}" for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"),
              ("exclusiveMaximum", "<")) if key in schema]  # fmt: skip
    return " ".join([str(schema.get("type", "anything")), *limits])
