"""The daemon, put together: what is opened in which order, and how it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from sqlalchemy.orm import Session

from xmigd import __version__, log, native, runtime_dir
from xmigd.api.app import make_app
from xmigd.api.context import Node
from xmigd.api.server import bind_api, bind_tcp, make_server
from xmigd.database import migrate
from xmigd.database.engine import make_engine, prepare_folder
from xmigd.database.models import Job
from xmigd.database.recorder import DatabaseRecords, configure_devices, job_row, live_processes
from xmigd.database.writer import Writer
from xmigd.errors import StartError
from xmigd.records import JobRow
from xmigd.settings import Settings
from xmigd.supervisor.fds import raise_descriptor_limit
from xmigd.supervisor.server import ServerProgram
from xmigd.supervisor.supervisor import Supervisor

logger = log.get("daemon")

# A thread that computes gives the interpreter up after this long: a recovery waits for it at most that much.
SWITCH_INTERVAL = 0.0005


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises StartError if it cannot begin."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    with ExitStack() as stack:
        native_dir = native.find_native_dir(settings.native_dir)
        layout = native.read_layout(native_dir)
        lock = runtime_dir.prepare(settings.runtime_dir, settings.lock_file)
        stack.callback(lock.release)
        descriptors = raise_descriptor_limit()

        database = settings.database
        prepare_folder(database)
        writing = make_engine(database, writer=True)
        stack.callback(writing.dispose)
        migrate.upgrade(database, writing)
        reading = make_engine(database)
        stack.callback(reading.dispose)
        writer = Writer(writing)
        stack.callback(writer.close)
        await asyncio.wrap_future(
            writer.submit(lambda s: configure_devices(s, settings.device_names, settings.device_memory))
        )
        with Session(reading) as session:
            live = live_processes(session)

        def find_job(job: str) -> JobRow | None:
            with Session(reading) as session:
                row = session.get(Job, job)
                return None if row is None else job_row(row)

        api_socket = bind_api(settings.api_socket)
        stack.callback(api_socket.close)
        sockets = [api_socket]
        address: str | None = None
        if settings.port >= 0:
            tcp = bind_tcp(settings.host, settings.port)
            stack.callback(tcp.close)
            sockets.append(tcp)
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            address = f"http://{host}:{tcp.getsockname()[1]}"

        program = ServerProgram(native_dir, settings.runtime_dir.resolve(), settings.device_memory)
        supervisor = Supervisor(settings, layout, program, DatabaseRecords(writer), find_job, live)
        stopping = asyncio.Event()
        node = Node(
            settings=settings, supervisor=supervisor, writer=writer, readers=reading, shims=shim_paths(native_dir),
            started_at=time.time(), tcp_address=address, is_stopping=stopping.is_set,
        )  # fmt: skip
        server = make_server(make_app(node))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        serving = loop.create_task(server.serve(sockets=sockets))
        # What was made until now lives as long as the process: collections that look at it again and again would only
        # delay recoveries.
        gc.collect()
        gc.freeze()
        logger.info(
            "xmigd is ready", version=__version__, runtime_dir=str(settings.runtime_dir), tcp=address,
            devices=settings.devices, descriptors=descriptors, expected_processes=len(live),
        )  # fmt: skip
        await asyncio.wait({serving, loop.create_task(stopping.wait())}, return_when=asyncio.FIRST_COMPLETED)
        stopping.set()
        logger.info("stopping", why="a signal asked for it")
        await supervisor.stop()
        server.should_exit = True
        await serving
        with contextlib.suppress(OSError):
            settings.api_socket.unlink()


def shim_paths(native_dir: Path) -> list[Path]:
    try:
        return native.find_shims(native_dir)
    except StartError as error:
        logger.warning("programs cannot be started with xmigctl run", why=str(error))
        return [native_dir / native.SHIM, native_dir / native.NVML_SHIM]
