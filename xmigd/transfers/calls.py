"""To call a peer: one request and its answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from typing import Any

from xmigd.errors import Conflict, NotFound, ProtocolError, TooManyRequests, Unavailable, XmigError
from xmigd.peers.certificates import fingerprint_of, server_name
from xmigd.peers.known import KnownPeer, split_address
from xmigd.peers.links import PeerLinks
from xmigd.text import harmless
from xmigd.transfers.wire import PREFIX, STALL, STEP, Closing, Line, Payload, lost, prepare


class Calls:
    """Of one node. Every thread may use it."""

    def __init__(self, links: PeerLinks) -> None:
        self._links = links

    def peers(self) -> list[str]:
        return [link.peer.name for link in self._links.links()]

    def check_known(self, peer: str) -> KnownPeer:
        """Raises NotFound, Unavailable."""
        found = self._links.peer(peer)
        if found is None:
            raise NotFound(f"there is no peer {peer[:64]!r}", hint="xmigctl peer list lists them")
        if found.certificate is None:
            raise Unavailable(f"{peer} was never connected", code="peer_unreachable", hint="xmigctl peer list says why")
        return found

    async def call(self, peer: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises NotFound, Unavailable: whether the peer has done it is not known then; or what the peer answered."""
        return await asyncio.to_thread(self.request, peer, body, Closing())

    def request(self, peer: str, body: dict[str, Any], closing: Closing, payload: bytes = b"") -> dict[str, Any]:
        """Blocks, until `closing` ends it. Raises as `call`."""
        return self.exchange(peer, body, closing, payload)[0]

    def exchange(
        self, peer: str, body: dict[str, Any], closing: Closing, payload: bytes = b""
    ) -> tuple[dict[str, Any], Payload]:
        """The same, with what comes behind the answer."""
        with self.line(peer, closing) as line:
            answer, more = line.call(body, payload)
            return answered(peer, answer), more

    @contextlib.contextmanager
    def line(self, peer: str, closing: Closing) -> Iterator[Line]:
        """As `connect`, until the caller is done with it."""
        line = self.connect(peer, closing)
        with contextlib.closing(line), closing.of(line.sock):
            yield line

    def connect(self, peer: str, closing: Closing, first: bytes = PREFIX) -> Line:
        """To the peer and nobody else; `first`: what it is. Raises NotFound, Unavailable."""
        known = self.check_known(peer)
        with contextlib.ExitStack() as stack:
            try:
                sock = stack.enter_context(socket.create_connection(split_address(known.address), STEP))
                stack.enter_context(closing.of(sock))
                prepare(sock)
                sock.sendall(first)
                if first != PREFIX:
                    sock.settimeout(STALL)  # a process has to start there
                wrapped = self._links.trust.client.wrap_socket(sock, server_hostname=server_name(self._links.node))
            except OSError as error:
                raise lost(error) from None
            line = Line(wrapped)
            if fingerprint_of(wrapped.getpeercert(binary_form=True) or b"") != known.fingerprint:
                line.close()
                raise Unavailable(f"{peer} has another certificate", code="peer_unreachable")
            return line


def answered(peer: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Raises what the peer refused with, as far as it may say that."""
    problem = answer.get("problem")
    if problem is None:
        return answer
    if not isinstance(problem, dict):
        raise ProtocolError(f"{peer} answers what is no answer")
    code, text, hint = (harmless(str(problem.get(name, "")), 500) for name in ("code", "detail", "hint"))
    if problem.get("status") in (Unavailable.status, TooManyRequests.status):
        raise Unavailable(f"{peer}: {text}", code=_code(code), hint=hint)
    raise Conflict(f"{peer}: {text}", code=_code(code), hint=hint)


def _code(code: str) -> str | None:
    return code if re.fullmatch(r"[a-z_]{1,40}", code) else None  # that of the class, then


def as_answer(error: XmigError) -> dict[str, Any]:
    return {
        "problem": {"status": error.status, "code": error.code, "detail": error.message[:500], "hint": error.hint[:500]}
    }
