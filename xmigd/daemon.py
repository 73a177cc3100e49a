"""The daemon, put together: what is opened in which order, and how it leaves."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd import __version__, log, native, runtime_dir
from xmigd.api.cached import Cached
from xmigd.api.dependencies import Services
from xmigd.api.front import Front
from xmigd.api.gate import make_gate
from xmigd.api.server import ApiServer, bind_api, bind_tcp, check_tcp, make_server
from xmigd.checkpoints.bucket import second_place
from xmigd.checkpoints.content import Chunks
from xmigd.checkpoints.criu import Criu
from xmigd.checkpoints.memory import MemoryTier, default_folder
from xmigd.checkpoints.mirroring import Mirroring
from xmigd.checkpoints.policies import CheckpointPolicies
from xmigd.checkpoints.rescue import Rescue
from xmigd.checkpoints.restoring import Restoring
from xmigd.checkpoints.room import Room
from xmigd.checkpoints.service import Checkpoints
from xmigd.checkpoints.set_messages import TOPIC as CHECKPOINTS
from xmigd.checkpoints.sets import Sets
from xmigd.checkpoints.settling import Settling
from xmigd.connections.quotas import Quotas
from xmigd.consolidation.service import Consolidation
from xmigd.database import migrate
from xmigd.database.engine import make_engine, prepare_folder
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.devices import repository as devices
from xmigd.devices.inventory import Inventory
from xmigd.devices.learner import DeviceLearner
from xmigd.devices.service import Devices
from xmigd.driver_checkpoint.service import DriverMoves, knowledge
from xmigd.errors import StartError
from xmigd.events import repository as events
from xmigd.events.bus import Bus
from xmigd.events.stream import Events
from xmigd.faults.service import Faults
from xmigd.fleet.orders import Orders
from xmigd.fleet.own import Own
from xmigd.fleet.reading import Readings
from xmigd.fleet.service import Fleet
from xmigd.health.sensor import Sensor
from xmigd.health.service import Health
from xmigd.ipc import exits
from xmigd.ipc.fds import raise_descriptor_limit
from xmigd.jobs import repository as jobs
from xmigd.jobs.admission import Admission
from xmigd.jobs.grants import Grants
from xmigd.jobs.service import Jobs
from xmigd.leases.leases import leases_of
from xmigd.memory.descriptor_store import DescriptorStore
from xmigd.memory.fd_store import FdStore
from xmigd.memory.retained import Retained
from xmigd.metrics.collector import ProcessCollector, RequestCollector, WorkCollector
from xmigd.metrics.counts import Counts
from xmigd.metrics.requests import Requests
from xmigd.metrics.series import DeviceReader, Sampler
from xmigd.metrics.service import Metrics
from xmigd.migrations.drains import Drains
from xmigd.migrations.places import Places
from xmigd.migrations.service import Moves
from xmigd.mps.service import Mps
from xmigd.networks.service import TOPIC as NETWORKS
from xmigd.networks.service import Networks
from xmigd.node.service import Node
from xmigd.operations.service import Operations
from xmigd.peers.certificates import open_identity
from xmigd.peers.known import KnownPeers
from xmigd.peers.links import PeerLinks
from xmigd.peers.service import Peers
from xmigd.policies.automation import Automation
from xmigd.policies.breaker import Breaker
from xmigd.policies.service import BreakerPolicy, DevicePolicy, Policies, RetentionPolicy
from xmigd.prediction.first_minutes import FirstMinutes
from xmigd.prediction.service import Predictions
from xmigd.processes import repository as processes
from xmigd.processes.service import Processes
from xmigd.profiling.profiles import Profiles
from xmigd.profiling.traces import Traces
from xmigd.ranks.service import JobRanks
from xmigd.recording import retention
from xmigd.recording.database import DatabaseRecords
from xmigd.recording.published import PublishingRecords
from xmigd.records import JobRow, LiveProcess, ProcessRow
from xmigd.rest import make_api
from xmigd.scheduling.bulk import Bulk
from xmigd.scheduling.service import Preemptions
from xmigd.security.audit import Audit
from xmigd.security.callers import operators_group
from xmigd.security.tokens import Tokens
from xmigd.servers.scopes import ManagerScopes, Scopes
from xmigd.servers.server import ServerProgram
from xmigd.settings import MIB, Settings
from xmigd.sharing.neighbours import Neighbours
from xmigd.sharing.rotation import Rotation
from xmigd.sharing.service import Sharing
from xmigd.store.snapshot_store import SnapshotStore
from xmigd.subscribers import Subscribers
from xmigd.supervisor.node_messages import TOPIC
from xmigd.supervisor.supervisor import Supervisor
from xmigd.systemd import ServiceManager
from xmigd.transfers.arrivals import Arrivals
from xmigd.transfers.calls import Calls
from xmigd.transfers.chunks import ChunkExchange
from xmigd.transfers.departures import Departures
from xmigd.transfers.door import Door
from xmigd.transfers.neighbours import NeighbourExchange
from xmigd.transfers.service import Transfers
from xmigd.webhooks.service import Webhooks

logger = log.get("daemon")

# A thread that computes gives the interpreter up after this long: a recovery waits for it at most that much.
SWITCH_INTERVAL = 0.0005


@dataclass(frozen=True, slots=True)
class Left:
    """What the last daemon left behind."""

    live: list[LiveProcess]
    unprotected: list[tuple[ProcessRow, JobRow]]
    runners: list[tuple[str, int, int]]  # that it watched: their jobs, pids and starts
    reserving: list[tuple[JobRow, float]]  # with device memory, and when each was made
    launched: list[JobRow]  # whose runners may still be there
    cordoned: dict[str, str]
    newest_event: int

    @classmethod
    def read(cls, session: Session) -> Left:
        return cls(
            live=processes.live_ones(session), unprotected=processes.unprotected_ones(session),
            runners=jobs.runners(session), reserving=jobs.reserving(session), launched=jobs.launched(session),
            cordoned=devices.cordoned(session), newest_event=events.newest(session),
        )  # fmt: skip


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises StartError if it cannot begin."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    manager = ServiceManager(os.environ)
    with ExitStack() as stack:
        stack.callback(manager.close)
        native_dir = native.find_native_dir(settings.native_dir)
        layout = native.read_layout(native_dir)
        lock = runtime_dir.prepare(settings.runtime_dir, settings.lock_file)
        stack.callback(lock.release)
        descriptors = raise_descriptor_limit()

        shims = shim_paths(native_dir)
        native.link_names(settings.names_folder, shims)
        front = Front()
        quotas = Quotas.of(settings, "XMIG_")
        servers, address = listen(settings, front, quotas, stack)
        loop = asyncio.get_running_loop()
        serving = [loop.create_task(server.serve(sockets=[bound])) for server, bound in servers]
        for task in serving:
            stack.callback(task.cancel)

        tells_ends = exits.kernel_tells()
        writer, reading = await open_database(settings, front, stack)
        with Session(reading) as session:
            left = Left.read(session)
        links, peer_address = await open_links(settings, stack)
        bus = Bus(writer, newest=left.newest_event, keep=settings.events_kept)
        operations = Operations(writer, reading, bus)

        def find_job(job: str) -> JobRow | None:
            with Session(reading) as session:
                row = jobs.find(session, job)
                return None if row is None else jobs.job_row(row)

        scopes = ManagerScopes() if manager.present else Scopes()
        program = ServerProgram(native_dir, settings.runtime_dir.resolve(), settings.device_memory, scopes)
        snapshot_store = SnapshotStore(settings, layout, writer, reading) if settings.store else None
        if snapshot_store is not None:
            stack.callback(snapshot_store.close)
        policies = Policies(settings, writer, reading)
        breaker = Breaker(writer, reading, bus, lambda: policies.group("circuit-breaker", BreakerPolicy))
        counts = Counts()
        device_faulted: Subscribers[str] = Subscribers()
        records = PublishingRecords(
            DatabaseRecords(writer),
            bus,
            left.live,
            counts=counts,
            breaker=breaker,
            device_faulted=device_faulted,
            unprotected=[row for row, _ in left.unprotected],
        )
        if manager.present:
            fd_store = FdStore(manager, layout)
        else:
            store = DescriptorStore(native_dir, settings.runtime_dir)
            stack.callback(store.close)
            fd_store = FdStore(store, layout)
        learner, inventory = DeviceLearner(writer), Inventory(settings.device_memory)
        mps = Mps(settings.runtime_dir.resolve() / "mps", settings.mps_names, scopes)
        mps.find_left()
        supervisor = Supervisor(
            settings, layout, program, records, find_job, left.live, fd_store, links, mps,
            snapshot_store=snapshot_store, tells_ends=tells_ends, unprotected=left.unprotected, cordoned=left.cordoned,
            learn=learner, uuid_of=lambda device: learner.uuid(device) or inventory.uuid(device),
        )  # fmt: skip
        links.register(TOPIC, supervisor.scopes)
        for runner in left.runners:
            supervisor.runners.watch(*runner)
        for job in left.launched:
            supervisor.guard.add(job)
        policies.applied_by("recovery", lambda policy: supervisor.set_recovery(**policy.model_dump()))
        policies.applied_by("retention", lambda policy: bus.keep(policy.events))
        profiles = Profiles(supervisor.processes, settings.profile_every)
        neighbours = Neighbours(supervisor.processes, settings)
        sampler = Sampler(
            supervisor.processes, DeviceReader(writer, reading, supervisor.processes, inventory), profiles.sample
        )
        traces = Traces(
            processes=supervisor.processes, operations=operations, readers=reading,
            folder=settings.database.parent / "traces", node=settings.node, kept=settings.traces_kept,
            mib=settings.trace_mib,
        )  # fmt: skip
        admission = Admission(
            supervisor=supervisor, inventory=inventory, reader=Reader(writer, reading), names=settings.device_names,
            jobs=left.reserving,
        )  # fmt: skip
        places = Places(
            supervisor=supervisor, inventory=inventory, writer=writer, readers=reading, bus=bus, admission=admission
        )
        native_moves = DriverMoves(
            operations=operations, writer=writer, readers=reading, folder=settings.runtime_dir,
            known=knowledge(places, supervisor),
        )  # fmt: skip
        await native_moves.forget_the_dead()
        moves = Moves(
            supervisor=supervisor, operations=operations, readers=reading,
            folder=settings.database.parent / "suspended", places=places, native=native_moves,
        )  # fmt: skip
        rotation = Rotation(
            supervisor=supervisor, moves=moves, operations=operations, admission=admission, bus=bus,
            slice=settings.rotation_slice,
        )  # fmt: skip
        webhooks = Webhooks(
            writer=writer, reader=Reader(writer, reading), bus=bus, settings=settings,
            keep=lambda: policies.group("retention", RetentionPolicy).events,
        )  # fmt: skip
        stopping = asyncio.Event()
        reader, requests = Reader(writer, reading), Requests()
        tokens, audit = Tokens(writer, reading), Audit(writer, reading, bus)
        folder = settings.database.parent / "checkpoints"
        memory = MemoryTier(
            settings.checkpoint_memory_dir or default_folder(folder), limit=settings.checkpoint_memory_mib << 20
        )
        metrics = Metrics(
            counts,
            [
                ProcessCollector(supervisor, reader, inventory),
                WorkCollector(
                    supervisor=supervisor,
                    operations=operations,
                    bus=bus,
                    breaker=breaker,
                    writer=writer,
                    damaged=lambda: memory.damaged,
                ),
                RequestCollector(requests, quotas),
            ],
        )
        first_minutes = FirstMinutes(
            processes=supervisor.processes, sampler=sampler, writer=writer, step_ms=profiles.step_ms,
            collectives=profiles.collectives,
        )  # fmt: skip
        predictions = Predictions(reader=reader, profiles=first_minutes)
        networks = Networks(
            links=links, folder=settings.state_dir.resolve() / "networks", range=settings.job_network,
            confined=manager.present,
        )  # fmt: skip
        links.register(NETWORKS, networks)
        await networks.find_left()
        the_jobs = Jobs(
            supervisor=supervisor, writer=writer, reader=reader, bus=bus, shims=shims, networks=networks,
            names_folder=settings.names_folder, client_socket=settings.client_socket, admission=admission,
            grants=Grants(settings.critical_users), make_room=rotation.make_room,
            predicted=predictions.peak_bytes if settings.reserve_predicted else None,
        )  # fmt: skip
        chunks, mirroring = Chunks(folder / "objects", memory), None
        settling = Settling(folder=folder, chunks=chunks, writer=writer, reader=reader, bus=bus)
        settling.open()
        if memory.used:
            supervisor.host_pool.share(memory.folder, memory.spare, memory.yield_room)
        stack.callback(settling.stop)
        if (mirror := second_place(settings)) is not None:
            mirroring = Mirroring(mirror, folder=folder, chunks=chunks, writer=writer, reader=reader, bus=bus)
            chunks.elsewhere = mirror.piece
            stack.callback(mirroring.stop)
        checkpoints = Checkpoints(
            supervisor=supervisor, moves=moves, operations=operations, writer=writer, reader=reader, layout=layout,
            folder=folder, node=settings.node, criu=Criu(settings.criu, confined=manager.present),
            room=Room(folder, limit_mib=settings.checkpoint_mib, free_mib=settings.checkpoint_free_mib),
            chunks=chunks, mirroring=mirroring, settling=settling,
        )  # fmt: skip
        restoring = Restoring(
            checkpoints=checkpoints, supervisor=supervisor, moves=moves, operations=operations, reader=reader,
            devices=settings.device_names, places=places, bus=bus,
        )  # fmt: skip
        checkpoint_policies = CheckpointPolicies(
            checkpoints=checkpoints, restoring=restoring, jobs=the_jobs, supervisor=supervisor, operations=operations,
            writer=writer, reader=reader, bus=bus, audit=audit, settings=settings,
        )  # fmt: skip
        arrivals = Arrivals(
            checkpoints=checkpoints, restoring=restoring, supervisor=supervisor, operations=operations, writer=writer,
            reader=reader, places=places, bus=bus, allowed=lambda: settings.programs_from.split(","),
        )  # fmt: skip
        departures = Departures(
            checkpoints=checkpoints, supervisor=supervisor, operations=operations, writer=writer, reader=reader,
            bus=bus, calls=(calls := Calls(links)), node=settings.node,
        )  # fmt: skip
        leases = leases_of(settings)
        if leases is not None:
            stack.callback(leases.close)
        orders = Orders(
            node=settings.node, supervisor=supervisor, operations=operations, moves=moves, departures=departures,
            reader=reader, leases=leases, controllers=lambda: settings.fleet_controllers.split(","),
        )  # fmt: skip
        retained = Retained(settings.neighbour_copies_mib * MIB)
        chunk_exchange = ChunkExchange(calls, supervisor.processes.get, lambda: supervisor.scopes.is_settled, retained)
        supervisor.fetch_chunks = chunk_exchange.fetch
        neighbour_exchange = NeighbourExchange(
            settings.node, calls, retained, has_ranks=supervisor.has_ranks, held=supervisor.unique.held,
            shares_job=supervisor.shares_job,
        )  # fmt: skip
        supervisor.unique.others = neighbour_exchange
        supervisor.nodes_left.add(neighbour_exchange.left)
        Door(
            links, in_loop=orders.or_else(arrivals.in_loop),
            in_thread=neighbour_exchange.or_else(chunk_exchange.or_else(arrivals.in_thread)),
            longest=neighbour_exchange.longest(arrivals.longest), sender=arrivals.sender,
        )  # fmt: skip
        sets = Sets(
            checkpoints=checkpoints, restoring=restoring, supervisor=supervisor, operations=operations, reader=reader,
            links=links, networks=networks, allowed=lambda: settings.programs_from.split(","),
        )  # fmt: skip
        links.register(CHECKPOINTS, sets)
        rescue = Rescue(checkpoints=checkpoints, operations=operations, bus=bus)
        supervisor.being_lost.add(rescue.being_lost)
        the_processes = Processes(supervisor, reader)
        preemptions = Preemptions(
            supervisor=supervisor, moves=moves, checkpoints=checkpoints, restoring=restoring, operations=operations,
            jobs=the_jobs, processes=the_processes,
        )  # fmt: skip
        transfers = Transfers(
            departures=departures, arrivals=arrivals, reader=reader, operations=operations, leases=leases,
            node=settings.node,
        )  # fmt: skip
        drains = Drains(
            supervisor=supervisor, moves=moves, transfers=transfers, preemptions=preemptions, operations=operations,
            places=places, reader=reader, before=checkpoint_policies.before_drain, node=settings.node,
            devices=settings.device_names,
        )  # fmt: skip
        the_devices = Devices(
            supervisor=supervisor, inventory=inventory, mps=mps, writer=writer, reader=reader, bus=bus
        )
        health = Health(
            sensor=Sensor(settings.device_names, inventory, learner.uuid), devices=the_devices, drains=drains,
            places=places, breaker=breaker, audit=audit, writer=writer, reader=reader, bus=bus,
            policy=lambda: policies.group("devices", DevicePolicy),
        )  # fmt: skip
        consolidation = Consolidation(
            node=settings.node, supervisor=supervisor, operations=operations, moves=moves, places=places,
            sampler=sampler, readers=reading, bus=bus, step_ms=profiles.step_ms, remaining=predictions.remaining,
        )  # fmt: skip
        own = Own(supervisor=supervisor, devices=the_devices, reader=reader, busy=consolidation.busy)
        readings = Readings(links, own.shown, lambda: settings.fleet_readers.split(","))
        services = Services(
            reader, Cached(writer), bus, operations, moves, drains, native_moves, tokens, audit, policies, breaker,
            sampler, metrics, webhooks,
            Node(
                settings=settings, supervisor=supervisor, writer=writer, started_at=time.time(), tcp_address=address,
                is_stopping=stopping.is_set,
            ),
            the_jobs,
            predictions,
            the_processes,
            JobRanks(supervisor, reader),
            profiles,
            traces,
            Faults(writer, reader, bus),
            the_devices,
            health,
            Events(reader, bus, tokens),
            Peers(links, peer_address),
            checkpoints,
            restoring,
            checkpoint_policies,
            transfers,
            preemptions,
            Sharing(processes=the_processes, neighbours=neighbours, rotation=rotation),
            Bulk(
                jobs=the_jobs, moves=moves, processes=the_processes, preemptions=preemptions, operations=operations,
            ),
            consolidation,
            Fleet(
                node=settings.node, readings=readings, orders=orders, calls=calls, leases=leases,
                operations=operations,
            ),
        )  # fmt: skip
        automation = Automation(
            breaker=breaker, audit=audit, drains=drains, places=places,
            policy=lambda: policies.group("devices", DevicePolicy),
        )  # fmt: skip

        def count_fault(process: str) -> None:
            found = supervisor.processes.get(process)
            if found is not None and "," not in found.row.device:  # of several nobody knows which it was
                automation.device_faulted(found.row.device)

        device_faulted.add(count_fault)
        await operations.resolve_interrupted()
        await arrivals.recover()
        await sets.recover()
        profiles.start()
        neighbours.start()
        await rotation.start()
        sampler.start()
        gate = make_gate(
            make_api(services), settings=settings, writer=writer, operations=operations, tokens=tokens, audit=audit,
            operators=operators_group(settings.operators_group), requests=requests,
        )  # fmt: skip
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        status = f"{settings.devices}; programs come to {settings.client_socket}"
        loop.add_signal_handler(signal.SIGHUP, reload, settings, manager, status)
        tidying = loop.create_task(retention.keep_tidy(writer, settings))
        guarding = loop.create_task(supervisor.guard.run())
        pooling = loop.create_task(supervisor.host_pool.keep())
        checkpointing = loop.create_task(checkpoint_policies.run())
        observing = loop.create_task(first_minutes.run(predictions.started_at))
        sensing = loop.create_task(health.run(settings.health_interval, settings.kernel_log))
        transferring = [loop.create_task(each.keep()) for each in (arrivals, departures)]
        settling.start()
        if mirroring is not None:
            mirroring.start()
        await links.start()
        await webhooks.start()
        # What was made until now lives as long as the process: collections that look at it again and again would only
        # delay recoveries. One now would find a megabyte, and delay the start.
        gc.freeze()
        gc.enable()
        logger.info(
            "xmigd is ready", version=__version__, runtime_dir=str(settings.runtime_dir), tcp=address,
            peers=peer_address, devices=settings.devices, descriptors=descriptors, expected_processes=len(left.live),
        )  # fmt: skip
        front.open(gate)
        manager.ready(status)
        await asyncio.wait({*serving, loop.create_task(stopping.wait())}, return_when=asyncio.FIRST_COMPLETED)
        stopping.set()
        tidying.cancel()
        pooling.cancel()
        checkpointing.cancel()
        sensing.cancel()
        for task in transferring:
            task.cancel()
        observing.cancel()
        guarding.cancel()
        manager.stopping("programs and servers go on")
        logger.info("stopping", why="a signal requested it")
        await links.close()
        await webhooks.stop()
        await rotation.stop()
        await operations.stop()
        await sampler.stop()
        await profiles.stop()
        await neighbours.stop()
        await predictions.stop()
        await supervisor.stop()
        await mps.stop()
        await scopes.close()
        native_moves.leave()
        await bus.close()
        for server, _ in servers:
            server.leave()
        await asyncio.gather(*serving)


async def open_database(settings: Settings, front: Front, stack: ExitStack) -> tuple[Writer, Engine]:
    """Its writer, and what reads it, once it is as this version has it and knows this node's devices. Raises
    StartError."""
    prepare_folder(settings.database)
    await migrate.upgrade_apart(settings.database, lambda: front.wait_for("its database is being upgraded"))
    writing = make_engine(settings.database, writer=True)
    stack.callback(writing.dispose)
    reading = make_engine(settings.database)
    stack.callback(reading.dispose)
    writer = Writer(writing)
    stack.callback(writer.close)
    names, memory_bytes = settings.device_names, settings.device_memory
    await writer.write("devices.configure", lambda session: devices.configure(session, names, memory_bytes))
    return writer, reading


def listen(
    settings: Settings, front: Front, quotas: Quotas, stack: ExitStack
) -> tuple[list[tuple[ApiServer, socket.socket]], str | None]:
    """The API's servers, each with its socket, and the address of that on the network. Raises StartError."""
    if settings.port >= 0:
        check_tcp(settings)
    api_socket = bind_api(settings.api_socket)
    stack.callback(settings.api_socket.unlink, missing_ok=True)
    stack.callback(api_socket.close)
    servers = [(make_server(front, settings, quotas), api_socket)]
    if settings.port < 0:
        return servers, None
    tcp = bind_tcp(settings.host, settings.port)
    stack.callback(tcp.close)
    servers.append((make_server(front, settings, quotas, tcp=True), tcp))
    return servers, f"{'http' if settings.tls_cert is None else 'https'}://{_at(settings.host, tcp)}"


