"""A machine with systemd as its first process: a tree of packaging/setup/boot_tree.sh, booted by systemd-nspawn.

What is changed in it goes into a folder of the test (an overlay); the tree stays as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

# Nothing of the test's own: PYTHONPATH, for one, means something else in there.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
WIRE = "eth0"  # between two machines
PATIENCE = 180.0  # seconds for a boot that takes ten on an idle machine


class Container:
    """Running from `with` to its end."""

    def __init__(
        self, layers: Sequence[Path], folder: Path, *, binds: dict[Path, str], writable: dict[Path, str] | None = None,
        name: str = "machine",
    ) -> None:  # fmt: skip
        """`layers`: trees of files, each on top of the next one. `binds`, `writable`: folders of the host, and where
        they are in there. `name`: of the host."""
        self.name = name
        self._layers = layers
        self._folder = folder
        self._binds = binds
        self._writable = writable or {}
        self.root = folder / "root"
        self.log = folder / "console.log"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0

    def __enter__(self) -> Self:
        layers = {name: self._folder / name for name in ("upper", "work")}
        for folder in (self.root, *layers.values()):
            folder.mkdir()
        lower = ":".join(map(str, self._layers))
        options = f"lowerdir={lower},upperdir={layers['upper']},workdir={layers['work']}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, self.root], check=True)
        (self.root / "etc" / "hostname").write_text(f"{self.name}\n")
        try:
            self._boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _boot(self) -> None:
        command: list[str | Path] = ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit"]
        # With a network of its own, which is a loopback: nobody else's dashboard has its port.
        command += [f"--directory={self.root}", "--console=read-only", "--private-network", "--capability=all"]
        command += [f"--bind-ro={source}:{target}" for source, target in self._binds.items()]
        command += [f"--bind={source}:{target}" for source, target in self._writable.items()]
        # CRIU works as on a machine: with all capabilities, and without a filter of system calls around everything.
        environment = os.environ | {"SYSTEMD_SECCOMP": "0"}
        with self.log.open("wb") as log:
            self._nspawn = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            assert self._nspawn.poll() is None, f"it does not boot: {self._last()}"
            self._leader = self._find_leader(self._nspawn.pid)
            if self._leader and self._answers():
                return
            time.sleep(0.2)
        raise AssertionError(f"it has not booted within {PATIENCE:g} s: {self._last()}")

    @staticmethod
    def _find_leader(nspawn: int) -> int:
        """The container's first process; 0: there is none yet. Before it nspawn has another child, which makes it, and
        goes."""
        children = Path(f"/proc/{nspawn}/task/{nspawn}/children").read_text().split()
        for child in children:
            try:
                status = Path(f"/proc/{child}/status").read_text()
                program = Path(f"/proc/{child}/comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            numbers = re.findall(r"^NSpid:(.*)$", status, re.MULTILINE)[0].split()
            if len(numbers) > 1 and numbers[-1] == "1" and program == "systemd":
                return int(child)
        return 0

    def _answers(self) -> bool:
        """Whether the manager says that it has started what everything else needs."""
        try:
            return self._enter(["systemctl", "is-active", "--quiet", "basic.target"]).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def _last(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def _end(self) -> None:
        if self._nspawn is not None:
            self._nspawn.terminate()  # an orderly end of what runs in there
            try:
                self._nspawn.wait(60)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait()
        subprocess.run(["umount", "--recursive", "--lazy", self.root], check=False)

    def copy_changes(self, to: Path) -> None:
        """What differs from its layers, as a layer for others."""
        subprocess.run(["cp", "--archive", self._folder / "upper", to], check=True)

    def join(self, other: Self, addresses: tuple[str, str]) -> None:
        """A wire between both machines, and the addresses of its ends."""
        ends: tuple[Self, Self] = (self, other)
        first, second = (f"{end._leader}" for end in ends)
        _execute("ip", "link", "add", WIRE, "netns", first, "type", "veth", "peer", "name", WIRE, "netns", second)
        for end, address in zip(ends, addresses, strict=True):
            end._in_network("ip", "addr", "add", f"{address}/24", "dev", WIRE)
            end._in_network("ip", "link", "set", WIRE, "up")

    def slow(self, kilobits: int) -> None:
        """What it sends goes with so many kilobits a second."""
        words = ["rate", f"{kilobits}kbit", "burst", "16kb", "latency", "1s"]
        self._in_network("tc", "qdisc", "replace", "dev", WIRE, "root", "tbf", *words)

    def fast(self) -> None:
        """As at first."""
        self._in_network("tc", "qdisc", "del", "dev", WIRE, "root")

    def _in_network(self, *command: str) -> None:
        """The host's own program: the tree has none of these."""
        _execute("nsenter", "--target", f"{self._leader}", "--net", *command)

    def begin_pids_at(self, pid: int) -> None:
        """The next process gets the one behind it."""
        script = f"echo {pid} >/proc/sys/kernel/ns_last_pid"
        _execute("nsenter", "--target", f"{self._leader}", "--pid", "sh", "-c", script)

    def _enter(self, command: list[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nsenter", "--target", str(self._leader), "--all", "--wdns=/", "--", *command], env=ENVIRONMENT,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def try_run(self, script: str, *, user: str = "", timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """A script of the shell, as root or `user`, in a unit of its own as the container's manager starts them."""
        command = ["systemd-run", "--pipe", "--wait", "--quiet", "--collect", "--setenv=PIP_NO_INDEX=1"]
        command += ["--setenv=PIP_FIND_LINKS=/wheels", "--setenv=PIP_DISABLE_PIP_VERSION_CHECK=1"]
        home = f"/home/{user}" if user else "/root"
        command += [f"--setenv=HOME={home}", f"--working-directory={home}"]
        if user:
            command += [f"--uid={user}", f"--gid={user}"]
        return self._enter([*command, "--", "/bin/bash", "-euo", "pipefail", "-c", script], timeout)

    def run(self, script: str, *, user: str = "", timeout: float = 300) -> str:
        """The same; what it printed. Fails with what it reported when it does not end well."""
        done = self.try_run(script, user=user, timeout=timeout)
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}\n{self.journal()}"
        return done.stdout

    def start(self, script: str, *, user: str, unit: str, login: bool = False) -> None:
        """Start a script in the background, as a unit, or in a `login` of its own; the unit says how it went."""
        home = f"/home/{user}" if user != "root" else "/root"
        command = ["systemd-run", "--quiet", f"--unit={unit}", "--property=RemainAfterExit=yes"]
        if login:
            command += ["--", "runuser", "--login", user, "--command", script]
        else:
            command += [f"--uid={user}", f"--gid={user}", f"--setenv=HOME={home}", f"--working-directory={home}"]
            command += ["--", "/bin/bash", "-euc", script]
        self.run(shlex.join(command))

    def journal(self, unit: str = "xmigd") -> str:
        """The last lines of a unit's log."""
        return self._enter(["journalctl", "--no-pager", "-o", "cat", "-n", "40", "-u", unit]).stdout

    def property(self, unit: str, name: str) -> str:
        return self._enter(["systemctl", "show", "--value", "-p", name, unit]).stdout.strip()

    def until(self, script: str, what: str, timeout: float = 120) -> str:
        """Wait until a script succeeds; what it printed."""
        end = time.monotonic() + timeout
        while True:
            done = self._enter(["/bin/bash", "-euo", "pipefail", "-c", script], timeout)
            if done.returncode == 0:
                return done.stdout
            assert time.monotonic() < end, f"not within {timeout:g} s: {what}\n{done.stderr[-2000:]}\n{self.journal()}"
            time.sleep(0.1)


def _execute(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
