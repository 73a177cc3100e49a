"""`pump.py CONNECTION PAIR IDENTITY CERTIFICATE`: the end of TLS of one connection, in a process of its own
(docs/decisions/0097). What comes on CONNECTION goes to PAIR as it is meant, in large parts, and back. Both are numbers
of sockets. Only who has the key of CERTIFICATE (PEM) is served.

Nothing but the standard library is imported: it is started while somebody waits.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import sys

STEP = 5.0  # seconds for TLS to begin
ROOM = 1 << 20  # bytes that go on at once
ANSWERS = 1 << 16


def main() -> int:
    connection, pair = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # a session that is resumed would show no certificate
    context.load_cert_chain(sys.argv[3])
    context.load_verify_locations(cadata=sys.argv[4])
    try:
        connection.settimeout(STEP)
        with context.wrap_socket(connection, server_side=True) as tls, pair:
            if tls.getpeercert(binary_form=True) != ssl.PEM_cert_to_DER_cert(sys.argv[4]):
                return 1
            pass_on(tls, pair)
    except OSError:  # whoever is behind one of them is gone: the other one hears of it
        return 1
    return 0


def pass_on(tls: ssl.SSLSocket, pair: socket.socket) -> None:
    """Until one of them ends. Raises OSError."""
    room = memoryview(bytearray(ROOM))
    while True:
        ready = [tls] if tls.pending() else select.select([tls, pair], [], [])[0]
        if pair in ready:
            answers = pair.recv(ANSWERS)
            if not answers:
                return
            tls.settimeout(None)
            tls.sendall(answers)
        if tls in ready:
            tls.settimeout(0)
            at, ended = 0, False
            with contextlib.suppress(ssl.SSLWantReadError):
                while at < ROOM and not ended:
                    count = tls.recv_into(room[at:])
                    at, ended = at + count, count == 0
            pair.sendall(room[:at])
            if ended:
                return


if __name__ == "__main__":
    sys.exit(main())
