"""What the API's document promises, for Schemathesis to hold the daemon to.

The examples are the same in every run. CONTRACT=20 asks for twenty times as many, other ones each time.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from xmigd.rest import make_app

CHECKS: list[Any] = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    response_headers_conformance, negative_data_rejection,
]  # fmt: skip
TIMES = int(os.environ.get("CONTRACT", "1"))
schema = schemathesis.openapi.from_dict(make_app().openapi())


def examples(count: int, **options: Any) -> settings:
    return settings(
        max_examples=count * TIMES, derandomize=TIMES == 1, deadline=None, suppress_health_check=list(HealthCheck),
        database=None, phases=(Phase.explicit, Phase.generate), print_blob=True, **options,
    )  # fmt: skip


class Sequences(schema.as_state_machine()):  # type: ignore[misc]
    """Sequences of requests that follow the document's links."""

    address: str
    headers: dict[str, str]

    def get_call_kwargs(self, case: schemathesis.Case) -> dict[str, Any]:
        return {"base_url": self.address, "headers": self.headers}

    def validate_response(self, response: Any, case: Any, additional_checks: Any = (), **options: Any) -> None:
        case.validate_response(response, checks=CHECKS, headers=self.headers)
