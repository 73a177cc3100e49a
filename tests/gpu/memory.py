"""Device memory that xMIG itself takes: what a program's device uses under xMIG, less what it uses natively."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tests.gpu.bench import Bench, Running, servers_of, wait_until
from tests.gpu.cases import ASKS, Case
from xmigd.measurements import Row

TARGET_MB = 600
LOOKS = 20
REST = 0.5  # seconds between two looks, which have to agree
RESOLUTION = 1 << 20  # bytes: of what is measured
A_WHILE = 3.0  # seconds, in which a standby would have come


def asking(bench: Bench) -> Iterator[Row]:
    """A program that asks which devices there are, and has no context; and then it makes one."""
    before = bench.device_used()
    with bench.started(ASKS, None) as native:
        natively = native.holding()
        native_bytes = bench.device_used() - before
        native.go()
        native.turn(1)
        native_context = bench.device_used() - before
        native.go()
        natively = native.finish().result
    with bench.node() as node:
        before = bench.device_used()
        with bench.started(ASKS, node) as running:
            assert running.program is not None
            running.holding()
            running.program.until("running")
            time.sleep(A_WHILE)
            info = running.program.info() or {}
            xmig_bytes = bench.device_used() - before
            servers = len(servers_of(str(node.folder)))
            running.go()
            running.turn(1)
            opened = running.program
            wait_until(lambda: (opened.info() or {}).get("standby") == "warm", "a warm standby")
            xmig_context = bench.device_used() - before
            running.go()
            xmig = running.finish().result
    differs = sorted(key for key in natively if not key.endswith("_s") and natively[key] != xmig[key])
    alike = f"answers that differ: {', '.join(differs)}" if differs and not bench.rehearsal else "answers as natively"
    yield Row(
        name="cuinit: device memory of xMIG", value=megabytes(xmig_bytes - native_bytes), unit="MB", target=0,
        better="lower", conditions=f"{ASKS.reported}; {servers} server{'s'[: servers - 1]}, "
        f"{'no' if info.get('standby') is None else 'a'} standby after {A_WHILE:g} s; natively "
        f"{megabytes(native_bytes)} MB; {RESOLUTION >> 20} MiB, what nvidia-smi resolves, counts as nothing; {alike}",
    )  # fmt: skip
    yield Row(
        name="cuinit, then a context: device memory of xMIG", value=megabytes(xmig_context - native_context), unit="MB",
        target=TARGET_MB, better="lower",
        conditions=f"the same program with its primary context: server and warm standby; natively "
        f"{megabytes(native_context)} MB; {times(xmig)}, natively {times(natively)}",
    )  # fmt: skip


def megabytes(used: int) -> int:
    return 0 if abs(used) <= RESOLUTION else round(used / 1e6)


def times(result: dict[str, Any]) -> str:
    return f"cuInit {1e3 * result['init_s']:.0f} ms, the context {1e3 * result['context_s']:.0f} ms"


class Weighing:
    """Of a device that nobody else uses: a native program is weighed first, then the same under xMIG beside it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._before = bench.device_used()
        self.native = self.xmig = self.shadow = 0  # bytes

    def weigh_native(self) -> None:
        self.native = self._bench.device_used() - self._before

    def weigh_xmig(self, running: Running) -> None:
        """With its standby, when snapshots have stopped changing its shadow, and what they gave back has gone."""
        program = running.program
        assert program is not None

        def shadow() -> int:
            return (program.info() or {}).get("shadow_bytes") or 0

        wait_until(lambda: (program.info() or {}).get("standby") == "warm", "a warm standby")
        for _ in range(LOOKS):
            before = self.shadow, self.xmig
            self.shadow = shadow()
            self.xmig = self._bench.device_used() - self._before - self.native
            if (self.shadow, self.xmig) == before:
                return
            time.sleep(REST)

    def row(self, case: Case) -> Row:
        return Row(
            name=f"{case.name}: device memory of xMIG besides the shadow",
            value=round((self.xmig - self.native - self.shadow) / 1e6), unit="MB", target=TARGET_MB, better="lower",
            conditions=f"server and warm standby; {case.reported}; natively {self.native / 1e6:.0f} MB; "
            f"the shadow {self.shadow / 1e6:.0f} MB",
        )  # fmt: skip
