"""States of processes, as the database and the API name them."""

from __future__ import annotations

LIVE = ("starting", "running", "recovering", "suspended", "losing", "draining", "unprotected")
FINAL = ("lost", "ended")
UNPROTECTED = "unprotected"  # it has never come to us
