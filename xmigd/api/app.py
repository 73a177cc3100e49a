"""The application: its resources, and what holds for all of them."""

from __future__ import annotations

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from xmigd import __version__
from xmigd.api import audit, devices, events, jobs, metrics, migrations, node, operations, policies, processes, tokens
from xmigd.api.context import Node
from xmigd.api.document import complete
from xmigd.api.problems import on_error
from xmigd.api.schemas import Problem
from xmigd.api.strict import KnownParameters, only_known
from xmigd.errors import XmigError

DESCRIPTION = """\
Long work answers 202 with an operation. Errors are problem documents (RFC 9457) with a stable `code`, a `hint`, and for
a process its `process_location`. Unknown fields are refused. Lists are newest first. Over TCP every request needs
`Authorization: Bearer ...`; on the local socket the kernel says who calls.
"""


def make_app(context: Node | None = None) -> FastAPI:
    """Without a node it only knows its own description."""
    app = FastAPI(
        title="xMIG", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None,
        dependencies=[Depends(only_known)],
        responses={"default": {"model": Problem, "description": "A problem (RFC 9457)."}},
    )  # fmt: skip
    app.state.node = context
    app.state.known = KnownParameters(app)
    for kind in (XmigError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    for module in (node, devices, jobs, processes, migrations, operations, events, audit, tokens, policies, metrics):
        app.include_router(module.router)
    complete(app)
    return app
