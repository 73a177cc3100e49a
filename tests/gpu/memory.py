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
        alone, alone_shadow = used(bench, node)
    with bench.node() as node:
        both, shadow = used(bench, node)
    rows = (
        ("device memory of xMIG besides the shadow", both, shadow, 600, "server and warm standby"),
        ("device memory of xMIG without standby, besides the shadow", alone, alone_shadow, None, "server"),
    )
    for name, value, kept, target, said in rows:
        live = f"natively {native / 1e6:.0f} MB; the shadow {kept / 1e6:.0f} MB"
        yield Row(
            name=name, value=round((value - native - kept) / 1e6), unit="MB", target=target, better="lower",
            conditions=f"{said}; {HELD.said}, {live}",
        )  # fmt: skip


def used(bench: Bench, node: Node | None) -> tuple[int, int]:
    """Bytes that the program takes of the device, once it has done its steps; of it the shadow."""
    before = bench.device_used()
    with bench.started(HELD, node) as running:
        running.holding()
        shadow = 0
        program = running.program
        if program is not None:
            if program.node.environment.get("XMIG_STANDBY") != "False":
                wait_until(lambda: (program.info() or {}).get("standby") == "warm", "a warm standby")
            shadow = (program.info() or {}).get("shadow_bytes") or 0
        taken = bench.device_used() - before
        running.finish()
    return taken, shadow
