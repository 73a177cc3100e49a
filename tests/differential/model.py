"""Which calls are valid, and which are ordered: what makes a program of the differential test mean one thing only.

A program is valid if every object is there when it is used, nothing is read that nobody has written, and two calls that
touch the same bytes, one of them writing, are ordered: by a stream, an event, a wait of the host, or the legacy stream.
Order is kept as vector clocks (Fidge, 1988; Mattern, 1989). Each stream is a line of its own, and so is the host. What
the driver only happens to order is not taken for granted; see `Model.clock` for what is.

The same model lets the generator ask what a call would still have to wait for, and the shrinker leave out of a program
what is not valid any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.differential.program import BLOCKING, VARIABLE_BYTES, WORK, Op, Program, Region, taken, touched

Clock = dict[str, int]
HOST = "host"
REQUESTED = "!"  # before a line's name in a clock: without what only the legacy stream orders
HOST_KINDS = ("pinned", "registered", "pageable")
NOT_IN_GRAPHS = ("pageable", "registered")  # the second natively can be; under xMIG it is copied by the client
CHANGING = frozenset({"mix", "scatter", "reverse", "split", "bytes", "count"})  # kernels that read what they write


class Invalid(Exception):
    """The call is none that a correct program makes here."""


@dataclass
class Access:
    start: int
    end: int
    line: str
    tick: int
    write: bool


@dataclass
class Memory:
    kind: str  # mem, async, pool, vmm, variable; or one of HOST_KINDS
    ctx: int
    size: int
    written: bytearray
    accesses: list[Access] = field(default_factory=list)
    pool: str | None = None

    @property
    def on_host(self) -> bool:
        return self.kind in HOST_KINDS

    def is_written(self, region: Region) -> bool:
        if region.start < 0 or region.end > self.size:
            return False
        if region.height == region.depth == 1:
            return self.written.find(0, region.start, region.end) == -1
        return all(self.written.find(0, row, row + region.width) == -1 for row in region.rows())

    def write(self, region: Region) -> None:
        for row in region.rows():
            self.written[row : row + region.width] = b"\1" * region.width

    def note(self, region: Region, line: str, tick: int, write: bool) -> None:
        if write:  # whoever is ordered after this one is ordered after what this one was ordered after
            inside = (region.start, region.end)
            if region.height == region.depth == 1:
                self.accesses = [a for a in self.accesses if not (inside[0] <= a.start and a.end <= inside[1])]
        self.accesses.append(Access(region.start, region.end, line, tick, write))


@dataclass
class Stream:
    ctx: int
    blocking: bool
    legacy: bool = False
    clock: Clock = field(default_factory=dict)
    ticks: int = 0


@dataclass
class Graph:
    """``before``: of each node those that it is ordered after, by their numbers."""

    how: str
    ctx: int
    nodes: list[Op]
    before: list[set[int]]
    branches: list[int]


@dataclass
class Executable:
    graph: str
    nodes: list[Op]
    before: list[set[int]]
    how: str
    ctx: int
    branches: list[int]
    shape: tuple[Any, ...]
    off: set[int] = field(default_factory=set)
    last: Clock = field(default_factory=dict)

    @property
    def conditional(self) -> bool:
        return any(node["op"] == "choice" for node in self.nodes)


class Model:
    """The state of a program between two calls, as far as validity goes."""

    def __init__(self, contexts: list[tuple[int, bool]], launch_order: bool = True, legacy_order: bool = True) -> None:
        """``launch_order``: every launch of an executable graph comes after the one before it, in whatever streams, as
        CUDA's documentation says. On H100s some programs that rely on it read something else, natively, too.
        ``legacy_order``: what the legacy stream orders is enough for a copy of page-locked memory, too, as CUDA's
        documentation says. Natively such a copy has now and then taken what was there before (docs/decisions/0037)."""
        self.contexts = contexts
        self.launch_order = launch_order
        self.legacy_order = legacy_order
        self.host: Clock = {}
        self.memory: dict[str, Memory] = {
            f"c{ctx}": Memory("variable", ctx, VARIABLE_BYTES, bytearray(VARIABLE_BYTES))
            for ctx in range(len(contexts))
        }
        self.streams: dict[str, Stream] = {}
        self.events: dict[str, tuple[int, Clock | None]] = {}
        self.pools: dict[str, int] = {}
        self.graphs: dict[str, Graph] = {}
        self.execs: dict[str, Executable] = {}
        self.gone: dict[int, Clock] = {}  # of streams that are destroyed, by context
        self.across: Clock = {}  # blocking copies between devices, of each context that takes part; see `_across`
        for ctx in range(len(contexts)):
            self.streams[f"L{ctx}"] = Stream(ctx, True, legacy=True)
            self.streams[f"P{ctx}"] = Stream(ctx, True)

    # --- lines and clocks

    def line(self, op: Op) -> str:
        """The stream that a call goes to. Raises Invalid."""
        name = "0" if op.get("via") in BLOCKING else op["stream"]
        if name in ("0", "1"):
            return f"L{op['ctx']}"
        if name == "2":
            return f"P{op['ctx']}"
        if name not in self.streams:
            raise Invalid(f"there is no stream {name}")
        return str(name)

    def _own_clock(self, line: str) -> Clock:
        """Of an allocation or a free in stream order: it is no work that the streams of a context wait for by
        themselves (docs/limits.md)."""
        clock = dict(self.host)
        _join(clock, self.streams[line].clock)
        return clock

    def clock(self, line: str) -> Clock:
        """What a call that goes there now is ordered after: what is in the stream, what the host has waited for, and
        the legacy stream of the context, which in turn waits for all streams that were not made to be left alone."""
        stream = self.streams[line]
        clock = self._own_clock(line)
        if stream.legacy:
            for other in self.streams.values():
                if other is not stream and other.ctx == stream.ctx and other.blocking:
                    _join(clock, _unasked(other.clock))
        elif stream.blocking:
            _join(clock, _unasked(self.streams[f"L{stream.ctx}"].clock))
        return clock

    def _submit(self, line: str, clock: Clock) -> int:
        stream = self.streams[line]
        stream.ticks += 1
        clock[line] = clock[REQUESTED + line] = stream.ticks
        stream.clock = clock
        return stream.ticks

    def _by_host(self) -> int:
        self.host[HOST] = self.host.get(HOST, 0) + 1
        return self.host[HOST]

    def _across(self, op: Op) -> list[str]:
        """The lines of a blocking copy that does not stay on the device of the current context, one for each context
        that takes part. In whose stream it runs is the driver's affair: it is only known to come after what the host
        has waited for, and to be done when the host has waited for all of these contexts."""
        if op["op"] != "copy" or op["via"] not in BLOCKING:
            return []
        reads, writes = touched(op)
        memory = [self.memory[region.name] for region in (*reads, *writes)]
        contexts = {op["ctx"], *(m.ctx for m in memory if not m.on_host)}
        return [f"X{ctx}" for ctx in sorted(contexts)] if len({self.contexts[c][0] for c in contexts}) > 1 else []

    # --- what a call does

    def unordered(self, op: Op) -> set[str]:
        """The lines that a call would have to be ordered after, and is not. Raises Invalid for anything else that is
        wrong with it."""
        self.check(op)
        reads, writes = self.touches(op)
        clock = self._clock_of(op)
        found = set()
        for region, write in [*((r, False) for r in reads), *((w, True) for w in writes)]:
            for access in self.memory[region.name].accesses:
                if not (write or access.write) or access.start >= region.end or region.start >= access.end:
                    continue
                early = not write and self._early(op, access, region, clock)
                if early or clock.get(access.line, 0) < access.tick:
                    found.add(access.line)
        return found

    def _early(self, op: Op, write: Access, region: Region, clock: Clock) -> bool:
        """Might a copy take page-locked memory as it was before, though the legacy stream orders it?"""
        return (
            not self.legacy_order
            and op["op"] == "copy"
            and self.memory[region.name].kind in ("pinned", "registered")
            and write.line != HOST
            and write.line not in self.across
            and max(self.host.get(write.line, 0), clock.get(REQUESTED + write.line, 0)) < write.tick
        )

    def apply(self, op: Op) -> None:
        """Make the call. Raises Invalid, and nothing has changed."""
        lines = self.unordered(op)
        if lines:
            raise Invalid(f"{op['op']} is not ordered after {', '.join(sorted(lines))}")
        kind = op["op"]
        if self._on_host(op):
            self._do_fill(op)
        elif kind in WORK or kind == "launch":
            self._work(op)
        else:
            getattr(self, f"_do_{kind}")(op)

    def touches(self, op: Op) -> tuple[list[Region], list[Region]]:
        kind = op["op"]
        if kind in WORK:
            return touched(op)
        if kind == "launch":
            return self._touched_by(self.execs[op["exec"]])
        if kind == "fill":
            return [], [Region(op["to"][0], op["to"][1], op["n"])]
        if kind in ("check", "read"):
            return [Region(op["from"][0], op["from"][1], op["n"])], []
        if kind == "free":
            return [], [Region(op["name"], 0, self.memory[op["name"]].size)]
        return [], []

    def _on_host(self, op: Op) -> bool:
        """A copy from the host to the host, which is done when the call returns."""
        if op["op"] != "copy":
            return False
        reads, writes = touched(op)
        return all(self.memory[region.name].on_host for region in (*reads, *writes))

    def by_host(self, op: Op) -> bool:
        """Is a copy ordered by what the host has waited for alone?"""
        return self._on_host(op) or bool(self._across(op))

    def _clock_of(self, op: Op) -> Clock:
        kind = op["op"]
        if kind == "copy" and self.by_host(op):
            return self.host
        if kind in WORK or kind == "read" or (kind == "free" and op["how"] == "async"):
            return self.clock(self.line(op))
        if kind == "launch":
            clock = self.clock(self.line(op))
            if self.launch_order:
                _join(clock, self.execs[op["exec"]].last)
            return clock
        return self.host

    def _work(self, op: Op) -> None:
        reads, writes = self.touches(op)
        if across := self._across(op):
            self._work_across(across, reads, writes)
            if self._arrives(op):
                _join(self.host, {line: self.across[line] for line in across})
            return
        line = self.line(op)
        clock = self._clock_of(op)
        tick = self._submit(line, clock)
        self._note(reads, writes, line, tick)
        if op["op"] == "launch":
            self.execs[op["exec"]].last = dict(clock)
        elif op["op"] == "copy" and self._arrives(op):
            _join(self.host, clock)

    def _work_across(self, lines: list[str], reads: list[Region], writes: list[Region]) -> None:
        for line in lines:
            self.across[line] = self.across.get(line, 0) + 1
        self._note(reads, writes, lines[0], self.across[lines[0]])
        for line in lines[1:]:
            for region, write in [*((r, False) for r in reads), *((w, True) for w in writes)]:
                access = Access(region.start, region.end, line, self.across[line], write)
                self.memory[region.name].accesses.append(access)

    def _arrives(self, op: Op) -> bool:
        """Is a copy known to be done when its call returns? One to the program's own memory is; a blocking one to
        page-locked memory, too."""
        to = self.memory[touched(op)[1][0].name]
        return to.on_host and (to.kind == "pageable" or op["via"] in BLOCKING)

    def _note(self, reads: Iterable[Region], writes: Iterable[Region], line: str, tick: int) -> None:
        for region in reads:
            memory = self.memory[region.name]
            if memory.kind == "pageable":  # its bytes have been taken when the call returns
                memory.note(region, HOST, self._by_host(), False)
            else:
                memory.note(region, line, tick, False)
        for region in writes:
            memory = self.memory[region.name]
            memory.note(region, line, tick, True)
            memory.write(region)

    # --- checks

    def check(self, op: Op) -> None:
        """Is all there that it needs, and all written that it reads? Raises Invalid."""
        kind = op["op"]
        for key, known in (("event", self.events), ("graph", self.graphs), ("exec", self.execs), ("pool", self.pools)):
            if op.get(key) is not None and op[key] not in known:
                raise Invalid(f"there is no {key} {op[key]}")
        if "stream" in op:
            self.line(op)
        if kind in WORK:
            self.check_work(op)
        elif kind == "launch":
            self._check_launch(self.execs[op["exec"]])
        elif kind in ("fill", "check", "read", "free"):
            reads, writes = self._checked(op)
            for region in reads:
                if not self.memory[region.name].is_written(region):
                    raise Invalid(f"{region.name} is read before it is written")
            for region in writes:
                if region.end > self.memory[region.name].size:
                    raise Invalid(f"{region.name} is shorter")
        elif hasattr(self, f"_check_{kind}"):
            getattr(self, f"_check_{kind}")(op)

    def _checked(self, op: Op) -> tuple[list[Region], list[Region]]:
        for place in (op.get("to"), op.get("from"), [op.get("name")] if op["op"] == "free" else None):
            if place is not None and place[0] not in self.memory:
                raise Invalid(f"there is no {place[0]}")
        return self.touches(op)

    def check_work(self, work: Op, written: dict[str, bytearray] | None = None) -> None:
        """``written``: what is there when it runs, if that is not now."""
        reads, writes = touched(work)
        for region in (*reads, *writes):
            memory = self.memory.get(region.name)
            if memory is None:
                raise Invalid(f"there is no {region.name}")
            if region.start < 0 or region.end > memory.size:
                raise Invalid(f"{region.name} is shorter")
            if memory.on_host and work["op"] in ("kernel", "set", "value"):
                raise Invalid("it is not for the host's memory")
            if "bytes" in work and work.get("stream") in ("0", "1"):
                raise Invalid("a batch is not for the legacy stream")
            if work["op"] == "host" and memory.kind not in ("pinned", "registered"):
                raise Invalid("a function in a stream works on page-locked memory")
        for region in reads:
            memory = self.memory[region.name]
            if written is not None and region.name in written:
                memory = Memory(memory.kind, memory.ctx, memory.size, written[region.name])
            if not memory.is_written(region):
                raise Invalid(f"{region.name} is read before it is written")
        self._check_aliases(reads, writes, work)

    @staticmethod
    def _check_aliases(reads: list[Region], writes: list[Region], work: Op) -> None:
        """Within one call, what is written is not read through another argument, nor written twice."""
        changed = work["op"] == "host" or work.get("name") in CHANGING
        for i, one in enumerate(writes):
            others = list(reads)
            if changed and one in others:
                others.remove(one)
            for other in (*writes[i + 1 :], *others):
                if one.name == other.name and one.start < other.end and other.start < one.end:
                    raise Invalid(f"{one.name} overlaps itself")

    def _touched_by(self, run: Executable) -> tuple[list[Region], list[Region]]:
        reads: list[Region] = []
        writes: list[Region] = []
        for number, node in enumerate(run.nodes):
            if number not in run.off:
                for work in self.works(node):
                    r, w = touched(work)
                    reads += r
                    writes += w
        return reads, writes

    def works(self, node: Op, *, every: bool = False) -> Iterator[Op]:
        """What a node does: a graph in it all that its own nodes do. ``every``: also what a conditional node leaves."""
        if node["op"] == "child":
            for inner in node["nodes"]:
                yield from self.works(inner, every=every)
        elif node["op"] == "choice":
            for body in node["bodies"] if every else [taken(node)]:
                for inner in body:
                    yield from self.works(inner, every=every)
        elif node["op"] != "empty":
            yield node

    def _check_launch(self, run: Executable) -> None:
        if run.conditional:
            self._all_there(run)
        written: dict[str, bytearray] = {}
        for number, node in enumerate(run.nodes):
            if number in run.off:
                continue
            for work in self.works(node):
                self.check_work(work, written)
                for region in touched(work)[1]:
                    memory = self.memory[region.name]
                    if memory.written.find(0) != -1:
                        copy = written.setdefault(region.name, bytearray(memory.written))
                        Memory(memory.kind, memory.ctx, memory.size, copy).write(region)

    # --- objects

    def _new(self, name: str, known: Iterable[str]) -> None:
        if name in known:
            raise Invalid(f"{name} is there already")

    def _check_stream(self, op: Op) -> None:
        self._new(op["name"], self.streams)

    def _do_stream(self, op: Op) -> None:
        self.streams[op["name"]] = Stream(op["ctx"], not op["flags"] & 1)

    def _do_destroy_stream(self, op: Op) -> None:
        stream = self.streams.pop(op["stream"])
        _join(self.gone.setdefault(stream.ctx, {}), stream.clock)

    def _check_make_event(self, op: Op) -> None:
        self._new(op["name"], self.events)

    def _do_make_event(self, op: Op) -> None:
        self.events[op["name"]] = (op["ctx"], None)

    def _do_destroy_event(self, op: Op) -> None:
        del self.events[op["event"]]

    def _check_record(self, op: Op) -> None:
        if self.streams[self.line(op)].ctx != self.events[op["event"]][0]:
            raise Invalid("event and stream are of two contexts")

    def _do_record(self, op: Op) -> None:
        line = self.line(op)
        clock = self.clock(line)
        self._submit(line, clock)
        self.events[op["event"]] = (self.events[op["event"]][0], dict(clock))

    def _do_wait(self, op: Op) -> None:
        line = self.line(op)
        clock = self.clock(line)
        _join(clock, self.events[op["event"]][1] or {})
        self._submit(line, clock)

    def _do_sync_event(self, op: Op) -> None:
        _join(self.host, self.events[op["event"]][1] or {})

    _do_query_event = _do_sync_event

    def _do_sync_stream(self, op: Op) -> None:
        """What is in the stream. That new work in it would wait for more is no matter."""
        _join(self.host, self.streams[self.line(op)].clock)

    _do_query_stream = _do_sync_stream

    def _do_sync_ctx(self, op: Op) -> None:
        for stream in self.streams.values():
            if stream.ctx == op["ctx"]:
                _join(self.host, stream.clock)
        _join(self.host, self.gone.get(op["ctx"], {}))
        line = f"X{op['ctx']}"
        _join(self.host, {line: self.across.get(line, 0)})

    def _check_pool(self, op: Op) -> None:
        self._new(op["name"], self.pools)

    def _do_pool(self, op: Op) -> None:
        self.pools[op["name"]] = op["ctx"]

    def _check_destroy_pool(self, op: Op) -> None:
        if any(memory.pool == op["pool"] for memory in self.memory.values()):
            raise Invalid("there is memory of it")

    def _do_destroy_pool(self, op: Op) -> None:
        del self.pools[op["pool"]]

    def _check_alloc(self, op: Op) -> None:
        self._new(op["name"], self.memory)
        if "stream" in op and self.streams[self.line(op)].ctx != op["ctx"]:
            raise Invalid("the stream is of another context")

    def _do_alloc(self, op: Op) -> None:
        memory = Memory(op["kind"], op["ctx"], op["size"], bytearray(op["size"]), pool=op.get("pool"))
        self.memory[op["name"]] = memory
        if "stream" in op:
            line = self.line(op)
            tick = self._submit(line, self._own_clock(line))
            memory.note(Region(op["name"], 0, op["size"]), line, tick, True)

    def _do_free(self, op: Op) -> None:
        memory = self.memory.pop(op["name"])
        if op["how"] == "async":
            line = self.line(op)
            self._submit(line, self._own_clock(line))
        assert memory.kind != "variable"

    def _do_fill(self, op: Op) -> None:
        self._note(*self.touches(op), HOST, self._by_host())

    _do_check = _do_fill

    def _do_read(self, op: Op) -> None:
        line = self.line(op)
        clock = self.clock(line)
        reads, _ = self.touches(op)
        self._note(reads, [], line, self._submit(line, clock))
        _join(self.host, clock)

    # --- graphs

    def _check_graph_nodes(self, op: Op) -> None:
        for node in op["nodes"]:
            if node["op"] == "child":
                self._check_child(op, node)
            self._check_choice(op, node)
            for work in self.works(node, every=True):
                self._there(work)
                for region in (*touched(work)[0], *touched(work)[1]):
                    if self.memory[region.name].kind in NOT_IN_GRAPHS:
                        raise Invalid("memory that no graph can keep")
        self.ordered(op["nodes"], order_of(op))

    def _check_child(self, op: Op, node: Op) -> None:
        """A graph in a graph says itself what it does, as the other one does at that moment."""
        if op["how"] == "captured":
            run = self.execs.get(node["exec"])
            same = run is not None and not run.off and run.nodes == node["nodes"]
        else:
            graph = self.graphs.get(node["graph"])
            same = graph is not None and graph.nodes == node["nodes"]
        if not same:
            raise Invalid("there is no such graph to be put into another")

    def _check_choice(self, op: Op, node: Op) -> None:
        """What is in the bodies of a conditional node stays on its device, and is done by that alone."""
        if node["op"] == "child" and any(inner["op"] == "choice" for inner in node["nodes"]):
            raise Invalid("a graph with conditional nodes is not copied")
        if node["op"] != "choice":
            return
        if op["how"] != "built":
            raise Invalid("conditional nodes are added to graphs that are built")
        for work in self.works(node, every=True):
            self._there(work)
            memory = [self.memory[region.name] for regions in touched(work) for region in regions]
            if work["op"] not in ("kernel", "set", "copy") or work["ctx"] != node["ctx"]:
                raise Invalid("nothing for a body")
            if any(m.ctx != node["ctx"] and not m.on_host for m in memory):
                raise Invalid("another device's memory in a body")

    def ordered(self, nodes: list[Op], before: list[set[int]]) -> None:
        """Are all nodes of a graph that touch the same ordered? Raises Invalid."""
        all_touched = [self._node_touches(node) for node in nodes]
        for number, (reads, writes) in enumerate(all_touched):
            for other in range(number):
                if other not in before[number] and _clash((reads, writes), all_touched[other]):
                    raise Invalid(f"nodes {other} and {number} are not ordered")

    def _node_touches(self, node: Op) -> tuple[list[Region], list[Region]]:
        reads: list[Region] = []
        writes: list[Region] = []
        for work in self.works(node):
            r, w = touched(work)
            reads += r
            writes += w
        return reads, writes

    def clashes(self, one: Op, other: Op) -> bool:
        """Do two nodes touch the same, one of them writing?"""
        return _clash(self._node_touches(one), self._node_touches(other))

    def _check_make_graph(self, op: Op) -> None:
        self._new(op["name"], self.graphs)
        for stream in op.get("streams", []):
            if stream not in self.streams:
                raise Invalid(f"there is no stream {stream}")
        self._check_graph_nodes(op)

    def _do_make_graph(self, op: Op) -> None:
        self.graphs[op["name"]] = Graph(op["how"], op["ctx"], op["nodes"], order_of(op), op.get("branches", []))

    def _check_instantiate(self, op: Op) -> None:
        self._new(op["name"], self.execs)
        for node in self.graphs[op["graph"]].nodes:
            for work in self.works(node, every=True):
                self._there(work)
            if node["op"] == "choice" and any(run.graph == op["graph"] for run in self.execs.values()):
                raise Invalid("a graph with conditional nodes is executable once")

    def _there(self, work: Op) -> None:
        for region in (*touched(work)[0], *touched(work)[1]):
            if region.name not in self.memory or region.end > self.memory[region.name].size:
                raise Invalid(f"there is no {region.name}, or not so much of it")

    def _do_instantiate(self, op: Op) -> None:
        graph = self.graphs[op["graph"]]
        self.execs[op["name"]] = Executable(
            op["graph"], list(graph.nodes), graph.before, graph.how, graph.ctx, graph.branches, shape(graph)
        )

    def _check_upload(self, op: Op) -> None:
        self._all_there(self.execs[op["exec"]])

    def _all_there(self, run: Executable) -> None:
        """Is all the memory still there that the graph knows of?"""
        for node in run.nodes:
            for work in self.works(node, every=True):
                self._there(work)

    def _do_upload(self, op: Op) -> None:
        """It orders nothing."""

    def _check_update(self, op: Op) -> None:
        graph, run = self.graphs[op["graph"]], self.execs[op["exec"]]
        if shape(graph) != run.shape:
            raise Invalid("the graph has another shape")
        for node in graph.nodes:
            for work in self.works(node, every=True):
                self._there(work)

    def _do_update(self, op: Op) -> None:
        graph, run = self.graphs[op["graph"]], self.execs[op["exec"]]
        run.nodes = list(graph.nodes)
        run.before = graph.before

    def _check_set_node(self, op: Op) -> None:
        run = self.execs[op["exec"]]
        if op["node"] >= len(run.nodes) or run.how != "built" or run.graph not in self.graphs:
            raise Invalid("there is no such node")
        self._all_there(run)
        old, new = run.nodes[op["node"]], op["work"]
        if node_shape(old) != node_shape(new):
            raise Invalid("the node has another shape")
        self._there(new)
        for work in (old, new):
            for region in (*touched(work)[0], *touched(work)[1]):
                if region.name not in self.memory:
                    raise Invalid(f"there is no {region.name}")
        nodes = [*run.nodes[: op["node"]], new, *run.nodes[op["node"] + 1 :]]
        self.ordered(nodes, run.before)
        if new["op"] == "copy":
            for one, other in zip(
                (*touched(old)[0], *touched(old)[1]), (*touched(new)[0], *touched(new)[1]), strict=True
            ):
                a, b = self.memory[one.name], self.memory[other.name]
                if a.on_host != b.on_host or a.ctx != b.ctx or a.kind != b.kind:
                    raise Invalid("the copy is of another kind")

    def _do_set_node(self, op: Op) -> None:
        self.execs[op["exec"]].nodes[op["node"]] = op["work"]

    def _check_enable(self, op: Op) -> None:
        run = self.execs[op["exec"]]
        if op["node"] >= len(run.nodes) or run.how != "built" or run.graph not in self.graphs:
            raise Invalid("there is no such node")
        if run.nodes[op["node"]]["op"] not in ("kernel", "set", "copy"):
            raise Invalid("it is no node that can be left out")
        self._all_there(run)

    def _do_enable(self, op: Op) -> None:
        off = self.execs[op["exec"]].off
        if op["on"]:
            off.discard(op["node"])
        else:
            off.add(op["node"])

    def _do_destroy_graph(self, op: Op) -> None:
        del self.graphs[op["graph"]]

    def _check_destroy_exec(self, op: Op) -> None:
        last = self.execs[op["exec"]].last
        if any(self.host.get(line, 0) < tick for line, tick in last.items()):
            raise Invalid("it may be running")

    def _do_destroy_exec(self, op: Op) -> None:
        del self.execs[op["exec"]]


def order_of(op: Op) -> list[set[int]]:
    """Of each node of a graph those that it comes after: its ``deps``, the one before it in its branch, and theirs."""
    before: list[set[int]] = []
    last: dict[int, int] = {}
    for number, node in enumerate(op["nodes"]):
        direct = set(node["deps"])
        if op["how"] == "captured":
            if node["branch"] in last:
                direct.add(last[node["branch"]])
            elif number and not direct:
                raise Invalid("a branch that comes from nowhere")
            last[node["branch"]] = number
        if any(other >= number for other in direct):
            raise Invalid("a node after a later one")
        before.append(direct.union(*(before[other] for other in direct)))
    return before


def shape(graph: Graph) -> tuple[Any, ...]:
    """What two graphs must share for the one to take the other's place."""
    deps = tuple(tuple(sorted(node["deps"])) for node in graph.nodes)
    branches = tuple(node.get("branch", 0) for node in graph.nodes)
    return graph.how, graph.ctx, deps, branches, tuple(node_shape(node) for node in graph.nodes)


