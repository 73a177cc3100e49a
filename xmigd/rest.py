"""The REST API put together: every domain's endpoints, and what holds for all of them.

`python -m xmigd.rest` prints the OpenAPI document; docs/openapi.json is it, and a test compares them.
"""

from __future__ import annotations

import json

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from xmigd import __version__
from xmigd.api.dependencies import Services
from xmigd.api.dispatch import Dispatch
from xmigd.api.document import complete
from xmigd.api.problems import on_error
from xmigd.checkpoints import endpoints as checkpoints
from xmigd.checkpoints import policy_endpoints as checkpoint_policies
from xmigd.consolidation import endpoints as consolidation
from xmigd.devices import endpoints as devices
from xmigd.errors import XmigError
from xmigd.events import endpoints as events
from xmigd.faults import endpoints as faults
from xmigd.fleet import endpoints as fleet
from xmigd.health import endpoints as health
from xmigd.jobs import endpoints as jobs
from xmigd.metrics import endpoints as metrics
from xmigd.migrations import endpoints as migrations
from xmigd.node import endpoints as node
from xmigd.operations import endpoints as operations
from xmigd.peers import endpoints as peers
from xmigd.policies import endpoints as policies
from xmigd.prediction import endpoints as prediction
from xmigd.processes import endpoints as processes
from xmigd.profiling import endpoints as profiling
from xmigd.ranks import endpoints as ranks
from xmigd.scheduling import endpoints as scheduling
from xmigd.security import endpoints as security
from xmigd.sharing import endpoints as sharing
from xmigd.transfers import endpoints as transfers
from xmigd.webhooks import endpoints as webhooks

# In the order of the document.
ROUTERS = tuple(
    domain.router
    for domain in (
        node, devices, health, jobs, prediction, scheduling, sharing, ranks, processes, faults, migrations, transfers,
        checkpoints, checkpoint_policies, profiling, consolidation, fleet, operations, events, security, peers,
        policies, webhooks, metrics,
    )
)  # fmt: skip

DESCRIPTION = """\
Long work answers 202 with an operation. Errors are problem documents (RFC 9457) with a stable `code`, a `hint`, and for
a process its `process_location`. Unknown fields are refused. Lists are newest first. Over TCP every request needs
`Authorization: Bearer ...`; on the local socket the kernel says who calls.
"""


def make_api(services: Services) -> Dispatch:
    return Dispatch(make_app(), services)


def make_app() -> FastAPI:
    """It knows its own description; who answers requests is Dispatch."""
    app = FastAPI(
        title="xMIG", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None,
        routes=[route for router in ROUTERS for route in router.routes],
    )  # fmt: skip
    for kind in (XmigError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    complete(app)
    return app


def document() -> str:
    return json.dumps(make_app().openapi(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(document(), end="")
