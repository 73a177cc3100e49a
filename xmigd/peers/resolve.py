"""Names of hosts, looked up where nobody waits for it: the loop's own threads start servers, and a name server that
does not answer would take them one after the other."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading

MOST = 8  # lookups at a time

_running = threading.BoundedSemaphore(MOST)


async def resolve(host: str, port: int) -> list[tuple[str, int]]:
    """Where to connect, in the order of preference. Raises OSError. What nobody waits for any more goes on until it is
    answered, and keeps the daemon from ending no longer than itself."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return [(host, port)]
    except ValueError:
        pass
    if not _running.acquire(blocking=False):
        raise OSError(f"{MOST} names of hosts are being looked up, and nobody answers")
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[tuple[str, int]]] = loop.create_future()

    def report(result: list[tuple[str, int]] | OSError) -> None:
        if found.done():
            return
        if isinstance(result, OSError):
            found.set_exception(result)
        else:
            found.set_result(result)

    def look_up() -> None:
        result: list[tuple[str, int]] | OSError
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            result = [(str(row[4][0]), port) for row in rows]
        except OSError as error:
            result = error
        except UnicodeError:  # of IDNA: an empty label, or one that is too long
            result = OSError(f"{host} is no host's name")
        finally:
            _running.release()
        if not loop.is_closed():
            loop.call_soon_threadsafe(report, result)

    threading.Thread(target=look_up, name="resolve", daemon=True).start()
    return await found
