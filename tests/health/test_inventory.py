"""Devices of whose driver nothing is known."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pynvml
import pytest
from structlog.testing import capture_logs

from xmigd.devices.inventory import Inventory


def test_that_there_is_no_nvml_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the threads of two devices find it out at the same moment."""
    both = threading.Barrier(2)

    def initialise() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        raise OSError("no library")

    monkeypatch.setattr(pynvml, "nvmlInit", initialise)
    inventory = Inventory(0)
    with capture_logs() as lines, ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: inventory.nvml(), range(2))) == [None, None]
    assert [line["why"] for line in lines] == ["NVML: no library"]
