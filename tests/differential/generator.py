"""Random valid programs: same seed, same program.

The generator asks the model what a call would still have to be ordered after, and puts in events, waits and
synchronisations until it may be made. Memory is written as soon as it is there, so that everything can be read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.differential.model import HOST_KINDS, Invalid, Model
from tests.differential.program import Op, Program, touched

# What may be left out, by name, where a device or a driver does not have it.
FEATURES = frozenset({
    "async", "batch", "boxes", "conditional", "contexts", "enable", "graphs", "graphs-across", "host-functions",
    "launch-order", "legacy-order", "peer", "peer-boxes", "pools", "values", "vmm",
})  # fmt: skip
LARGE = 1 << 20
MAX_TRIES = 12

Maker = Callable[[int], Op | None]


class Generator:
    """Makes one program."""

    def __init__(self, seed: int, devices: int, features: frozenset[str] = FEATURES) -> None:
        self.chance = random.Random(seed)
        self.features = features
        contexts = [(device, True) for device in range(devices)]
        if "contexts" in features and self.chance.random() < 0.2:
            contexts.append((self.chance.randrange(devices), False))
        self.model = Model(contexts, "launch-order" in features, "legacy-order" in features)
        self.result = Program(
            seed, contexts, launch_order=self.model.launch_order, legacy_order=self.model.legacy_order
        )
        self._counts: dict[str, int] = {}
        self._left = 2 * LARGE  # bytes of large memory that may yet be allocated

    def make(self) -> Program:
        contexts = range(len(self.model.contexts))
        for ctx in contexts:
            for _ in range(self.chance.randint(1, 2)):
                self._new_stream(ctx)
            for _ in range(self.chance.randint(2, 3)):
                self._new_memory(ctx)
        for _ in range(self.chance.randint(1, 3)):
            self._new_host_memory()
        steps: list[tuple[float, Callable[[], object]]] = [
            (40, self._some_work), (4, self._some_memory), (2, self._new_host_memory), (3, self._some_free),
            (2, self._some_stream), (1, self._some_destroyed_stream), (5, self._some_event), (3, self._some_sync),
            (4, self._some_fill), (4, self._some_check), (3, self._some_read), (2, self._write_variable),
        ]  # fmt: skip
        if "graphs" in self.features:
            steps += [(5, self._some_graph), (12, self._some_launch), (5, self._some_update), (1, self._some_end)]
        weights = [weight for weight, _ in steps]
        for _ in range(self.chance.choice((10, 20, 30, 50))):
            _, step = self.chance.choices(steps, weights)[0]
            step()
        self._read_everything()
        return self.result

    # --- calls, and what they have to wait for

    def emit(self, op: Op) -> bool:
        """Make a call, after whatever it has to be ordered after. False: it is none that can be made."""
        try:
            self.model.check(op)
            while lines := sorted(self.model.unordered(op)):
                self._order(op, self.chance.choice(lines))
            self.model.apply(op)
        except Invalid:
            return False
        self.result.ops.append(op)
        return True

    def _must(self, op: Op) -> None:
        self.model.apply(op)
        self.result.ops.append(op)

    def _order(self, op: Op, line: str) -> None:
        """Order what is to come in `op`'s place after the line."""
        stream = self.model.streams.get(line)
        if line in self.model.across:
            self._must({"op": "sync_ctx", "ctx": int(line[1:])})
            return
        if stream is None:  # destroyed
            ctx = max(self.model.gone, key=lambda ctx: self.model.gone[ctx].get(line, 0))
            self._must({"op": "sync_ctx", "ctx": ctx})
            return
        in_stream = "stream" in op and not (op["op"] == "copy" and self.model.by_host(op))
        if in_stream and self.chance.random() < 0.7:
            event = self._record(line)
            self._must({"op": "wait", "event": event, "stream": self._stream_word(op), "ctx": op["ctx"]})
        else:
            self._sync(line)

    def _stream_word(self, op: Op) -> str:
        line = self.model.line(op)
        return self._named(line)["stream"] if line[0] in "LP" else line

    def _named(self, line: str) -> Op:
        """How a call names the stream of a line."""
        ctx = self.model.streams[line].ctx
        word = self.chance.choice(("0", "1")) if line[0] == "L" else "2" if line[0] == "P" else line
        return {"stream": word, "ctx": ctx}

    def _record(self, line: str) -> str:
        """An event in that stream, now."""
        ctx = self.model.streams[line].ctx
        known = [name for name, (owner, _) in self.model.events.items() if owner == ctx]
        if known and self.chance.random() < 0.7:
            event = self.chance.choice(known)
        else:
            event = self._name("e")
            self._must({"op": "make_event", "name": event, "ctx": ctx, "flags": self.chance.choice((0, 1, 2, 2))})
        self._must({"op": "record", "event": event} | self._named(line))
        return event

    def _sync(self, line: str) -> None:
        """Let the host wait for it."""
        how = self.chance.choice(
            ("sync_stream", "sync_stream", "query_stream", "sync_ctx", "sync_event", "query_event")
        )
        if how.endswith("event"):
            self._must({"op": how, "event": self._record(line)})
        elif how == "sync_ctx":
            self._must({"op": how, "ctx": self.model.streams[line].ctx})
        else:
            self._must({"op": how} | self._named(line))

    def _name(self, kind: str) -> str:
        number = self._counts[kind] = self._counts.get(kind, -1) + 1
        return f"{kind}{number}"

    def _context(self) -> int:
        return self.chance.randrange(len(self.model.contexts))

    def _stream_for(self, ctx: int) -> Op:
        """A stream of that context."""
        lines = [line for line, stream in self.model.streams.items() if stream.ctx == ctx]
        made = [line for line in lines if line[0] == "s"]
        return self._named(self.chance.choice(made if made and self.chance.random() < 0.7 else lines))

    # --- objects

    def _some_stream(self) -> None:
        self._new_stream(self._context())

    def _new_stream(self, ctx: int) -> None:
        flags, priority = self.chance.choice((0, 1, 1)), self.chance.choice((0, 0, -1))
        self.emit({"op": "stream", "name": self._name("s"), "ctx": ctx, "flags": flags, "priority": priority})

    def _some_destroyed_stream(self) -> None:
        made = [line for line in self.model.streams if line[0] == "s"]
        if len(made) > 1:
            self.emit({"op": "destroy_stream", "stream": self.chance.choice(made), "ctx": 0})

    def _size(self) -> int:
        chance = self.chance.random()
        if chance < 0.06 and self._left > 0:
            self._left -= LARGE
            return self.chance.randint(LARGE // 4, LARGE)
        return self.chance.choice((64, 256, 1024, 4096)) * self.chance.randint(1, 4 if chance < 0.8 else 16)

    def _some_memory(self) -> None:
        self._new_memory(self._context())

    def _new_memory(self, ctx: int) -> None:
        kinds = ["mem", "mem", "mem"]
        kinds += ["async"] * 2 if "async" in self.features else []
        kinds += ["pool"] if "pools" in self.features else []
        kinds += ["vmm"] if "vmm" in self.features and self.chance.random() < 0.4 else []
        kind, name, size = self.chance.choice(kinds), self._name("b"), self._size()
        op: Op = {"op": "alloc", "name": name, "kind": kind, "ctx": ctx, "size": size}
        if kind in ("async", "pool"):
            op |= self._stream_for(ctx)
        if kind == "pool":
            op["pool"] = self._some_pool(ctx)
        if not self.emit(op):
            return
        where = {k: op[k] for k in ("stream", "ctx")} if "stream" in op else self._stream_for(ctx)
        self._write(name, ctx, size, where)

    def _write(self, name: str, ctx: int, size: int, where: Op) -> None:
        """All of it."""
        hosts = [h for h, memory in self.model.memory.items() if memory.on_host and memory.size >= size]
        if hosts and self.chance.random() < 0.4:
            via = self.chance.choice(("cuMemcpyHtoDAsync_v2", "cuMemcpyHtoD_v2", "cuMemcpyAsync", "cuMemcpy"))
            source = {"at": [self.chance.choice(hosts), 0]}
            copy = {"op": "copy", "via": via, "to": {"at": [name, 0]}, "from": source, "extent": [size, 1, 1]}
            if self.emit(copy | where):
                return
        bits = self.chance.choice([bits for bits in (8, 16, 32) if size % (bits // 8) == 0])
        self.emit(self._plain_set(name, 0, bits, size // (bits // 8), ctx) | where)

    def _plain_set(self, name: str, offset: int, bits: int, width: int, ctx: int) -> Op:
        return {"op": "set", "to": [name, offset], "bits": bits, "value": self.chance.getrandbits(bits), "pitch": 0,
                "width": width, "height": 1, "ctx": ctx}  # fmt: skip

    def _some_pool(self, ctx: int) -> str:
        known = [name for name, owner in self.model.pools.items() if owner == ctx]
        if known and self.chance.random() < 0.8:
            return self.chance.choice(known)
        name = self._name("p")
        self._must({"op": "pool", "name": name, "ctx": ctx, "threshold": self.chance.choice((0, 0, 1 << 40))})
        return name

    def _new_host_memory(self) -> None:
        kind = self.chance.choice(("pinned", "pinned", "pageable", "pageable", "registered"))
        name, size = self._name("h"), self._size()
        op: Op = {"op": "alloc", "name": name, "kind": kind, "ctx": self._context(), "size": size}
        if kind == "pinned":
            op["flags"] = self.chance.choice((0, 1))  # portable or not, which is the same with unified addresses
        if self.emit(op):
            self.emit({"op": "fill", "to": [name, 0], "n": size, "salt": self.chance.getrandbits(20)})

    def _some_free(self) -> None:
        names = [name for name, memory in self.model.memory.items() if memory.kind != "variable"]
        if len(names) < 4:
            if self.model.pools and self.chance.random() < 0.5:
                self.emit({"op": "destroy_pool", "pool": self.chance.choice(sorted(self.model.pools))})
            return
        name = self.chance.choice(names)
        memory = self.model.memory[name]
        op: Op = {"op": "free", "name": name, "how": "free"}
        if memory.kind in ("async", "pool") and self.chance.random() < 0.8:
            op |= {"how": "async"} | self._stream_for(memory.ctx)
        self.emit(op)

    def _some_event(self) -> None:
        """Recorded in one stream, waited for in another, or by nobody."""
        line = self.chance.choice(sorted(self.model.streams))
        event = self._record(line)
        if self.chance.random() < 0.7:
            self.emit({"op": "wait", "event": event} | self._stream_for(self._context()))
        elif self.chance.random() < 0.3:
            self.emit({"op": "destroy_event", "event": event})

    def _some_sync(self) -> None:
        self._sync(self.chance.choice(sorted(self.model.streams)))

    # --- the host

    def _host_names(self, *kinds: str) -> list[str]:
        return [name for name, memory in self.model.memory.items() if memory.kind in (kinds or HOST_KINDS)]

    def _some_fill(self) -> None:
        if names := self._host_names():
            name = self.chance.choice(names)
            offset, n = self._part(name, 1)
            self.emit({"op": "fill", "to": [name, offset], "n": n, "salt": self.chance.getrandbits(20)})

    def _some_check(self) -> None:
        if names := self._host_names():
            name = self.chance.choice(names)
            offset, n = self._part(name, 1)
            self.emit({"op": "check", "from": [name, offset], "n": n})

    def _some_read(self) -> None:
        ctx = self._context()
        names = self._device_names(ctx)
        if not names:
            return
        name = self.chance.choice(names)
        offset, n = self._part(name, 1)
        self.emit({"op": "read", "from": [name, offset], "n": n, "ctx": ctx, "stream": "0"})

    def _read_everything(self) -> None:
        for ctx in range(len(self.model.contexts)):
            self._must({"op": "sync_ctx", "ctx": ctx})
        for name, memory in list(self.model.memory.items()):
            if memory.written.find(0) != -1:
                continue
            op: Op = {"op": "check" if memory.on_host else "read", "from": [name, 0], "n": memory.size}
            self._must(op if memory.on_host else op | {"ctx": memory.ctx, "stream": "0"})

    def _part(self, name: str, align: int, most: int = 1 << 30) -> tuple[int, int]:
        """Where a part of some memory begins, and how long it is: often all of it."""
        size = self.model.memory[name].size
        if self.chance.random() < 0.3 and size <= most:
            return 0, size // align * align
        offset = self.chance.randrange(0, size, align)
        longest = min(most, size - offset) // align
        return offset, align * self.chance.randint(1, max(1, longest))

    def _device_names(self, ctx: int) -> list[str]:
        return [
            name for name, memory in self.model.memory.items()
            if memory.ctx == ctx and not memory.on_host and memory.written.find(0) == -1
        ]  # fmt: skip

    def _write_variable(self) -> None:
        ctx = self._context()
        self.emit(self._plain_set(f"c{ctx}", 0, 32, 8, ctx) | self._stream_for(ctx))

    # --- work

    def _some_work(self) -> None:
        ctx = self._context()
        for _ in range(MAX_TRIES):
            work = self.work(ctx)
            if work is not None and self.emit(self._in_stream(work, ctx)):
                return

    def _in_stream(self, work: Op, ctx: int) -> Op:
        """Where it is to run. What one's own memory is copied to or from must be where it is known when it is done."""
        if work["op"] == "set" and self.chance.random() < 0.3:
            return work | {"stream": "0", "ctx": ctx, "blocking": True}
        return work | self._stream_for(ctx)

    def work(self, ctx: int, graph: str | None = None) -> Op | None:
        """Something for a stream or, if `graph` says how that is made, a node."""
        makers: list[tuple[float, Maker]] = [(9, self._kernel), (4, self._set), (7, lambda c: self._copy(c, graph))]
        if "host-functions" in self.features:
            makers.append((1, lambda c: self._host(c, graph)))
        if "values" in self.features and graph is None:
            makers.append((1, self._value))
        work = self.chance.choices([maker for _, maker in makers], [weight for weight, _ in makers])[0](ctx)
        if work is not None:
            try:
                self.model.check_work(work)
            except Invalid:
                return None
        return work

    def _kernel(self, ctx: int) -> Op | None:
        names = self._device_names(ctx)
        name = self.chance.choices(("mix", "fold", "scatter", "reverse", "split", "bytes", "given", "count"),
                                   (8, 3, 2, 2, 3, 3, 1, 1))[0]  # fmt: skip
        block, grid = self.chance.choice((32, 64, 128, 256)), self.chance.randint(1, 8)
        op: Op = {"op": "kernel", "name": name, "ctx": ctx, "salt": self.chance.getrandbits(20), "grid": grid,
                  "block": block, "how": self.chance.choice(("plain", "plain", "ex", "buffer"))}  # fmt: skip
        if not names:
            return None

        def part(most: int) -> tuple[list[Any], int]:
            where = self.chance.choice(names)
            offset, n = self._part(where, 4, most)
            return [where, offset], n // 4

        out, n = part(1 << 16)
        if name == "mix":
            (a, na), (b, nb) = part(1 << 16), part(1 << 16)
            op |= {"out": [out], "n": n, "in": [a, b], "words": [na, nb]}
        elif name in ("fold", "scatter"):
            (a, na), most = part(1 << 13), 16 if name == "fold" else 1 << 12
            op |= {"out": [out], "n": min(n, most), "in": [a], "words": [na]}
        elif name == "reverse":
            while block * 4 > n * 4 and block > 1:
                block //= 2
            grid = max(1, min(grid, n // block))
            op |= {"out": [out], "n": grid * block, "grid": grid, "block": block}
        elif name == "split":
            (two, m), (a, na) = part(1 << 14), part(1 << 14)
            op |= {"out": [out, two], "n": min(n, m), "in": [a], "words": [na]}
        elif name == "bytes":
            to, source = self.chance.choice(names), self.chance.choice(names)
            (offset, n), (begin, m) = self._part(to, 1, 1 << 14), self._part(source, 1, 1 << 14)
            n = min(n, m)
            op |= {"out": [[to, offset]], "n": n, "in": [[source, begin]], "words": [n // 4]}
        elif name == "given":
            op |= {"out": [out], "n": 8}
        else:
            op |= {"out": [out], "n": 1, "grid": 1, "block": 1}
        return op

    def _set(self, ctx: int) -> Op | None:
        names = self._device_names(ctx)
        if not names:
            return None
        name, bits = self.chance.choice(names), self.chance.choice((8, 16, 32))
        size = bits // 8
        offset, n = self._part(name, size)
        op = self._plain_set(name, offset, bits, n // size, ctx)
        if self.chance.random() < 0.4:
            height = self.chance.randint(2, 9)
            pitch = n // height // size * size
            if pitch >= size:
                op |= {"pitch": pitch, "width": self.chance.randint(1, pitch // size), "height": height}
        return op

    def _value(self, ctx: int) -> Op | None:
        # The driver takes no memory of a pool, and none that is mapped.
        names = [name for name in self._device_names(ctx) if self.model.memory[name].kind == "mem"]
        if not names:
            return None
        name, bits = self.chance.choice(names), self.chance.choice((32, 64))
        at = self.chance.randrange(0, self.model.memory[name].size - bits // 8 + 1, bits // 8)
        return {"op": "value", "to": [name, at], "bits": bits, "value": self.chance.getrandbits(bits), "ctx": ctx}

    def _host(self, ctx: int, graph: str | None) -> Op | None:
        names = self._host_names("pinned") if graph else self._host_names("pinned", "registered")
        if not names:
            return None
        to, source = self.chance.choice(names), self.chance.choice(names)
        (offset, n), (begin, m) = self._part(to, 1, 2048), self._part(source, 1, 2048)
        return {"op": "host", "to": [to, offset], "from": [source, begin], "n": min(n, m),
                "salt": self.chance.randrange(256), "ctx": ctx}  # fmt: skip

    # --- copies

    def _copy(self, ctx: int, graph: str | None) -> Op | None:
        """From anywhere to anywhere; at least one side in the memory of this context, or both on the host."""
        hosts = self._host_names("pinned") if graph else self._host_names()
        ours = self._device_names(ctx)
        others = [name for c in range(len(self.model.contexts)) if c != ctx for name in self._device_names(c)]
        if "peer" not in self.features:
            others = []
        ways: list[tuple[float, str, list[str], list[str]]] = [
            (4, "HtoD", hosts, ours), (4, "DtoH", ours, hosts), (4, "DtoD", ours, ours),
            (3, "peer", others, ours), (3, "peer", ours, others), (0 if graph else 1, "HtoH", hosts, hosts),
        ]  # fmt: skip
        ways = [way for way in ways if way[0] and way[2] and way[3]]
        if not ways:
            return None
        _, way, sources, targets = self.chance.choices(ways, [way[0] for way in ways])[0]
        source, to = self.chance.choice(sources), self.chance.choice(targets)
        # Memory of pools, and what is mapped, goes to another device by the peer functions only, which no graph takes.
        plain = way != "peer" or all(self.model.memory[name].kind == "mem" for name in (source, to))
        if graph and not plain:
            return None
        # A batch waits for nothing: when pageable memory is read or written the program does not know.
        waits = any(self.model.memory[name].kind == "pageable" for name in (source, to))
        batch = "batch" in self.features and graph is None and plain and not waits and way != "HtoH"
        if batch and self.chance.random() < 0.1:
            return self._batch(ctx, source, to)
        boxes = "boxes" in self.features and (way != "peer" or "peer-boxes" in self.features)
        if boxes and self.chance.random() < 0.35:
            return self._box(ctx, way, source, to, graph, plain=plain)
        (begin, n), (offset, m) = self._part(source, 1), self._part(to, 1)
        op: Op = {"op": "copy", "via": self._via(way, graph, plain=plain), "from": {"at": [source, begin]},
                  "to": {"at": [to, offset]}, "extent": [min(n, m), 1, 1], "ctx": ctx}  # fmt: skip
        return op

    def _via(self, way: str, graph: str | None, *, plain: bool) -> str:
        """The function that makes a copy of one row. ``plain``: one that is not informed of both devices may be it."""
        if way == "HtoH":
            return "cuMemcpy"
        names = ["cuMemcpy", "cuMemcpyAsync", "cuMemcpyAsync"] if plain else []
        if way == "peer":
            names += ["cuMemcpyDtoD_v2", "cuMemcpyDtoDAsync_v2"] if plain else []
            names += [] if graph else ["cuMemcpyPeer", "cuMemcpyPeerAsync", "cuMemcpyPeerAsync"]
        else:
            names += [f"cuMemcpy{way}_v2", f"cuMemcpy{way}Async_v2", f"cuMemcpy{way}Async_v2"]
        if graph == "built":
            return "node"
        return self.chance.choice([name for name in names if graph is None or "Async" in name])

    def _box(self, ctx: int, way: str, source: str, to: str, graph: str | None, *, plain: bool) -> Op | None:
        depth = self.chance.choice((1, 1, 2, 3))
        width, height = self.chance.randint(1, 100), self.chance.randint(1, 8)
        names = ["cuMemcpy3D_v2", "cuMemcpy3DAsync_v2"] if plain else []
        if depth == 1 and plain:
            names += ["cuMemcpy2D_v2", "cuMemcpy2DUnaligned_v2", "cuMemcpy2DAsync_v2", "cuMemcpy2DAsync_v2"]
        if way == "peer" and graph is None:
            names = ["cuMemcpy3DPeer", "cuMemcpy3DPeerAsync", *names]
        via = self.chance.choice([name for name in names if graph is None or "Async" in name])
        if graph is None and way == "HtoH":
            via = self.chance.choice([name for name in names if "Async" not in name])
        if graph == "built":
            via = "node"
        sides = {}
        for which, name in (("from", source), ("to", to)):
            made = self._side(name, width, height, depth, three="3D" in via or via == "node")
            if made is None:
                return None
            sides[which] = made
        return {"op": "copy", "via": via, **sides, "extent": [width, height, depth], "ctx": ctx}

    def _side(self, name: str, width: int, height: int, depth: int, *, three: bool) -> Op | None:
        x, y, z = self.chance.randint(0, 7), self.chance.randint(0, 2), self.chance.randint(0, 1) if three else 0
        pitch = x + width + self.chance.choice((0, 0, 1, 13))
        rows = y + height + self.chance.randint(0, 2) if three else height
        if self.chance.random() < 0.3:  # no gaps at all
            x, y, z, pitch, rows = 0, 0, 0, width, height
        end = ((z + depth - 1) * rows + y + height - 1) * pitch + x + width
        room = self.model.memory[name].size - end
        if room < 0:
            return None
        made: Op = {"at": [name, self.chance.randint(0, room)], "x": x, "y": y, "z": z, "pitch": pitch, "rows": rows}
        if self.chance.random() < 0.2 and self.model.memory[name].kind != "pageable":
            made["unified"] = True
        return made

    def _batch(self, ctx: int, source: str, to: str) -> Op:
        parts = []
        for _ in range(self.chance.randint(1, 4)):
            (begin, n), (offset, m) = self._part(source, 1, 4096), self._part(to, 1, 4096)
            parts.append((begin, offset, min(n, m)))
        return {"op": "copy", "via": self.chance.choice(("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")), "ctx": ctx,
                "from": [[source, begin] for begin, _, _ in parts], "to": [[to, offset] for _, offset, _ in parts],
                "bytes": [n for _, _, n in parts]}  # fmt: skip

    # --- graphs

    def _some_graph(self) -> None:
        ctx = self._context()
        how = self.chance.choice(("captured", "built"))
        op: Op = {"op": "make_graph", "name": self._name("g"), "how": how, "ctx": ctx, "nodes": []}
        if how == "captured":
            made = [line for line in self.model.streams if line[0] == "s"]
            first = [line for line in made if self.model.streams[line].ctx == ctx]
            if not first:
                return
            streams = [self.chance.choice(first)]
            others = made if "graphs-across" in self.features else first
            others = [line for line in others if line != streams[0]]
            streams += self.chance.sample(others, min(len(others), 2))
            op |= {"streams": streams, "branches": [self.model.streams[line].ctx for line in streams], "mode": 2}
        for _ in range(self.chance.randint(1, 7)):
            self._add_node(op)
        if op["nodes"] and self.emit(op):
            self._instantiate(op["name"])

    def _instantiate(self, graph: str) -> None:
        name = self._name("x")
        if self.emit({"op": "instantiate", "name": name, "graph": graph, "flags": 0}):
            self._launch(name)

    def _add_node(self, op: Op) -> None:
        """One more, ordered after what it has to be ordered after and after what chance says."""
        captured, nodes = op["how"] == "captured", op["nodes"]
        branch = self.chance.randrange(len(op["branches"])) if captured and nodes else 0
        ctx = op["branches"][branch] if captured else op["ctx"]
        node: Op | None = self.work(ctx, op["how"])
        if self.chance.random() < 0.1 and not captured:
            node = {"op": "empty", "ctx": ctx}
        elif self.chance.random() < 0.12:
            node = self._child(op, ctx) or node
        elif "conditional" in self.features and not captured and self.chance.random() < 0.15:
            node = self._choice(ctx) or node
        if node is None:
            return
        number = len(nodes)
        deps = {other for other in range(number) if self.chance.random() < 0.2}
        node = node | {"deps": [], "branch": branch}
        if captured and number and not deps and all(other["branch"] != branch for other in nodes):
            deps = {self.chance.randrange(number)}
        for other in range(number - 1, -1, -1):
            # All that clash, the nearest first: those before it may come with it.
            trial = op | {"nodes": [*nodes, node | {"deps": sorted(deps)}]}
            before = self._before(trial)
            if before is None:
                return
            if other not in before[number] and self.model.clashes(nodes[other], node):
                deps.add(other)
        nodes.append(node | {"deps": sorted(deps)})

    @staticmethod
    def _before(op: Op) -> list[set[int]] | None:
        from tests.differential.model import order_of

        try:
            return order_of(op)
        except Invalid:
            return None

    def _child(self, op: Op, ctx: int) -> Op | None:
        if op["how"] == "captured":
            return None  # the driver launches no executable graph in a stream that is captured
        graphs = {
            name: graph for name, graph in self.model.graphs.items()
            if graph.ctx == ctx and not any(node["op"] == "choice" for node in graph.nodes)
        }  # fmt: skip
        if not graphs:
            return None
        name = self.chance.choice(sorted(graphs))
        return {"op": "child", "graph": name, "nodes": list(graphs[name].nodes), "ctx": ctx}

    def _choice(self, ctx: int, deep: int = 0) -> Op:
        """A conditional node. What is in its bodies is done one after the other."""
        kind, count = self.chance.choice((("if", 1), ("if", 2), ("switch", 2), ("switch", 3)))
        bodies: list[list[Op]] = []
        for _ in range(count):
            bodies.append([])
            for _ in range(self.chance.randint(0, 3)):
                if deep < 2 and self.chance.random() < 0.15:
                    bodies[-1].append(self._choice(ctx, deep + 1))
                elif (work := self.work(ctx, "built")) is not None and self._fits_body(work):
                    bodies[-1].append(work)
        return {"op": "choice", "kind": kind, "value": self.chance.randint(0, count), "bodies": bodies, "ctx": ctx}

    def _fits_body(self, work: Op) -> bool:
        regions = [region for regions in touched(work) for region in regions]
        memory = [self.model.memory[region.name] for region in regions]
        return work["op"] != "host" and all(m.on_host or m.ctx == work["ctx"] for m in memory)

    def _some_launch(self) -> None:
        if not self.model.execs:
            return
        name = self.chance.choice(sorted(self.model.execs))
        for _ in range(self.chance.choice((1, 1, 2, 4))):
            self._launch(name)

    def _launch(self, name: str) -> None:
        where = self._stream_for(self.model.execs[name].ctx)
        if self.chance.random() < 0.1:
            self.emit({"op": "upload", "exec": name} | where)
        self.emit({"op": "launch", "exec": name} | where)

    def _some_update(self) -> None:
        """One node of an executable graph, or all of it, is changed; or a node left out, or taken in again."""
        if not self.model.execs:
            return
        name = self.chance.choice(sorted(self.model.execs))
        run = self.model.execs[name]
        number = self.chance.randrange(len(run.nodes))
        way = self.chance.choice(("set_node", "set_node", "enable", "update"))
        if way == "set_node" and run.nodes[number]["op"] in ("kernel", "set", "copy", "host"):
            work = self._varied(run.nodes[number])
            self.emit({"op": "set_node", "exec": name, "node": number, "work": work, "ctx": run.ctx})
        elif way == "enable" and "enable" in self.features:
            self.emit({"op": "enable", "exec": name, "node": number, "on": number in run.off})
        elif way == "update" and run.graph in self.model.graphs and not _refused(run.nodes, run.how):
            graph = next(op for op in self.result.ops if op["op"] == "make_graph" and op["name"] == run.graph)
            other = graph | {"name": self._name("g"), "nodes": [self._varied(node) for node in graph["nodes"]]}
            if self.emit(other):
                self.emit({"op": "update", "exec": name, "graph": other["name"]})
        self._launch(name)

    def _varied(self, node: Op) -> Op:
        """The same, with other values and, where that is as valid, in other places."""
        made = dict(node)
        if made["op"] == "choice":
            made["value"] = self.chance.randint(0, len(made["bodies"]))
            made["bodies"] = [[self._varied(inner) for inner in body] for body in made["bodies"]]
        if "salt" in made:
            made["salt"] = self.chance.randrange(256)
        if made["op"] == "set":
            made["value"] = self.chance.getrandbits(made["bits"])
            if made["height"] == 1:
                made["width"] = self.chance.randint(1, made["width"])
        if made["op"] == "copy" and made["extent"][1:] == [1, 1] and made["extent"][0] > 1:
            snapshot = self.chance.randrange(made["extent"][0])
            made["extent"] = [made["extent"][0] - snapshot, 1, 1]
            for side in ("from", "to"):
                name, offset = made[side]["at"]
                made[side] = made[side] | {"at": [name, offset + self.chance.randint(0, snapshot)]}
        return made

    def _some_end(self) -> None:
        """Of a graph, or of an executable one."""
        if self.model.graphs and self.chance.random() < 0.5:
            self.emit({"op": "destroy_graph", "graph": self.chance.choice(sorted(self.model.graphs))})
        elif self.model.execs:
            name = self.chance.choice(sorted(self.model.execs))
            for line in sorted(self.model.execs[name].last):
                if line in self.model.streams:
                    self._sync(line)
            self.emit({"op": "destroy_exec", "exec": name})


def _refused(nodes: list[Op], how: str) -> bool:
    """Graphs that the driver now and then does not update as a whole, though nothing in them changes: seen on H100s,
    580.159.04, with captured copies of rows."""
    return how == "captured" and any(node["op"] == "copy" and "2D" in node["via"] for node in nodes)


def generate(seed: int, devices: int, features: frozenset[str] = FEATURES) -> Program:
    """The program of a seed."""
    return Generator(seed, devices, features).make()
