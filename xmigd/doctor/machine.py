"""The machine: kernel, limits, memory, who may look into whom, the service manager."""

from __future__ import annotations

import re
from collections.abc import Iterator

from xmigd.doctor.system import Finding, State, System
from xmigd.settings import Settings

KERNEL = (5, 14)  # MADV_POPULATE_WRITE; pidfds are older
GRANULE = 2 << 20  # device memory of one descriptor
OTHER_DESCRIPTORS = 4096  # of the daemon: sockets, journals, pidfds, images
SHM = 1 << 30  # what loaders of frameworks with several workers use, about
GIB = 1 << 30
SMALL, LARGE = 16 * GIB, 141 * GIB  # device memory: of some cpu devices, of one large GPU
MORE_DESCRIPTORS = "LimitNOFILE=1048576 in the unit, or ulimit -Hn 1048576"


def kernel(system: System, settings: Settings) -> Iterator[Finding]:
    """Is the kernel new enough, and are memfds and pidfds allowed here?"""
    release = system.kernel()
    numbers = re.match(r"(\d+)\.(\d+)", release)
    wanted = ".".join(map(str, KERNEL))
    if numbers is None or (int(numbers[1]), int(numbers[2])) < KERNEL:
        yield Finding("kernel", "failing", f"Linux {release} is older than {wanted}",
                      f"boot a kernel {wanted} or newer (openEuler 24.03 has 6.6)")  # fmt: skip
    elif why := system.try_memfd():
        yield Finding("kernel", "failing", f"Linux {release}, but memfd_create or pidfd_open is refused: {why}",
                      "a container's seccomp profile forbids it: allow memfd_create and pidfd_open")  # fmt: skip
    else:
        yield Finding("kernel", "ok", f"Linux {release}, with memfds and pidfds")


def descriptors(system: System, settings: Settings) -> Iterator[Finding]:
    """Each 2 MiB of device memory is a descriptor of the daemon and of a server."""
    limit = system.limit("NOFILE")
    if limit is None:
        yield Finding("open files", "ok", "no limit")
        return
    room = max(0, limit - OTHER_DESCRIPTORS) * GRANULE
    gpus = sum(name.startswith("cuda") for name in settings.device_names)
    reported = f"{limit} descriptors hold {room / GIB:.0f} GiB of device memory"
    if limit < OTHER_DESCRIPTORS:
        yield Finding("open files", "failing", f"{limit} descriptors are too few for xmigd", MORE_DESCRIPTORS)
    elif room < max(SMALL, gpus * LARGE):
        yield Finding("open files", "warning", reported, MORE_DESCRIPTORS)
    else:
        yield Finding("open files", "ok", reported)


def locked_memory(system: System, settings: Settings) -> Iterator[Finding]:
    """Page-locked host memory: copies at full speed, suspension."""
    limit = system.limit("MEMLOCK")
    uses_gpu = any(name.startswith("cuda") for name in settings.device_names)
    if limit is None:
        yield Finding("locked memory", "ok", "no limit")
    elif uses_gpu and limit < GIB:
        yield Finding("locked memory", "warning", f"limited to {limit >> 10} KiB",
                      "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited")  # fmt: skip
    else:
        yield Finding("locked memory", "ok", f"{limit >> 10} KiB" + ("" if uses_gpu else "; cpu devices lock none"))


def shared_memory(system: System, settings: Settings) -> Iterator[Finding]:
    """memfds (journals, snapshots, device memory of cpu devices) live in the machine's memory; loaders use /dev/shm."""
    memory = system.memory()
    available = memory.get("MemAvailable")
    if available is None:
        yield Finding("memory", "warning", "/proc/meminfo does not say what is available", "mount /proc")
    else:
        each = settings.journal_mib << 20
        state: State = "failing" if available < 2 * each else "warning" if available < 2 * GIB else "ok"
        reported = f"{available / GIB:.1f} GiB available; a journal takes up to {settings.journal_mib} MiB"
        hint = "" if state == "ok" else "free memory, or make journals smaller with XMIG_JOURNAL_MIB"
        yield Finding("memory", state, reported, hint)
    free = system.free_bytes(system.root / "dev/shm") if system.exists("/dev/shm") else None
    if free is None:
        yield Finding("/dev/shm", "warning", "there is none: loaders of frameworks fail",
                      "mount -t tmpfs tmpfs /dev/shm")  # fmt: skip
    elif free < SHM:
        yield Finding("/dev/shm", "warning", f"{free / GIB:.2f} GiB free; PyTorch's loaders with several workers fail",
                      "mount -o remount,size=50% /dev/shm; in a container --shm-size=8g")  # fmt: skip
    else:
        yield Finding("/dev/shm", "ok", f"{free / GIB:.1f} GiB free")


def huge_pages(system: System, settings: Settings) -> Iterator[Finding]:
    """What is reserved as huge pages is lost to memfds."""
    memory = system.memory()
    reserved = memory.get("HugePages_Free", 0) * memory.get("Hugepagesize", 0)
    total = memory.get("MemTotal", 0)
    if total and reserved > total // 4:
        yield Finding("huge pages", "warning", f"{reserved / GIB:.1f} GiB are reserved as huge pages, which xMIG "
                      "does not use: they are missing for journals and suspended programs",
                      "lower vm.nr_hugepages unless another program needs them")  # fmt: skip
    else:
        shared = system.read("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or ""
        chosen = re.search(r"\[(\w+)\]", shared)
        yield Finding("huge pages", "ok", f"{reserved / GIB:.1f} GiB reserved; transparent ones in shared memory: "
                      f"{chosen[1] if chosen else 'never'}")  # fmt: skip


def ptrace(system: System, settings: Settings) -> Iterator[Finding]:
    """Yama's scope: who may look into other processes. CRIU has to."""
    scope = system.read("/proc/sys/kernel/yama/ptrace_scope")
    if scope is None or scope in ("0", "1", "2"):
        yield Finding("ptrace", "ok", "not restricted" if scope in (None, "0") else f"ptrace_scope {scope}: root may")
    else:
        yield Finding("ptrace", "warning", f"ptrace_scope is {scope}: nobody may, so CRIU cannot dump programs",
                      "it can only be undone by booting with another kernel.yama.ptrace_scope")  # fmt: skip


def service_manager(system: System, settings: Settings) -> Iterator[Finding]:
    """Under systemd a restarted daemon gets its descriptors back, and jobs have units of their own."""
    if system.exists("/run/systemd/system"):
        yield Finding("systemd", "ok", "it runs here")
    else:
        yield Finding("systemd", "note", "this machine was not booted with it",
                      "xmigd runs without; start it by hand, and again after it has ended")  # fmt: skip
