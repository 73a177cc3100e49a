"""The daemon's one writer: how many writes it acknowledges, which are on the disk then."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.bench.load import percentile
from xmigd.database import migrate
from xmigd.database.engine import make_engine, prepare_folder
from xmigd.database.writer import Writer
from xmigd.events import repository as events
from xmigd.events.bus import Bus
from xmigd.main import be_prompt
from xmigd.measurements import Row
from xmigd.security.audit import XMIGD, Audit

CLIENTS, SECONDS = 32, 4
TARGET = 1000  # per second
JOB = '{"name": "a write", "command": "none"}'


def measure(folder: Path, runs: int) -> Iterator[Row]:
    """Intents for the audit, which every request that changes something waits for, and their events."""
    path = folder / "writes" / "xmig.db"
    prepare_folder(path)
    engine, readers = make_engine(path, writer=True), make_engine(path)
    migrate.upgrade(path, engine)
    interval = sys.getswitchinterval()
    be_prompt()
    try:
        alone = [asyncio.run(_clients(engine, readers, 1)) for _ in range(runs)]
        before = time.process_time()
        found = [asyncio.run(_clients(engine, readers, CLIENTS)) for _ in range(runs)]
        cost = time.process_time() - before
    finally:
        sys.setswitchinterval(interval)
        engine.dispose()
        readers.dispose()
    rates = [len(took) / SECONDS for took, _ in found]
    took = sorted(1e3 * each for took, _ in found for each in took)
    commits = median(count / SECONDS for _, count in found)
    yield Row(
        name="writes acknowledged, the writer", value=round(median(rates)), unit="1/s", target=TARGET, better="higher",
        conditions=f"audit intents with their events, {CLIENTS} clients in the process at once, each waits for its "
        f"commit; median of {runs} runs of {SECONDS} s, worst {min(rates):.0f}/s, in {commits:.0f} commits/s; "
        f"acknowledged after {median(took):.1f} ms, 99th percentile {percentile(took, 0.99):.0f} ms, slowest "
        f"{took[-1]:.0f} ms; {1e3 * cost / len(took):.2f} ms of a processor each, the client's part included; "
        f"one client alone {median(len(each) / SECONDS for each, _ in alone):.0f}/s",
    )  # fmt: skip


async def _clients(engine: Engine, readers: Engine, count: int) -> tuple[list[float], int]:
    """How long each write took, and how many commits there were."""
    writer = Writer(engine)
    with Session(readers) as session:
        newest = events.newest(session)
    audit = Audit(writer, readers, Bus(writer, newest=newest))
    took: list[float] = []

    async def client(end: float) -> None:
        while (began := time.perf_counter()) < end:
            await audit.intent(XMIGD, "POST /v1/jobs", request_id="0" * 32, detail={"body": JOB})
            took.append(time.perf_counter() - began)

    before = writer.version[1]
    end = time.perf_counter() + SECONDS
    await asyncio.gather(*(client(end) for _ in range(count)))
    commits = writer.version[1] - before
    await asyncio.to_thread(writer.close)
    return took, commits