def node_shape(node: Op) -> tuple[Any, ...]:
    """What cannot be changed of a node of an executable graph."""
    kind = node["op"]
    if kind == "set":
        return kind, node["ctx"], node["height"] == 1, node["width"] if node["height"] > 1 else 0
    if kind == "copy":
        return kind, node["ctx"], tuple(node["extent"][1:]), node["extent"][1] > 1 and tuple(node["extent"])
    if kind == "child":
        return kind, tuple(node_shape(inner) for inner in node["nodes"])
    if kind == "choice":
        return kind, node["ctx"], node["kind"], tuple(tuple(map(node_shape, body)) for body in node["bodies"])
    return kind, node.get("ctx")


Touched = tuple[list[Region], list[Region]]


def _clash(one: Touched, other: Touched) -> bool:
    pairs = [(one[1], other[0]), (one[1], other[1]), (one[0], other[1])]
    return any(
        a.name == b.name and a.start < b.end and b.start < a.end for ours, theirs in pairs for a in ours for b in theirs
    )


def _unasked(clock: Clock) -> Clock:
    return {line: tick for line, tick in clock.items() if not line.startswith(REQUESTED)}


def _join(clock: Clock, other: Clock) -> None:
    for line, tick in other.items():
        if clock.get(line, 0) < tick:
            clock[line] = tick


def valid(program: Program, ops: Iterable[Op]) -> list[Op]:
    """Those of the calls that are valid in that program, each after the valid ones before it."""
    model = Model(program.contexts, program.launch_order, program.legacy_order)
    kept = []
    for op in ops:
        try:
            model.apply(op)
        except Invalid:
            continue
        kept.append(op)
    return kept
