"""Programs on two nodes with a connection between them: `connected.py OUTPUT ADDRESS PORT`; the one with ADDRESS `-`
listens. Each sends the other numbers in turn, as fast as it can, and reads more slowly: so all queues are full. Each
number goes through device memory. A line of OUTPUT says up to which number everything has come, each once and in order.
With a file `go` beside OUTPUT they stop to send, read all, and say how many numbers were sent and have come. A third
argument is the address of somebody else, who is connected, too."""

import ctypes
import socket
import sys
import threading
import time
from array import array
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path

CUDA = ctypes.CDLL("libcuda.so.1")
N = 8192  # numbers at a time


def call(name: str, *arguments: object) -> None:
    if code := getattr(CUDA, name)(*(c_uint64(a) if isinstance(a, int) else a for a in arguments)):
        raise SystemExit(f"{name} returned {code}")


output, address, port = open(sys.argv[1], "a"), sys.argv[2], int(sys.argv[3])  # noqa: SIM115
go = Path(sys.argv[1]).parent / "go"
context, memory = c_void_p(), c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", byref(memory), 8 * N)
if address == "-":
    with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        connection, _ = listening.accept()
else:
    connection = socket.create_connection((address, port))
others = [socket.create_connection((sys.argv[4], port + 1))] if sys.argv[4:] else []
sent = 0


def send() -> None:
    global sent
    while not go.exists():
        connection.sendall(array("Q", range(sent, sent + N)).tobytes())
        sent += N
    connection.shutdown(socket.SHUT_WR)


sending = threading.Thread(target=send)
sending.start()
came, rest, back = 0, b"", bytearray(8 * N)
while content := connection.recv(8 * N):
    content = rest + content
    whole = len(content) & ~7
    rest = content[whole:]
    host = (ctypes.c_char * len(back)).from_buffer(back)
    call("cuMemcpyHtoD_v2", memory.value, ctypes.c_char_p(content), whole)
    call("cuMemcpyDtoH_v2", host, memory.value, whole)
    numbers = array("Q", bytes(back[:whole]))
    if numbers != array("Q", range(came, came + len(numbers))):
        raise SystemExit(f"after {came} came {numbers[:3]}")
    came += len(numbers)
    print(came, file=output, flush=True)
    time.sleep(0.002)
sending.join()
print("sent", sent, "came", came, file=output, flush=True)
