"""A program as data: a list of calls, one JSON object each, that model, interpreter and runner read alike.

What a call works on has a name: ``b`` and a number is memory of a device, ``h`` host memory, ``s`` a stream, ``e`` an
event, ``p`` a pool, ``g`` a graph, ``x`` an executable one; ``c`` and the number of a context is the variable of the
module in it. Contexts are numbers; ``ctx`` is the one that is current as the call is made. Streams that need not be
made are ``0`` (the null stream), ``1`` (legacy) and ``2`` (per thread) of the current context.

*Work* is what runs in a stream or as a node of a graph: ``kernel``, ``set``, ``copy``, ``host``, ``value``, ``child``.
A ``choice`` is a conditional node: its bodies are lists of nodes, and ``value``, its handle's default, decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Op = dict[str, Any]
WORK = frozenset({"kernel", "set", "copy", "host", "value"})
VARIABLE_BYTES = 32  # of the variable of a module
# Copies that return when their bytes have arrived, or as if they had: they run in the legacy stream.
BLOCKING = frozenset({
    "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoD_v2", "cuMemcpy", "cuMemcpyPeer", "cuMemcpy2D_v2",
    "cuMemcpy2DUnaligned_v2", "cuMemcpy3D_v2", "cuMemcpy3DPeer",
})  # fmt: skip


@dataclass
class Program:
    """``contexts``: for each its device, and whether it is the primary one. ``launch_order`` and
    ``legacy_order``: see `Model`."""

    seed: int
    contexts: list[tuple[int, bool]]
    ops: list[Op] = field(default_factory=list)
    launch_order: bool = True
    legacy_order: bool = True

    def line(self) -> str:
        return json.dumps(self._head() | {"ops": self.ops}, separators=(",", ":"))

    def text(self) -> str:
        """For people: a call a line. It can be read back, too."""
        ops = ",\n".join(f"  {json.dumps(op)}" for op in self.ops)
        return f'{json.dumps(self._head())[:-1]}, "ops": [\n{ops}\n]}}\n'

    def _head(self) -> dict[str, Any]:
        orders = {"launch_order": self.launch_order, "legacy_order": self.legacy_order}
        return {"seed": self.seed, "contexts": self.contexts} | orders

    @classmethod
    def read(cls, text: str) -> Program:
        found = json.loads(text)
        contexts = [(device, primary) for device, primary in found["contexts"]]
        return cls(found["seed"], contexts, found["ops"], found["launch_order"], found["legacy_order"])


class Region(NamedTuple):
    """Bytes of an object: `depth` slices of `height` rows of `width` bytes."""

    name: str
    start: int
    width: int
    pitch: int = 0
    height: int = 1
    slice_pitch: int = 0
    depth: int = 1

    @property
    def end(self) -> int:
        return self.start + (self.depth - 1) * self.slice_pitch + (self.height - 1) * self.pitch + self.width

    def rows(self) -> Iterator[int]:
        """Where each row begins."""
        for z in range(self.depth):
            for y in range(self.height):
                yield self.start + z * self.slice_pitch + y * self.pitch


def taken(choice: Op) -> list[Op]:
    """The nodes of the body that a conditional node runs: of an *if*, the second one is the *else*."""
    value, bodies = choice["value"], choice["bodies"]
    number = value if choice["kind"] == "switch" else 0 if value else 1
    return list(bodies[number]) if number < len(bodies) else []


def side(copy: Op, which: str, part: int | None = None) -> Region:
    """One side of a copy. ``part``: of a batch, which has several copies of one row each."""
    if part is not None:
        return Region(copy[which][part][0], copy[which][part][1], copy["bytes"][part])
    s = copy[which]
    width, height, depth = copy["extent"]
    pitch, rows = s.get("pitch", width), s.get("rows", height)
    start = s["at"][1] + (s.get("z", 0) * rows + s.get("y", 0)) * pitch + s.get("x", 0)
    return Region(s["at"][0], start, width, pitch, height, pitch * rows, depth)


def _region(place: Any, *extent: int) -> Region:
    """At an object and an offset."""
    name, offset = place
    return Region(name, offset, *extent)


def touched(work: Op) -> tuple[list[Region], list[Region]]:
    """What it reads and what it writes. What it changes is in both."""
    kind = work["op"]
    if kind == "kernel":
        return _by_kernel(work)
    if kind == "set":
        size = work["bits"] // 8
        name, offset = work["to"]
        return [], [Region(name, offset, work["width"] * size, work["pitch"], work["height"])]
    if kind == "value":
        return [], [_region(work["to"], work["bits"] // 8)]
    if kind == "host":
        out = _region(work["to"], work["n"])
        return [_region(work["from"], work["n"]), out], [out]
    assert kind == "copy", kind
    if "bytes" in work:
        parts = range(len(work["bytes"]))
        return [side(work, "from", i) for i in parts], [side(work, "to", i) for i in parts]
    return [side(work, "from")], [side(work, "to")]


def _by_kernel(work: Op) -> tuple[list[Region], list[Region]]:
    """Of the kernels in kernels.c, by their names there. ``out`` and ``in``: object and offset."""
    n, name = work["n"], work["name"]
    outs = [_region(place, n * 4) for place in work.get("out", [])]
    ins = [_region(place, words * 4) for place, words in zip(work.get("in", []), work.get("words", []), strict=True)]
    if name in ("mix", "scatter", "reverse"):
        return [*ins, *outs], outs
    if name == "fold":
        return ins, outs
    if name == "split":
        return [*ins, outs[1]], outs
    if name == "bytes":
        out, source = (_region(work[side][0], n) for side in ("out", "in"))
        return [out, source], [out]
    if name == "given":
        return [], [_region(work["out"][0], 32)]
    assert name == "count", name
    variable = Region(f"c{work['ctx']}", 0, VARIABLE_BYTES)
    return [variable], [variable, _region(work["out"][0], 4)]
