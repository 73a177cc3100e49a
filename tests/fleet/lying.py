"""xmigd that answers questions about itself with what a file says: `lie.json` in its runtime directory. Without the
file it is honest; with `hang` in it, it does not answer. Everything else is the daemon's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from xmigd.fleet import reading
from xmigd.main import main

LIE = Path(os.environ["XMIG_RUNTIME_DIR"]) / "lie.json"
honest = reading.Readings._answer


async def answer(self: reading.Readings, peer: str, body: dict[str, Any]) -> None:
    if not LIE.exists():
        await honest(self, peer, body)
    elif (text := LIE.read_text()) != "hang":
        self._links.send(peer, {"topic": reading.TOPIC, "op": "shown", "id": body["id"]} | json.loads(text))


reading.Readings._answer = answer  # type: ignore[method-assign]
main()
