"""Device memory that xMIG itself takes: what a program's device uses under xMIG, less what it uses natively."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gpu.bench import Bench, wait_until
from tests.gpu.cases import HELD
from xmigd.demo.node import Node
from xmigd.measurements import Row


def measure(bench: Bench) -> Iterator[Row]:
    native, _ = used(bench, None)
    with bench.node(standby=False) as node:
        alone, _ = used(bench, node)
    with bench.node() as node:
        both, shadow = used(bench, node)
    rows = (
        ("device memory of xMIG", both, 600, "server, warm standby and shadow"),
        ("device memory of xMIG without standby", alone, None, "server and shadow"),
    )
    live = f"natively {native / 1e6:.0f} MB; live at the last cut {shadow / 1e6:.0f} MB"
    for name, value, target, said in rows:
        yield Row(
            name=name, value=round((value - native) / 1e6), unit="MB", target=target, better="lower",
            conditions=f"{said}; {HELD.said}, {live}",
        )  # fmt: skip


def used(bench: Bench, node: Node | None) -> tuple[int, int]:
    """Bytes that the program takes of the device, once it has done its steps; live bytes at the last cut."""
    before = bench.device_used()
    with bench.started(HELD, node) as running:
        running.holding()
        live = 0
        program = running.program
        if program is not None:
            if program.node.environment.get("XMIG_STANDBY") != "False":
                wait_until(lambda: (program.info() or {}).get("standby") == "warm", "a warm standby")
            live = (program.info() or {}).get("live_bytes") or 0
        taken = bench.device_used() - before
        running.finish()
    return taken, live
