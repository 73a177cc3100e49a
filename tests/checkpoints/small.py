"""Small programs, each with one thing that CRIU dumps or refuses, and what xmigd.checkpoints.movable says of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from xmigd.checkpoints.movable import Code, processes_of
from xmigd.errors import NotFound

# Its standard output is closed when all is as it is to be.
BEGIN = """
import ctypes, fcntl, mmap, os, select, signal, socket, struct, sys, threading
C = ctypes.CDLL(None, use_errno=True)
C.mmap.restype = C.shmat.restype = ctypes.c_void_p
NAME = f"xmig-test-{os.getpid()}"
NEWTIME, NEWNS, NEWCGROUP, NEWUTS = 0x80, 1 << 17, 1 << 25, 1 << 26
NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 27, 1 << 28, 1 << 29, 1 << 30

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def syscall(*arguments):
    if os.uname().machine != "x86_64":
        raise OSError("these numbers are x86's")
    return checked(C.syscall(*arguments))

def unshare(flags):
    checked(C.unshare(flags))

def mapped(fd, bytes=4096, flags=mmap.MAP_SHARED):
    # Not Python's, which keeps a descriptor.
    address = C.mmap(None, ctypes.c_size_t(bytes), 3, flags, fd, ctypes.c_long(0))
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address

