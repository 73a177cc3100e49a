"""Xids in the kernel's log: the driver writes each of them there, also of a GPU of which NVML sends no events."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path

from xmigd import log

logger = log.get("health")

# NVRM: Xid (PCI:0000:65:00): 79, pid=1234, name=python3, GPU has fallen off the bus.
XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})[^)]*\): (\d{1,4})\b")
LONGEST = 8192  # bytes of a record, as the kernel has it


def parse(record: str) -> tuple[str, int] | None:
    """The device's place on the bus, as `00000000:65:00`, and the Xid."""
    found = XID.search(record)
    if found is None:
        return None
    domain, rest = found[1].split(":", 1)
    return f"{int(domain, 16):08x}:{rest.lower()}", int(found[2])


class KernelLog:
    """Of what is written from now on. Lives in the event loop's thread."""

    def __init__(self, path: Path, found: Callable[[str, int], None]) -> None:
        self._found = found
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if path == Path("/dev/kmsg"):
                os.lseek(self._fd, 0, os.SEEK_END)
            self._loop.add_reader(self._fd, self._read)
        except OSError as error:
            self.close()
            logger.info("the kernel's log is not read for Xids", path=str(path), why=error.strerror)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        """One record of the kernel, or several lines of a pipe."""
        try:
            data = os.read(self._fd, LONGEST)
        except BlockingIOError:
            return
        except BrokenPipeError:  # of /dev/kmsg: records were overwritten before they were read
            return
        except OSError as error:
            logger.warning("the kernel's log is not read any more", why=error.strerror)
            self.close()
            return
        if not data:
            self.close()
            return
        for line in data.decode(errors="replace").splitlines():
            found = parse(line)
            if found is not None:
                self._found(*found)
