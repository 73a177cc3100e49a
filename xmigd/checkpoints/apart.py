"""Programs in namespaces of their own (`xmigctl run --movable`): what is dumped is the whole pid namespace.

Its first process is the root of what CRIU writes down. The program is restored with the pids that it sees, whatever
they are on this node. A user namespace is not taken: who may make the others without one is root here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from typing import Literal

from xmigd.checkpoints import proc
from xmigd.errors import Conflict, NotFound
from xmigd.networks.carrier import DEVICE
from xmigd.text import harmless

Kind = Literal["pid", "mnt", "net", "ipc", "uts"]
KINDS: tuple[Kind, ...] = ("pid", "mnt", "net", "ipc", "uts")
JOB_NETWORK = "job"  # as CRIU's images name it


def root_in(pid: int) -> int:
    """The first process of the pid namespace in which this one is, if that is not the daemon's and can be dumped;
    otherwise the process itself."""
    with contextlib.suppress(*proc.GONE, PermissionError):
        ours, its = proc.namespaces(proc.machine()), proc.namespaces(pid)
        if its["pid"] == ours["pid"] or its["user"] != ours["user"] or not _sees_our_files(pid):
            return pid
        found = pid
        while not proc.is_init(found):
            found = proc.Stat(found).parent
            if found <= 1 or proc.namespaces(found)["pid"] != its["pid"]:
                return pid
        return found
    return pid


def namespaces_of(root: int) -> tuple[Kind, ...]:
    """Those that it does not share with the daemon, if it is the first one of a pid namespace."""
    with contextlib.suppress(*proc.GONE, PermissionError):
        ours, its = proc.namespaces(proc.machine()), proc.namespaces(root)
        apart = its["pid"] != ours["pid"] and its["user"] == ours["user"]
        if apart and proc.is_init(root) and _sees_our_files(root):
            return tuple(kind for kind in KINDS if its.get(kind) != ours.get(kind))
    return ()


def _sees_our_files(pid: int) -> bool:
    """A container has others: its mounts are nothing that could be made again here."""
    with contextlib.suppress(*proc.GONE, PermissionError):
        return os.path.samefile(f"/proc/{pid}/root", "/")
    return False


def inner_pid(pid: int) -> int:
    """As the process sees it itself. 0: it has ended."""
    with contextlib.suppress(*proc.GONE, PermissionError):
        return proc.pids_in_namespaces(pid)[-1]
    return 0


def outer_pid(pids: Iterable[int], inner: int) -> int | None:
    """Which of these sees itself as `inner`."""
    return next((pid for pid in pids if inner_pid(pid) == inner), None)


def mounts_of(root: int) -> tuple[str, ...]:
    """Where the machine has mounted what it has for others, too, in the mount namespace of the program that begins with
    this process. What is restored gets whatever the node has mounted there that restores it: where that has it from
    (a disk, a folder of another file system) is its own affair. None: the program sees the machine's mounts. Raises
    NotFound: it has ended."""
    if "mnt" not in namespaces_of(root):
        return ()
    try:
        ours, its = proc.mount_points(proc.machine()), proc.mount_points(root)
    except OSError:
        raise NotFound(f"there is no process {root}", hint="its program has ended") from None
    return tuple(sorted(path for path, there in its.items() if path != "/" and there <= ours.get(path, set())))


def missing_mounts(mounts: Iterable[str]) -> list[str]:
    """Where this node has nothing mounted. Raises OSError."""
    ours = proc.mount_points(proc.machine())
    return [path for path in mounts if path not in ours]


def check_mounts(mounts: Iterable[str]) -> None:
    """Blocks. Raises Conflict: what is restored would lack one."""
    if missing := missing_mounts(mounts):
        raise Conflict(
            f"nothing is mounted at {harmless(missing[0])}, where the program has the machine's mount",
            code="mount_missing", hint="mount it; or unmount it where the program was, and start that anew",
        )  # fmt: skip


def dumped_with(mounts: Iterable[str]) -> list[str]:
    """Options of CRIU. Mounts that this node has, too, are only named; others (/proc, /dev/shm) are made again with
    what is in them."""
    return [word for path in mounts for word in ("--external", f"mnt[{path}]:{path}")]


def own_network(root: int) -> bool:
    """Is it in the network of a job (networks/carrier.py)? Raises NotFound: it has ended."""
    if "net" not in namespaces_of(root):
        return False
    try:
        with open(f"/proc/{root}/net/dev") as file:
            return any(line.split(":")[0].strip() == DEVICE for line in file)
    except OSError:
        raise NotFound(f"there is no process {root}", hint="its program has ended") from None


def without_network(inode: int) -> list[str]:
    """Options of CRIU: this network is somebody else's to make."""
    return ["--external", f"net[{inode}]:{JOB_NETWORK}"] if inode else []


def restored_in(
    folder: str, namespaces: Collection[str], mounts: Iterable[str], network: os.PathLike[str] | None,
    command: list[str],
) -> list[str]:  # fmt: skip
    """`network`: the namespace in place of one that was not dumped. CRIU takes the root file system from a mount: in a
    mount namespace of its own, so nothing is left of that."""
    if network is not None:
        enter = 'exec 9< "$0" && exec "$@"'
        command = [*command, "--inherit-fd", f"fd[9]:{JOB_NETWORK}"]
        return ["sh", "-c", enter, str(network), *_with_root(folder, namespaces, mounts, command)]
    return _with_root(folder, namespaces, mounts, command)


def _with_root(folder: str, namespaces: Collection[str], mounts: Iterable[str], command: list[str]) -> list[str]:
    if "mnt" not in namespaces:
        return command
    script = 'mkdir -p "$0" && mount --rbind / "$0" && exec "$@"'
    # Earlier versions had CRIU find the mounts by itself: mnt[].
    external = [*dumped_with(mounts), "--external", "mnt[]:ms"]
    return [
        "unshare", "--mount", "--propagation", "private", "sh", "-c", script, folder, *command, *external,
        "--root", folder,
    ]  # fmt: skip