async def open_links(settings: Settings, stack: ExitStack) -> tuple[PeerLinks, str | None]:
    """To the daemons of other nodes, and the address at which those connect. Raises StartError."""
    # A first start makes a key, for which a large library is loaded.
    identity = await asyncio.to_thread(open_identity, settings.state_dir)
    known = KnownPeers(settings.state_dir, settings.node, identity)
    if settings.peer_port < 0:
        return PeerLinks(node=settings.node, identity=identity, known=known), None
    listening = bind_tcp(settings.peer_host, settings.peer_port, "XMIG_PEER_")
    stack.callback(listening.close)
    links = PeerLinks(node=settings.node, identity=identity, known=known, listening=listening)
    everywhere = settings.peer_host in ("0.0.0.0", "::")
    return links, _at(socket.gethostname() if everywhere else settings.peer_host, listening)


def _at(host: str, listening: socket.socket) -> str:
    """HOST:PORT"""
    return f"{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def reload(settings: Settings, manager: ServiceManager, status: str) -> None:
    """SIGHUP: take over what the configuration file says now, as far as that is possible without a restart."""
    manager.reloading()
    try:
        changed, fixed = settings.reload()
    except ValueError as error:  # of pydantic, or of the TOML parser
        logger.error("the settings are not taken over", why=str(error))
    else:
        log.configure(settings.log_level, json=settings.log_json)
        logger.info("settings read again", changed=", ".join(changed) or None, why="SIGHUP")
        if fixed:
            logger.warning("settings that need a restart", changed=", ".join(fixed))
    manager.ready(status)


def shim_paths(native_dir: Path) -> list[Path]:
    try:
        return native.find_shims(native_dir)
    except StartError as error:
        logger.warning("programs cannot be started with xmigctl run", why=str(error))
        return [native_dir / name for name in (native.SHIM, native.NVML_SHIM, native.NCCL_SHIM, native.LOADER)]
