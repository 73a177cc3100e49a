"""What Prometheus reads."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from xmigd.metrics.counts import Counts


class Metrics:
    def __init__(self, counts: Counts, collectors: Sequence[Collector]) -> None:
        """`collectors` tell what is true at the moment of a scrape."""
        self._counts = counts
        self._now = CollectorRegistry()
        for collector in collectors:
            self._now.register(collector)

    def text(self) -> bytes:
        """May wait for the database and the driver."""
        return generate_latest(self._counts.registry) + generate_latest(self._now)
