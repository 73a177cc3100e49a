"""To call a peer: one request and its answer, or many pieces over several connections at once."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from xmigd.checkpoints.content import Writing
from xmigd.checkpoints.manifest import Chunk
from xmigd.errors import Conflict, NotFound, ProtocolError, TooManyRequests, Unavailable, XmigError
from xmigd.peers.certificates import fingerprint_of, server_name
from xmigd.peers.known import KnownPeer, split_address
from xmigd.peers.links import PeerLinks
from xmigd.text import harmless
from xmigd.transfers.wire import PREFIX, STEP, Closing, Line, lost, prepare

STREAMS = 8  # connections at once
WINDOW = 4  # pieces on one connection that were sent and not acknowledged
HASHES = 1 << 15  # that are compared with one request

Sent = Callable[[int], None]  # bytes of content that the peer has by now, of those that it lacked


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
    ) -> tuple[dict[str, Any], bytes]:
        """The same, with what comes behind the answer."""
        with self._line(self.check_known(peer), closing) as line:
            answer, more = line.call(body, payload)
            return answered(peer, answer), more

    def send_content(
        self, peer: str, transfer: str, writing: Writing, pieces: Sequence[Chunk], sent: Sent, closing: Closing
    ) -> int:
        """Those of these pieces that the peer lacks. Returns their bytes. Blocks, until `closing` ends it. Raises as
        `call`, and Damaged."""
        known = self.check_known(peer)
        different = list({piece.hash: piece for piece in pieces}.values())
        lacking: list[Chunk] = []
        with self._line(known, closing) as line:
            for at in range(0, len(different), HASHES):
                some = different[at : at + HASHES]
                hashes = b"".join(bytes.fromhex(piece.hash) for piece in some)
                answer, bits = line.call({"op": "lacking", "transfer": transfer}, hashes)
                answered(peer, answer)
                if len(bits) != len(some):
                    raise ProtocolError(f"{peer} does not say which pieces it lacks")
                lacking += [piece for piece, bit in zip(some, bits, strict=True) if bit]
        total, lock, failed = 0, threading.Lock(), threading.Event()
        waiting = iter(lacking)

        def next_piece() -> Chunk | None:
            with lock:
                return None if failed.is_set() else next(waiting, None)

        def acknowledged(line: Line, piece: Chunk) -> None:
            nonlocal total
            answered(peer, line.answer()[0])
            with lock:
                total += piece.bytes
                sent(total)

        def stream() -> None:
            try:
                with self._line(known, closing) as line:
                    under_way: list[Chunk] = []
                    while (piece := next_piece()) is not None:
                        body = {"op": "piece", "transfer": transfer, "hash": piece.hash, "bytes": piece.bytes}
                        line.send(body, writing.encoded(piece.hash, piece.bytes))
                        under_way.append(piece)
                        if len(under_way) >= WINDOW:
                            acknowledged(line, under_way.pop(0))
                    for piece in under_way:
                        acknowledged(line, piece)
            except BaseException:
                failed.set()
                raise

        if lacking:
            count = min(STREAMS, len(lacking))
            with ThreadPoolExecutor(count) as pool:
                for done in [pool.submit(stream) for _ in range(count)]:
                    done.result()
        return total

    @contextlib.contextmanager
    def _line(self, peer: KnownPeer, closing: Closing) -> Iterator[Line]:
        """To the peer and nobody else. Raises Unavailable."""
        with contextlib.ExitStack() as stack:
            try:
                sock = stack.enter_context(socket.create_connection(split_address(peer.address), STEP))
                stack.enter_context(closing.of(sock))
                prepare(sock)
                sock.sendall(PREFIX)
                wrapped = stack.enter_context(
                    self._links.trust.client.wrap_socket(sock, server_hostname=server_name(self._links.node))
                )  # fmt: skip
            except OSError as error:
                raise lost(error) from None
            if fingerprint_of(wrapped.getpeercert(binary_form=True) or b"") != peer.fingerprint:
                raise Unavailable(f"{peer.name} has another certificate", code="peer_unreachable")
            yield Line(wrapped)


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
