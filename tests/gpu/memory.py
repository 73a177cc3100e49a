"""Device memory that xMIG itself takes: what a program's device uses under xMIG, less what it uses natively."""

from __future__ import annotations

import time

from tests.gpu.bench import Bench, Running, wait_until
from tests.gpu.cases import Case
from xmigd.measurements import Row

TARGET_MB = 600
LOOKS = 20
REST = 0.5  # seconds between two looks, which have to agree


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
