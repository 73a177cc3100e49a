"""What a server prints, read through a pipe: a line of the daemon's log for each of its lines.

A server works as its program's user, who can write into the pipe, too (pidfd_getfd(2)): as much and whatever they like.
- The daemon holds the reading end alone, with an open file of its own: nobody makes its reads wait.
- A line is at most `MAX_LINE` bytes and comes escaped: it stays one line, and paints no terminal.
- Beyond `RATE` lines a second, lines are counted and not reported. Who floods is read slowly.
- The writing end never waits (O_NONBLOCK): a server that prints into a full pipe loses that, not its time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from xmigd.ipc.fds import Fd

MAX_LINE = 1000  # bytes
RATE = 20.0  # lines a second, on average
BURST = 200.0  # lines at once
CHUNK = 64 << 10  # bytes of one read: all that a pipe holds
PAUSE = 0.1  # seconds between two reads of a pipe that was full
MOST_AT_THE_END = 16 * CHUNK  # bytes that are read of a server that has ended: others may still write


def escaped(line: bytes) -> str:
    """Printable characters as they are; control characters (C0, C1), those that change the direction of text, and bytes
    that are no UTF-8 as escapes."""
    text = line.decode("utf-8", errors="backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class Lines:
    """Bytes in, lines out: as many and as long ones as are reported. No I/O."""

    def __init__(self, now: float) -> None:
        self.dropped = 0  # lines that were not reported since somebody took the count
        self._tokens = BURST
        self._since = now
        self._begun = b""  # of the last line, as far as it has come
        self._too_long = False  # the last line has been reported as far as it is; what follows of it is not

    def take(self, data: bytes, now: float) -> list[str]:
        """The lines that are complete with `data`, and may be reported at `now` (seconds)."""
        self._tokens = min(BURST, self._tokens + (now - self._since) * RATE)
        self._since = now
        found: list[str] = []
        rest = self._begun + data
        while rest:
            if self._tokens < 1:
                # Counted, not divided into pieces: it may be all of a flood.
                self.dropped += rest.count(b"\n") - (1 if self._too_long and b"\n" in rest else 0)
                self._too_long = self._too_long and b"\n" not in rest
                rest = rest.rpartition(b"\n")[2]
                break
            end = rest.find(b"\n", 0, MAX_LINE + 1)
            if self._too_long:
                end = rest.find(b"\n")
                rest = b"" if end < 0 else rest[end + 1 :]
                self._too_long = end < 0
            elif end >= 0:
                self._add(found, rest[:end])
                rest = rest[end + 1 :]
            elif len(rest) > MAX_LINE:
                self._add(found, rest[:MAX_LINE], more=True)
                rest = rest[MAX_LINE:]
                self._too_long = True
            else:
                break
        self._begun = rest[: MAX_LINE + 1]
        return found

    def end(self, now: float) -> list[str]:
        """There comes no more: the last line may have no end."""
        return self.take(b"\n", now) if self._begun and not self._too_long else []

    def _add(self, found: list[str], line: bytes, *, more: bool = False) -> None:
        if line.strip():
            self._tokens -= 1
            found.append(escaped(line) + ("..." if more else ""))


class Output:
    """The reading end of one server's pipe."""

    def __init__(self, reading: Fd, report: Callable[[str, int], None]) -> None:
        """`report`: a line, and how many before it were dropped. It may be empty, with the count alone."""
        self._loop = asyncio.get_running_loop()
        self._report = report
        self._fd: Fd | None = reading
        self._timer: asyncio.TimerHandle | None = None  # until it is read again
        self._telling: asyncio.TimerHandle | None = None  # until it is logged how many lines were dropped
        self._lines = Lines(self._loop.time())
        os.set_blocking(reading.fileno(), False)
        self._loop.add_reader(reading.fileno(), self._readable)

    @classmethod
    def make(cls, report: Callable[[str, int], None]) -> tuple[Output, Fd]:
        """A new pipe, and the end that its server gets. Raises OSError."""
        reading, writing = map(Fd, os.pipe())
        os.set_blocking(writing.fileno(), False)
        return cls(reading, report), writing

    def close(self) -> None:
        """Read what is there still, and no more. Its server has ended, or the daemon leaves."""
        read = 0
        while read < MOST_AT_THE_END and (data := self._read()):
            read += len(data)
            self._take(self._lines.take(data, self._loop.time()))
        self._take(self._lines.end(self._loop.time()))
        self._tell()
        self._stop()

    def _readable(self) -> None:
        data = self._read()
        if data is None:
            return
        if not data:  # nobody has the other end any more
            self.close()
            return
        self._take(self._lines.take(data, self._loop.time()))
        if len(data) == CHUNK and self._fd is not None:
            self._loop.remove_reader(self._fd.fileno())
            self._timer = self._loop.call_later(PAUSE, self._again)

    def _again(self) -> None:
        self._timer = None
        if self._fd is not None:
            self._loop.add_reader(self._fd.fileno(), self._readable)

    def _read(self) -> bytes | None:
        """None: nothing is there now."""
        if self._fd is None:
            return b""
        try:
            return os.read(self._fd.fileno(), CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            self._report(line, 0)
        if self._lines.dropped and self._telling is None:
            self._telling = self._loop.call_later(1, self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        dropped, self._lines.dropped = self._lines.dropped, 0
        if dropped:
            self._report("", dropped)

    def _stop(self) -> None:
        fd, self._fd = self._fd, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if fd is not None:
            self._loop.remove_reader(fd.fileno())
            fd.close()
