"""One connection: bytes in and out, how fast, and when it counts as lost. What frames mean, `link` knows."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import Protocol, cast

from xmigd import log
from xmigd.errors import ProtocolError
from xmigd.peers.frames import HEADER, Frame, FrameReader, Kind, frame
from xmigd.text import harmless

HEARTBEAT = 1.0  # seconds
# Of a node's links, in a second: each takes a quarter of a millisecond. With more links than that, each has a heartbeat
# more rarely. Then it is TCP that notices soon that a machine is gone.
HEARTBEATS = 64
LONGEST_HEARTBEAT = 16.0  # seconds
# Heartbeats: shorter than anything that waits for a peer, longer than a loop of the daemon is ever busy. One or two
# that are late are not missed.
SILENCE = 5
KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4))
GIVEN_UP = 10_000  # ms after which what was sent and not received is a lost connection
STEP = 5.0  # seconds for connecting with TLS, and as many for beginning the session
CLOSING = 1.0  # seconds for sending the reason of an end
# What a peer may send on average, with a second's worth at once: a third of a processor for reading JSON.
FRAMES_A_SECOND = 20_000
BYTES_A_SECOND = 64 << 20
AT_ONCE = 64  # frames between two turns of the loop, which recovers programs, too

logger = log.get("peers")


class Pace:
    """How fast a peer may send. It is slowed down, not refused: who sends more waits as for a slow network."""

    def __init__(self) -> None:
        self._used_until = 0.0

    def take(self, length: int, now: float) -> float:
        """Of a frame of this length: after how many seconds the next one is read."""
        cost = max(1 / FRAMES_A_SECOND, length / BYTES_A_SECOND)
        self._used_until = max(self._used_until, now - 1.0) + cost
        return max(0.0, self._used_until - now)


class Reader(Protocol):
    """Who knows what frames mean."""

    pace: Pace

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Raises ProtocolError: the connection ends."""

    def on_read(self, connection: Connection) -> None:
        """Frames were read, and there are no more for now."""

    def on_room(self, connection: Connection) -> None:
        """It can be written again."""

    def on_beat(self, connection: Connection) -> None:
        """A heartbeat is due."""

    def on_closed(self, connection: Connection) -> None:
        """It is closed. In a turn of its own, never inside another call."""


