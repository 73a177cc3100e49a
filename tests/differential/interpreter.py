"""What a program means: its calls done one after another on plain arrays. Nothing in it is asynchronous, so it is right
for valid programs only (model.py)."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np

from tests.differential.program import VARIABLE_BYTES, WORK, Op, Program, Region, side, taken

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint32]]
TYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Interpreter:
    """Runs one program. ``read``: checksums of what it read, in order."""

    def __init__(self, program: Program) -> None:
        self.memory: dict[str, Bytes] = {
            f"c{ctx}": np.zeros(VARIABLE_BYTES, np.uint8) for ctx in range(len(program.contexts))
        }
        self.graphs: dict[str, list[Op]] = {}
        self.execs: dict[str, list[Op]] = {}
        self.off: dict[str, set[int]] = {}
        self.read: list[int] = []
        for op in program.ops:
            self._do(op)

    def _do(self, op: Op) -> None:
        kind = op["op"]
        if kind in WORK:
            self._work(op)
        elif kind == "alloc":
            self.memory[op["name"]] = np.zeros(op["size"], np.uint8)
        elif kind == "free":
            del self.memory[op["name"]]
        elif kind == "fill":
            name, offset = op["to"]
            self.memory[name][offset : offset + op["n"]] = np.frombuffer(pattern(op["n"], op["salt"]), np.uint8)
        elif kind in ("check", "read"):
            name, offset = op["from"]
            self.read.append(zlib.crc32(self.memory[name][offset : offset + op["n"]].tobytes()))
        elif kind == "make_graph":
            self.graphs[op["name"]] = op["nodes"]
        elif kind == "instantiate":
            self.execs[op["name"]] = list(self.graphs[op["graph"]])
            self.off[op["name"]] = set()
        elif kind == "update":
            self.execs[op["exec"]] = list(self.graphs[op["graph"]])
        elif kind == "set_node":
            self.execs[op["exec"]][op["node"]] = op["work"]
        elif kind == "enable":
            off = self.off[op["exec"]]
            (off.discard if op["on"] else off.add)(op["node"])
        elif kind == "launch":
            self._nodes(self.execs[op["exec"]], self.off[op["exec"]])

    def _nodes(self, nodes: list[Op], off: set[int]) -> None:
        for number, node in enumerate(nodes):
            if number in off or node["op"] == "empty":
                continue
            if node["op"] == "child":
                self._nodes(node["nodes"], set())
            elif node["op"] == "choice":
                self._nodes(taken(node), set())
            else:
                self._work(node)

    def _work(self, work: Op) -> None:
        kind = work["op"]
        if kind == "kernel":
            self._kernel(work)
        elif kind == "set":
            name, offset = work["to"]
            size = work["bits"] // 8
            row = np.full(work["width"], work["value"], TYPES[work["bits"]]).view(np.uint8)
            for start in Region(name, offset, work["width"] * size, work["pitch"], work["height"]).rows():
                self.memory[name][start : start + len(row)] = row
        elif kind == "value":
            name, offset = work["to"]
            value = np.array([work["value"]], TYPES[work["bits"]]).view(np.uint8)
            self.memory[name][offset : offset + len(value)] = value
        elif kind == "host":
            self._host(work)
        else:
            parts = range(len(work["bytes"])) if "bytes" in work else [None]
            for part in parts:
                self._copy(side(work, "to", part), side(work, "from", part))

    def _copy(self, to: Region, source: Region) -> None:
        into, out_of = self.memory[to.name], self.memory[source.name]
        for a, b in zip(to.rows(), source.rows(), strict=True):
            into[a : a + to.width] = out_of[b : b + source.width]

    def _host(self, work: Op) -> None:
        n = work["n"]
        (to, at), (source, begin) = work["to"], work["from"]
        out = self.memory[to][at : at + n]
        out[:] = out * np.uint8(5) + self.memory[source][begin : begin + n][::-1] + np.uint8(work["salt"])

    def _words(self, place: list[Any], count: int) -> Words:
        return self.memory[place[0]][place[1] : place[1] + 4 * count].view(np.uint32)

    def _kernel(self, work: Op) -> None:
        name, n, salt = work["name"], work["n"], np.uint32(work["salt"])
        i = np.arange(n, dtype=np.uint32)
        ins = [self._words(at, words) for at, words in zip(work.get("in", []), work.get("words", []), strict=True)]
        if name == "mix":
            out, (a, b) = self._words(work["out"][0], n), ins
            from_b = b[(i * np.uint32(3) + (salt >> np.uint32(7))) % np.uint32(len(b))]
            out[:] = scramble((out ^ a[(i * np.uint32(5) + salt) % np.uint32(len(a))]) + from_b) + i
        elif name == "fold":
            out, (a,) = self._words(work["out"][0], n), ins
            k = np.arange(len(a), dtype=np.uint32)
            mask = k * np.uint32(0x9E3779B9) + salt
            factor = np.uint32(2) * k + np.uint32(1)
            for j in range(n):
                out[j] = ((a ^ (mask + np.uint32(j))) * factor).sum(dtype=np.uint32)
            out[:] = scramble(out)
        elif name == "scatter":
            out, (a,) = self._words(work["out"][0], n), ins
            np.add.at(out, a % np.uint32(n), (a >> np.uint32(8)) ^ salt ^ np.arange(len(a), dtype=np.uint32))
        elif name == "reverse":
            block = work["block"]
            out = self._words(work["out"][0], n).reshape(-1, block)
            more = np.arange(1, block + 1, dtype=np.uint32) * salt + np.uint32(n)
            out[:] = out[:, ::-1] + more
        elif name == "split":
            one, two, (a,) = self._words(work["out"][0], n), self._words(work["out"][1], n), ins
            one[:] = scramble(a[i % np.uint32(len(a))] + salt + i)
            two += one ^ salt
        elif name == "bytes":
            (to, at), (source, begin) = work["out"][0], work["in"][0]
            bytes_out = self.memory[to][at : at + n]
            turned = self.memory[source][begin : begin + n][::-1]
            bytes_out[:] = bytes_out * np.uint8(31) + turned + np.uint8(work["salt"] & 255)
        elif name == "given":
            self._words(work["out"][0], 8)[:] = given(work["salt"])
        else:
            variable = self.memory[f"c{work['ctx']}"].view(np.uint32)
            variable += scramble(salt + np.arange(8, dtype=np.uint32))
            self._words(work["out"][0], 1)[0] = variable[work["salt"] % 8]


def scramble(x: Words) -> Words:
    """As in mixing.h."""
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x2C1B3C6D)
    x = (x ^ (x >> np.uint32(12))) * np.uint32(0x297A2D39)
    return np.asarray(x ^ (x >> np.uint32(15)), np.uint32)


def given(salt: int) -> list[int]:
    """What the kernel of this name makes of its parameters, which runner.py makes of the salt."""
    eight = salt * 0x9E3779B97F4A7C15 & (2**64 - 1)
    other = eight ^ 0x0123456789ABCDEF
    low = 2**32 - 1
    return [salt & 255, salt & 65535, salt, eight & low, eight >> 32, salt >> 3 & 255, salt ^ 0x5A5A5A5A,
            (other & low) ^ (other >> 32)]  # fmt: skip


def pattern(size: int, salt: int) -> bytes:
    """Bytes that look random and are the same everywhere; runner.py has the same."""
    return random.Random(salt).randbytes(size)


def interpret(program: Program) -> list[int]:
    """The checksums of all that the program reads."""
    return Interpreter(program).read
