"""What holds for every endpoint, in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

PROBLEM = {"schema": {"$ref": "#/components/schemas/Problem"}}
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key", "in": "header", "required": False,
    "description": "A request that is sent again with the same key is not done again, and gets the first answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}  # fmt: skip
TOKEN = {
    "type": "http", "scheme": "bearer",
    "description": "Over TCP. On the local socket the kernel says who calls; a token there comes first.",
}  # fmt: skip
OPEN_PATHS = ("/healthz", "/readyz")


def complete(app: FastAPI) -> None:
    """Let the application's document say what holds for every endpoint, too."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            document["components"]["securitySchemes"] = {"token": TOKEN}
            for path, item in document["paths"].items():
                for method, operation in item.items():
                    operation["security"] = [{}] if path in OPEN_PATHS else [{"token": []}, {}]
                    for status, response in operation["responses"].items():
                        if status == "default" or (status >= "400" and not response.get("content")):
                            response["content"] = {"application/problem+json": PROBLEM}
                    if method == "post":
                        operation.setdefault("parameters", []).append(IDEMPOTENCY_KEY)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
