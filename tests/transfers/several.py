"""A CUDA program that has others do a part of each step: `several.py OUTPUT ADDRESS`. These are: a server,
to which a connection at ADDRESS stays open; two workers of a fork server, with named memory and named semaphores; a
pool of processes; and one that answers at a Unix socket. Each line has what all of them have computed. With a file
`.stop` instead of OUTPUT's suffix it ends after the step that it does."""

import concurrent.futures
import ctypes
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
import time
from ctypes import byref, c_uint64, c_void_p
from multiprocessing import shared_memory
from pathlib import Path

N = 1 << 16
MODULUS = 1_000_003
SERVER = """import socket, sys
listening = socket.create_server((sys.argv[1], 0))
print(listening.getsockname()[1], flush=True)
connection = listening.accept()[0]
with connection.makefile("rwb", buffering=0) as lines:
    for line in lines:
        lines.write(b"%d\\n" % pow(7, int(line), 1_000_003))
"""


def counted(name: str, step: int) -> int:
    """In memory that has a name, which others have seen before."""
    memory = shared_memory.SharedMemory(name)
    assert memory.buf is not None
    (before,) = struct.unpack_from("<Q", memory.buf)
    struct.pack_into("<Q", memory.buf, 0, before + step)
    memory.close()
    return int(before + step)


def power(step: int) -> int:
    return pow(3, step, MODULUS)


def answers(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        connection = listening.accept()[0]
    while data := connection.recv(8):
        connection.send(struct.pack("<Q", struct.unpack("<Q", data)[0] * 5 % MODULUS))


def call(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    if code := getattr(cuda, name)(*(c_uint64(a) if isinstance(a, int) else a for a in arguments)):
        raise SystemExit(f"{name} returned {code}")


def connected(address: str) -> tuple[subprocess.Popen[str], socket.socket]:
    server = subprocess.Popen([sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, socket.create_connection((address, int(server.stdout.readline())))


def main() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    output, address = open(sys.argv[1], "a"), sys.argv[2]  # noqa: SIM115
    stop, path = Path(sys.argv[1]).with_suffix(".stop"), f"{sys.argv[1]}.sock"
    processes = multiprocessing.get_context("forkserver")
    memory = shared_memory.SharedMemory(create=True, size=64)
    server, connection = connected(address)
    lines = connection.makefile("rwb", buffering=0)
    answering = multiprocessing.get_context("fork").Process(target=answers, args=(path,))
    answering.start()
    unix = socket.socket(socket.AF_UNIX)
    while unix.connect_ex(path):
        time.sleep(0.01)
    context, device = c_void_p(), c_uint64()
    call(cuda, "cuInit", 0)
    call(cuda, "cuDevicePrimaryCtxRetain", byref(context), 0)
    call(cuda, "cuCtxSetCurrent", context)
    call(cuda, "cuMemAlloc_v2", byref(device), 4 * N)
    call(cuda, "cuMemsetD32_v2", device.value, 1, N)
    content = (ctypes.c_uint32 * N)()
    with processes.Pool(2) as workers, concurrent.futures.ProcessPoolExecutor(2) as pool:
        for step in range(1_000_000):
            call(cuda, "cuMemcpyDtoH_v2", content, device.value, 4 * N)
            call(cuda, "cuMemsetD32_v2", device.value, (content[N - 1] * 3 + step) % MODULUS, N)
            lines.write(b"%d\n" % step)
            unix.send(struct.pack("<Q", step))
            parts = [
                content[0], content[N - 1], int(lines.readline()), struct.unpack("<Q", unix.recv(8))[0],
                workers.apply(counted, (memory.name, step)), pool.submit(power, step).result(),
            ]  # fmt: skip
            print(step, *parts, file=output, flush=True)
            time.sleep(0.01)
            if stop.exists():
                break
    for each in (lines, connection, unix):
        each.close()
    memory.unlink()
    answering.join()
    Path(f"{sys.argv[1]}.codes").write_text(f"{server.wait()} {answering.exitcode} {os.getpid()}")


if __name__ == "__main__":
    main()
