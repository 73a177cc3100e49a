"""Pieces of content go to a peer, over several connections at once, which stay for as long as a transfer lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from xmigd.checkpoints.content import PIECE, Writing
from xmigd.checkpoints.manifest import Chunk
from xmigd.errors import ProtocolError
from xmigd.transfers.calls import Calls, answered
from xmigd.transfers.wire import BULK, PREFIX, STALL, Closing, Line

STREAMS = 8  # connections at once
WINDOW = 4  # pieces on one connection that were sent and not acknowledged
WORTHWHILE = 16  # pieces for which another connection is made
HASHES = 1 << 15  # that are compared with one request

Sent = Callable[[int], None]  # bytes of content that the peer has by now, of those that it lacked


class Streams:
    """Of one transfer. One thread at a time sends."""

    def __init__(self, calls: Calls, peer: str, transfer: str) -> None:
        self.apart = False  # has the peer a process for each of them?
        self._calls = calls
        self._peer = peer
        self._transfer = transfer
        self._lines: dict[int, tuple[Line, float]] = {}  # with when they were used last

    def close(self) -> None:
        for number in list(self._lines):
            self._drop(number)

    def send(self, writing: Writing, pieces: Sequence[Chunk], sent: Sent, closing: Closing) -> int:
        """Those of these pieces that the peer lacks. Returns their bytes. Blocks, until `closing` ends it. Raises
        NotFound, Unavailable: what has come is not known then; what the peer answered; Damaged."""
        waiting = iter(lacking := self._lacking(pieces, closing))
        total, lock, failed = 0, threading.Lock(), threading.Event()

        def next_piece() -> Chunk | None:
            with lock:
                return None if failed.is_set() else next(waiting, None)

        def acknowledged(line: Line, piece: Chunk) -> None:
            nonlocal total
            answered(self._peer, line.answer()[0])
            with lock:
                total += piece.bytes
                sent(total)

        def stream(number: int) -> None:
            try:
                line = self._line(number, closing)
                with closing.of(line.sock):
                    under_way: list[Chunk] = []
                    buffer = bytearray(PIECE)
                    while (piece := next_piece()) is not None:
                        body = {"op": "piece", "transfer": self._transfer, "hash": piece.hash, "bytes": piece.bytes}
                        line.send(body, *writing.encoded(piece.hash, piece.bytes, buffer))
                        under_way.append(piece)
                        if len(under_way) >= WINDOW:
                            acknowledged(line, under_way.pop(0))
                    for piece in under_way:
                        acknowledged(line, piece)
                self._lines[number] = line, time.monotonic()
            except BaseException:
                failed.set()
                self._drop(number)
                raise

        if lacking:
            count = min(STREAMS, 1 + len(lacking) // WORTHWHILE)
            with ThreadPoolExecutor(count) as pool:
                for done in [pool.submit(stream, number) for number in range(count)]:
                    done.result()
        return total

    def _lacking(self, pieces: Sequence[Chunk], closing: Closing) -> list[Chunk]:
        different = list({piece.hash: piece for piece in pieces}.values())
        lacking: list[Chunk] = []
        with self._calls.line(self._peer, closing) as line:
            for at in range(0, len(different), HASHES):
                some = different[at : at + HASHES]
                hashes = b"".join(bytes.fromhex(piece.hash) for piece in some)
                answer, bits = line.call({"op": "lacking", "transfer": self._transfer}, hashes)
                answered(self._peer, answer)
                if len(bits) != len(some):
                    raise ProtocolError(f"{self._peer} does not say which pieces it lacks")
                lacking += [piece for piece, bit in zip(some, bits, strict=True) if bit]
        return lacking

    def _line(self, number: int, closing: Closing) -> Line:
        """The peer ends one on which nothing comes for a while."""
        line, used = self._lines.get(number, (None, 0.0))
        if line is None or time.monotonic() - used > STALL / 2:
            self._drop(number)
            first = BULK + self._transfer.encode() if self.apart else PREFIX
            line = self._calls.connect(self._peer, closing, first)
            self._lines[number] = line, time.monotonic()
        return line

    def _drop(self, number: int) -> None:
        line, _ = self._lines.pop(number, (None, 0.0))
        if line is not None:
            line.close()