class Connection(asyncio.Protocol):
    """Over TLS. It reads nothing before `start`, when it is known who is there."""

    def __init__(self, *, outgoing: bool) -> None:
        self.outgoing = outgoing  # this node connected
        self.established = False  # messages may come and go; set by its reader
        self.greeted = False  # the peer has sent its hello; set by its reader
        self.offer: str | None = None  # the session that was proposed over it
        self.heartbeat = HEARTBEAT  # seconds between two
        self.cursor = 0  # the last message that was written
        self.reported = 0  # how many received messages were reported
        self.closed = False
        self.why = ""
        self.refused = False  # closed because one of both does not accept the other
        self.over = asyncio.Event()
        self.can_write = True
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._frames = FrameReader()
        self._continued: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began = self._ticked = self._heard = self._loop.time()

    def start(self, reader: Reader) -> None:
        """From now on its frames are read."""
        self._reader = reader
        if self.closed:
            self._loop.call_soon(reader.on_closed, self)
            return
        assert self._transport is not None
        self._began = self._ticked = self._heard = self._loop.time()
        self._timer = self._loop.call_later(HEARTBEAT, self._tick)
        self._transport.resume_reading()

    def beats_each(self, seconds: float) -> None:
        """Which both nodes have agreed on."""
        self.heartbeat = seconds
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        if seconds > HEARTBEAT and sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (*KEEPALIVE, (socket.TCP_USER_TIMEOUT, GIVEN_UP)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def certificate(self) -> bytes:
        """Of the peer, as DER. Empty: there is none any more."""
        assert self._transport is not None
        tls = self._transport.get_extra_info("ssl_object")
        return cast(bytes, tls.getpeercert(binary_form=True) or b"") if tls is not None else b""

    def write(self, data: bytes) -> None:
        if not self.closed and self._transport is not None:
            self._transport.write(data)

    def end(self, why: str, *, report: str = "", refused: bool = False) -> None:
        """Close it. `report`: what the peer is sent as the reason; without, nothing is sent that still waits."""
        if self.closed:
            return
        assert self._transport is not None
        if report:
            self._transport.write(frame(Kind.END, 0, {"why": report[:1000]}))
            self._transport.close()
        else:
            self._transport.abort()
        self._is_closed(why, refused)

    def give_up(self) -> None:
        """Of one that was perhaps never made: nobody will use it."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.closed:
            return
        if error is None and not self.greeted and self.outgoing:
            # A server that does not accept a certificate closes; Python's sends no alert before that.
            self._is_closed("it accepts no connection of this node: it may not know its fingerprint", True)
        elif error is None:
            self._is_closed("it closed the connection", False)
        else:
            self._is_closed(*describe(error))

    def pause_writing(self) -> None:
        self.can_write = False

    def resume_writing(self) -> None:
        self.can_write = True
        if not self.closed and self._reader is not None:
            self._reader.on_room(self)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        self._heard = self._loop.time()
        self._frames.feed(data)
        if self._continued is None and self._reader is not None:
            self._read()

    def _read(self) -> None:
        assert self._reader is not None
        assert self._transport is not None
        self._continued = None
        wait: float | None = 0.0
        try:
            for _ in range(AT_ONCE):
                arrived = self._frames.next(messages=self.established)
                if arrived is None:
                    wait = None
                    break
                wait = self._reader.pace.take(HEADER.size + len(arrived.content), self._loop.time())
                self._reader.on_frame(self, arrived)
                if self.closed:
                    return
                if wait:
                    break
        except ProtocolError as error:
            self.end(f"it sent what is not allowed: {error.message}", report=error.message)
            return
        except Exception:
            logger.exception("a frame of a peer could not be handled")
            self.end("what it sent could not be handled", report="the daemon failed; its log says why")
            return
        self._reader.on_read(self)
        if wait is None:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
            self._continued = self._loop.call_later(wait, self._read)

    def _tick(self) -> None:
        assert self._reader is not None
        now = self._loop.time()
        if now - self._ticked > 2 * self.heartbeat or self._continued is not None:
            self._heard = now  # it was this daemon that stood still, or reads more slowly than the peer sends
        self._ticked = now
        if now - self._heard >= SILENCE * self.heartbeat:
            self.end(f"it was silent for {SILENCE * self.heartbeat:g} s")
        elif not self.established and now - self._began >= STEP:
            self.end(f"it began no session within {STEP:g} s")
        else:
            self._reader.on_beat(self)
            if not self.closed:
                # Until the session begins a tick looks whether it does in time.
                self._timer = self._loop.call_later(self.heartbeat if self.established else HEARTBEAT, self._tick)

    def _is_closed(self, why: str, refused: bool) -> None:
        self.closed, self.why, self.refused = True, harmless(why), refused
        self.established = False
        self.over.set()
        for handle in (self._timer, self._continued):
            if handle is not None:
                handle.cancel()
        if self._reader is not None:
            self._loop.call_soon(self._reader.on_closed, self)


def describe(error: BaseException) -> tuple[str, bool]:
    """Why there is no connection, and whether one of both does not accept the other."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not the known one ({error.verify_message})", True
        case ssl.SSLError(reason=str(reason)) if "ALERT" in reason:
            return f"it refuses this node's certificate ({reason})", True
        case ssl.SSLError(reason=reason):
            if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
                return "it showed no certificate", True
            return f"TLS failed ({reason})", False
        case TimeoutError() if not error.strerror:
            return f"no answer within {STEP:g} s", False
        case OSError(errno=int(number)) if number > 0:
            return os.strerror(number), False
        case OSError(strerror=str(why)):  # of names of hosts
            return why, False
    return str(error) or type(error).__name__, False
