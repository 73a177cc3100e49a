"""A served model: how long it takes from its start, and from its restoration, until it answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from tests.gpu.bench import Bench, Failed
from tests.gpu.cases import PROGRAMS
from tests.gpu.checkpoints import SMALL_TIER_MIB, criu, done, host_memory, restore
from tests.ports import free_port
from xmigd.measurements import Row

PATIENCE = 120.0
POOL_MIB = 8192
PROMPT = [1, 2, 3, 5, 8, 13, 21, 34]
TINY = ["--layers", "1", "--width", "64", "--words", "512"]
WHAT = "a Llama of 1.2 billion weights in bfloat16 with Transformers, a step in a graph, behind HTTP"


def measure(bench: Bench) -> Iterator[Row]:
    """Natively, under xMIG, and from a checkpoint: the same answers."""
    folder = bench.scratch / "served"
    command = [bench.python, str(PROGRAMS / "served.py"), "--folder", str(folder), *(TINY if bench.rehearsal else [])]
    subprocess.run([*command, "--prepare"], env=bench.natively(), check=True, capture_output=True, timeout=PATIENCE)
    port = free_port()
    command += ["--port", str(port)]
    log = bench.logs / "served.out"
    native, expected = None, None
    with log.open("w") as out:
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "start_new_session": True, "text": True,
        }  # fmt: skip
        if not bench.rehearsal:
            began = time.monotonic()
            process = subprocess.Popen(command, env=dict(bench.natively()), **options)
            with ending(process):
                expected = first_answer(port, process)
                native = time.monotonic() - began
        with (
            host_memory(bench) as memory,
            bench.node(criu=criu(), checkpoint_memory_mib=SMALL_TIER_MIB, host_pool_mib=POOL_MIB, **memory) as node,
        ):
            began = time.monotonic()
            program = node.program(command, name="served", environment=bench.environment, **options)
            with ending(program.process):
                cold = first_answer(port, program.process)
                under = time.monotonic() - began
                made = node.client.post("/v1/checkpoints", {"job": program.job, "stop": True})
                program.process.wait(PATIENCE)
                kept = done(node.client, made)
            began = time.monotonic()
            back = restore(node, kept)
            restored = first_answer(port)
            took = time.monotonic() - began
            os.kill(back["root"], signal.SIGKILL)
    wrong = [how for how, each in (("under xMIG", cold), ("restored", restored)) if each != (expected or cold)]
    beside = under if native is None else native
    yield Row(
        name="start of a served model from a checkpoint", value=round(took / beside, 3), unit="of a cold start",
        target=0.2, better="lower",
        conditions=f"until it has answered: {took:.3g} s, of which the restoration, from host memory, "
        f"{back['ms'] / 1e3:.3g}; started {'' if native is None else f'natively {native:.3g} s, '}under xMIG "
        f"{under:.3g} s, its files in memory; {kept['content_bytes'] / 1e6:.0f} MB of content; {WHAT}",
    )  # fmt: skip
    yield Row(
        name="served model: differences", value=len(wrong), unit="in all", target=0, better="lower",
        conditions=f"answers; different: {', '.join(wrong) or 'none'}; {WHAT}",
    )  # fmt: skip


def first_answer(port: int, process: subprocess.Popen[Any] | None = None) -> list[int]:
    """Raises Failed: it has ended, or does not answer."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and (process is None or process.poll() is None):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
            try:
                connection.request("POST", "/", json.dumps(PROMPT))
                return list(json.loads(connection.getresponse().read()))
            except ConnectionRefusedError:
                time.sleep(0.005)
    raise Failed("the model does not answer")


@contextlib.contextmanager
def ending(process: subprocess.Popen[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