def anonymous(bytes):
    return mapped(-1, bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

def filled(bytes):
    file = open("gone", "w+b")
    file.write(b"x" * bytes)
    file.flush()
    return file

def connected():
    server = socket.create_server(("127.0.0.1", 0))
    return server, socket.create_connection(server.getsockname()), server.accept()[0]

def child(work=lambda: None):
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(0, 1)
        os.close(reads)
        work()
        os.write(writes, b"x")
        os.close(writes)
        while True:
            signal.pause()
    os.close(writes)
    if not os.read(reads, 1):
        raise OSError("its child has ended")
    os.close(reads)
    return pid

"""
END = """
os.dup2(0, 1)
while True:
    signal.pause()
"""
OUTSIDE = "import json; OUT = json.loads(sys.argv[1])\n"


@dataclass(frozen=True)
class Case:
    """`here`: None where that depends on the machine, and only CRIU can say."""

    program: str
    here: frozenset[Code] | None = frozenset()
    elsewhere: frozenset[Code] = frozenset()
    depends: frozenset[Code] = frozenset()
    own_session: bool = True
    certain: bool = True  # CRIU does the same with it on every machine


def here(program: str, *codes: Code, own_session: bool = True) -> Case:
    return Case(program, here=frozenset(codes), own_session=own_session)


def elsewhere(program: str, *codes: Code) -> Case:
    return Case(program, elsewhere=frozenset(codes))


def depends(program: str, *codes: Code) -> Case:
    return Case(program, depends=frozenset(codes))


def machine(program: str) -> Case:
    return Case(program, here=None)


DEVICE = "f = os.open(next(p for p in ('/dev/fuse', '/dev/kvm', '/dev/loop-control') if os.path.exists(p)), os.O_RDWR)"
IO_URING = "fd = syscall(425, 4, ctypes.create_string_buffer(512))"
PERF = """
a = ctypes.create_string_buffer(128)
struct.pack_into('IIQ', a, 0, 1, 128, 0)
fd = syscall(298, a, 0, -1, -1, 0)
"""
BPF = """
a = ctypes.create_string_buffer(128)
struct.pack_into('IIIII', a, 0, 2, 4, 4, 1, 0)
fd = syscall(321, 0, a, 128)
"""
SECCOMP = """
C.prctl(38, 1, 0, 0, 0)
rules = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 1, ctypes.addressof(rules)))
"""
UNIX = "s = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen()\n"
SYSV = "i = checked(C.shmget(0, 4096, 0o1600)); C.shmat(i, None, 0); C.shmctl(i, 0, None)"
SHM = "fd = os.open(f'/dev/shm/{NAME}', os.O_RDWR | os.O_CREAT); os.truncate(fd, 4096); mapped(fd); os.close(fd)"
SEMAPHORE = "C.sem_open(f'/{NAME}'.encode(), os.O_CREAT, 0o600, 1)"

CASES = {
    "plain": Case(""),
    "threads": Case("threading.Thread(target=threading.Event().wait, daemon=True).start()"),
    "children": Case("child(); child(os.setsid)"),
    "zombie": Case("p = os.fork() or os._exit(0); os.waitid(os.P_PID, p, os.WEXITED | os.WNOWAIT)"),
    "stopped": Case("p = child(); os.kill(p, signal.SIGSTOP); os.waitid(os.P_PID, p, os.WSTOPPED | os.WNOWAIT)"),
    "seccomp": Case(SECCOMP + "checked(C.prctl(22, 2, program))"),
    "another user": machine("os.setgid(1000); os.setuid(1000)"),
    "session": here("", "session", own_session=False),
    "traced": here("p = child(); checked(C.ptrace(16, p, 0, 0)); os.waitpid(p, 0x40000000)", "tracer"),
    # Devices
    "memory devices": Case("f = [open(f'/dev/{n}', 'rb') for n in ('null', 'zero', 'full', 'random', 'urandom')]"),
    "mapped /dev/zero": Case("fd = os.open('/dev/zero', os.O_RDWR); mapped(fd); os.close(fd)"),
    "device": here(DEVICE, "device"),
    "block device": here("f = os.open('/dev/loop0', os.O_RDONLY)", "device"),
    "own terminal": Case("m, s = os.openpty(); fcntl.ioctl(s, 0x540E, 0); t = os.open('/dev/tty', os.O_RDWR)"),
    "terminal without a slave": Case("m, s = os.openpty(); os.close(s)"),
    "terminal that was closed": Case("m, s = os.openpty(); os.close(m)"),
    "terminal": here("s = os.open(OUT['terminal'], os.O_RDWR | os.O_NOCTTY)", "terminal"),
    # What has no file
    "eventfd": Case("fd = os.eventfd(3)"),
    "epoll": Case("e = select.epoll(); r = os.eventfd(0); e.register(r, select.EPOLLIN)"),
    "timerfd": Case("fd = checked(C.timerfd_create(1, 0))"),
    "signalfd": Case("fd = checked(C.signalfd(-1, ctypes.create_string_buffer(128), 0))"),
    "aio": Case("syscall(206, 16, ctypes.byref(ctypes.c_ulong(0)))"),
    "io_uring": here(IO_URING, "io_uring"),
    "mapped io_uring": here(IO_URING + "; mapped(fd); os.close(fd)", "io_uring"),
    "perf event": here(PERF, "perf_event"),
    "mapped perf event": here(PERF + "mapped(fd, 8192); os.close(fd)", "perf_event"),
    "userfaultfd": here("fd = syscall(323, 0)", "userfaultfd"),
    "BPF map": here(BPF, "bpf"),
    "seccomp listener": here(SECCOMP + "fd = syscall(317, 1, 8, program)", "descriptor"),
    "inotify": depends("fd = C.inotify_init1(0); checked(C.inotify_add_watch(fd, b'.', 2))", "watch"),
    "inotify in /proc": here("fd = C.inotify_init1(0); checked(C.inotify_add_watch(fd, b'/proc/self', 2))", "watch"),
    "pidfd": Case("p = os.pidfd_open(child()), os.pidfd_open(os.getpid())"),
    "pidfd of another": here("p = os.pidfd_open(os.getppid())", "pidfd"),
    "namespace": Case("fd = os.open('/proc/self/ns/net', os.O_RDONLY)"),
    # Pipes
    "pipe": Case("r, w = os.pipe()"),
    "pipe to a child": Case("r, w = os.pipe(); child(lambda: os.close(r)); os.close(w)"),
    "pipe that was closed": Case("r, w = os.pipe(); os.close(w)"),
    "pipe from outside": elsewhere("r = os.open(OUT['pipe'], os.O_RDONLY | os.O_NONBLOCK)", "pipe"),
    "pipe of packets": here("r, w = os.pipe2(os.O_DIRECT)", "pipe"),
    "FIFO": Case("os.mkfifo('own'); f = os.open('own', os.O_RDWR)"),
    "FIFO from outside": elsewhere("f = os.open(OUT['fifo'], os.O_RDONLY | os.O_NONBLOCK)", "pipe"),
    # Sockets
    "socketpair": Case("a, b = socket.socketpair(); c, d = socket.socketpair(type=socket.SOCK_DGRAM)"),
    "socketpair with a child": Case("a, b = socket.socketpair(); child(a.close); b.close()"),
    "socketpair that was closed": Case("a, b = socket.socketpair(); a.close()"),
    "Unix socket of its own": Case(UNIX + "c = socket.socket(socket.AF_UNIX); c.connect('sock'); d = s.accept()"),
    "Unix connection to be accepted": Case(UNIX + "c = socket.socket(socket.AF_UNIX); c.connect('sock')"),
    "Unix connection closed early": here(UNIX + "socket.socket(socket.AF_UNIX).connect('sock')", "unix_socket"),
    "abstract Unix socket": Case("s = socket.socket(socket.AF_UNIX); s.bind(f'\\0{NAME}'); s.listen()"),
    "Unix connection": here("c = socket.socket(socket.AF_UNIX); c.connect(OUT['unix']); c.recv(1)", "unix_socket"),
    "Unix connection not accepted": elsewhere(
        "c = socket.socket(socket.AF_UNIX); c.connect(OUT['accepts nothing'])", "unix_socket"
    ),
    "Unix datagrams": here("c = socket.socket(socket.AF_UNIX, 2); c.connect(OUT['datagram'])", "unix_socket"),
    "unconnected TCP": Case("c = socket.socket()"),
    "listening TCP": depends("s = socket.create_server(('127.0.0.1', 0))", "address"),
    "listening TCPv6": depends("s = socket.create_server(('::', 0), family=socket.AF_INET6)", "address"),
    "TCP connection": here("c = socket.create_connection(('127.0.0.1', OUT['port']))", "tcp_connection"),
    "own TCP connection": Case("c = connected()", frozenset({"tcp_connection"}), depends=frozenset({"address"})),
    "TCP connection to be accepted": Case(
        "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname())",
        here=frozenset({"tcp_connection"}), depends=frozenset({"address"}),
    ),
    "MPTCP": here("s = socket.socket(proto=262)", "socket"),
    "UDP": depends("s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0))", "address"),
    "netlink": Case("s = socket.socket(16, socket.SOCK_RAW, 0)"),
    "unread netlink": here(
        "s = socket.socket(16, socket.SOCK_RAW, 0); s.send(struct.pack('IHHIIB', 17, 18, 0x301, 1, 0, 0))", "socket"
    ),
    "vsock": here("s = socket.socket(40, socket.SOCK_STREAM)", "socket"),
    # Files
    "deleted file": Case("f = filled(9); os.unlink('gone')"),
    "deleted folder": Case("os.mkdir('d'); d = os.open('d', os.O_RDONLY); os.chdir('d'); os.rmdir('../d')"),
    "large deleted file": here("f = filled(2 << 20); os.unlink('gone')", "file"),
    "large deleted mapped file": here(
        "f = filled(2 << 20); mapped(f.fileno()); f.close(); os.unlink('gone')", "file"
    ),
    "deleted mapped file": Case("f = filled(4096); mapped(f.fileno()); f.close(); os.unlink('gone')"),
    "deleted file with another name": here("f = filled(9); os.link('gone', 'other'); os.unlink('gone')", "file"),
    "replaced file": here("f = filled(9); os.link('gone', 'other'); os.unlink('gone'); open('gone', 'w')", "file"),
    "renamed file": Case("f = filled(9); os.rename('gone', 'other')"),
    "file that is called deleted": Case("f = open('x (deleted)', 'w')"),
    "mapped file that was renamed": Case("f = filled(4096); mapped(f.fileno()); f.close(); os.rename('gone', 'other')"),
    "mapped file with another name": here(
        "f = filled(4096); mapped(f.fileno()); f.close(); os.link('gone', 'other'); os.unlink('gone')", "file"
    ),
    "file of a detached mount": here("fd = syscall(428, -100, b'.', 1)", "file"),
    "file without a name": Case("fd = os.open('.', os.O_TMPFILE | os.O_RDWR)"),
    "file in /proc": Case("f = open('/proc/self/status'), open('/proc/1/status')"),
    "flock": here("f = open('f', 'w'); fcntl.flock(f, fcntl.LOCK_EX)", "lock"),
    "POSIX lock": here("f = open('f', 'w'); fcntl.lockf(f, fcntl.LOCK_EX)", "lock"),
    "lease": here("f = open('f', 'w'); fcntl.fcntl(f, 1024, 1)", "lock"),
    # Memory
    "shared with a child": Case("mapped(-1, 4096, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS); child()"),
    "memfd": Case("fd = os.memfd_create('xmig-test'); os.truncate(fd, 4096); mapped(fd); os.close(fd)"),
    "secret memory": here("fd = syscall(447, 0)", "file"),
    "mapped secret memory": here("fd = syscall(447, 0); os.truncate(fd, 4096); mapped(fd); os.close(fd)", "memory"),
    "shared memory": elsewhere(SHM, "shared_memory"),
    "deleted shared memory": Case(SHM + "; os.unlink(f'/dev/shm/{NAME}')"),
    "semaphore": here(SEMAPHORE, "semaphore"),
    "opened semaphore": elsewhere(
        SEMAPHORE + "\nos.execv(sys.executable, [sys.executable, '-c', f\"\"\"if True:\n"
        "        import ctypes, os, signal\n"
        "        assert ctypes.CDLL(None).sem_open(b'/{NAME}', 0)\n"
        "        os.dup2(0, 1)\n"
        "        while True: signal.pause()\"\"\"])",
        "semaphore",
    ),
    "System V memory": here(SYSV, "sysv_memory"),
    "System V memory of its own": Case(f"unshare(NEWIPC); {SYSV}"),
    "guard pages": machine("checked(C.madvise(ctypes.c_void_p(anonymous(1 << 20)), ctypes.c_size_t(4096), 102))"),
    # Namespaces
    "user namespace": here("unshare(NEWUSER)", "namespace"),
    "mapped user namespace": elsewhere(
        "unshare(NEWUSER); open('/proc/self/setgroups', 'w').write('deny'); "
        "[open(f'/proc/self/{n}_map', 'w').write('0 0 1') for n in ('uid', 'gid')]",
        "namespace",
    ),
    "UTS namespace": Case("unshare(NEWUTS)"),
    "UTS namespace of a child": here("child(lambda: unshare(NEWUTS))", "namespace"),
    "user namespace of a child": here("child(lambda: unshare(NEWUSER))", "namespace"),
    "network namespace of a child": elsewhere("child(lambda: unshare(NEWNET))", "namespace"),
    "mount namespace of a child": Case(
        "child(lambda: unshare(NEWNS))", elsewhere=frozenset({"namespace"}), certain=False
    ),
    "cgroup namespace": Case("unshare(NEWCGROUP)"),
    "cgroup namespace of a child": here("child(lambda: unshare(NEWCGROUP))", "namespace"),
    "PID namespace": here("unshare(NEWPID); child()", "namespace"),
    "time namespace": here("unshare(NEWTIME); child()", "namespace"),
    "network namespace": Case(
        "unshare(NEWNET)", None if shutil.which("iptables-restore") else frozenset({"namespace"})
    ),
    "mount namespace": Case("unshare(NEWNS)", frozenset({"namespace"}), certain=False),
}  # fmt: skip


@contextlib.contextmanager
def running(program: str, folder: Path, *, own_session: bool = True, outside: str = "{}") -> Iterator[int]:
    """The pid of a program that has come to rest. Skips the test where the machine does not let it do what it does."""
    errors = folder / "errors"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-ESc", BEGIN + OUTSIDE + program + END, outside], cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=stderr, start_new_session=own_session,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            process.stdout.read()
            reported = errors.read_text().strip()
            if reported:
                last = reported.splitlines()[-1]
                assert last.split(":")[0] in OS_ERRORS, reported
                pytest.skip(f"not on this machine: {last}")
            yield process.pid
        finally:
            with contextlib.suppress(NotFound):
                for pid in processes_of(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for left in Path("/dev/shm").glob(f"*xmig-test-{process.pid}"):
                left.unlink()


OS_ERRORS = ("OSError", "PermissionError", "FileNotFoundError", "StopIteration")


@contextlib.contextmanager
def things_outside(folder: Path) -> Iterator[dict[str, object]]:
    """What programs may be connected with, none of it theirs."""
    with contextlib.ExitStack() as stack:
        folder.mkdir()
        unix, unaccepting, datagram, fifo = (str(folder / name) for name in ("unix", "unaccepting", "datagram", "fifo"))
        accepting = stack.enter_context(socket.socket(socket.AF_UNIX))
        for each, path in ((accepting, unix), (stack.enter_context(socket.socket(socket.AF_UNIX)), unaccepting)):
            each.bind(path)
            each.listen()
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(datagram)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        os.mkfifo(fifo)
        master, slave = os.openpty()
        descriptors = (*os.pipe(), os.open(fifo, os.O_RDWR), master, slave)
        for number in descriptors:
            stack.callback(os.close, number)

        def accept() -> None:
            with contextlib.suppress(OSError):  # nobody has come
                stack.enter_context(accepting.accept()[0]).send(b"x")

        thread = threading.Thread(target=accept)
        thread.start()
        stack.callback(thread.join)
        stack.callback(accepting.shutdown, socket.SHUT_RDWR)
        yield {
            "unix": unix, "accepts nothing": unaccepting, "datagram": datagram, "fifo": fifo,
            "port": server.getsockname()[1], "terminal": os.ttyname(slave),
            "pipe": f"/proc/{os.getpid()}/fd/{descriptors[0]}",
        }  # fmt: skip
