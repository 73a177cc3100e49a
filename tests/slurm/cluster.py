"""Slurm's own daemons on this machine, beside an xmigd: nodes by name, each with its port, and fake GPUs.

No munge, no systemd, no accounting: authentication is auth/none, and everything is in one folder. Intervals are the
shortest that Slurm has, but for the health check's: a node that is resumed counts as not responding until it
registers, and Slurm 22.05 requests that in no second in which it begins a check of any other node.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pydantic

from tests.harness import ROOT
from tests.ports import free_port
from xmigd.demo.node import Node, looks

PACKAGED = ROOT / "packaging" / "slurm"
# One that other users may execute, too: that of the tests may be in root's home.
PYTHON = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin") or sys.executable
PACKAGES = Path(pydantic.__file__).parent.parent
GPUS = ("/dev/null", "/dev/zero")  # any character devices
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CryptoType=crypto/none
CredType=cred/none
MpiDefault=none
PluginDir={plugins}
PlugStackConfig={folder}/plugstack.conf
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=nohold_on_prolog_fail,batch_sched_delay=0,sched_min_interval=100000,sched_interval=1
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
GresTypes=gpu
ReturnToService=2
KillWait=60
MessageTimeout=60
JobFileAppend=1
JobRequeue=1
Prolog={folder}/prolog
Epilog={folder}/epilog
HealthCheckProgram={folder}/health
HealthCheckInterval=3
"""
PARTITIONS = """
PartitionName=DEFAULT Nodes=ALL OverSubscribe=FORCE:1
PartitionName=low Default=YES PriorityTier=1 PreemptMode=SUSPEND
PartitionName=spot PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high PriorityTier=9 PreemptMode=OFF
"""


class Cluster:
    """`slurm`: what packaging/setup/slurm.sh has unpacked. `xmig`: the daemon of all its nodes."""

    def __init__(self, slurm: Path, folder: Path, xmig: Node, nodes: Sequence[str]) -> None:
        self.folder = folder
        self.xmig = xmig
        self.nodes = tuple(nodes)
        self._programs = slurm / "usr"
        self._libraries = next((slurm / "usr" / "lib").glob("*-linux-gnu"))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        path = f"{folder}/bin:{self._programs}/bin:{self._programs}/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.environment = {
            "PATH": path, "SLURM_CONF": str(folder / "slurm.conf"), "HOME": "/", "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": f"{self._libraries}:{self._libraries}/slurm-wlm",
            "XMIG_RUNTIME_DIR": xmig.environment["XMIG_RUNTIME_DIR"],
        }  # fmt: skip

    def __enter__(self) -> Self:
        self._configure()
        try:
            self._start("slurmctld", "-D", "-c")
            for node in self.nodes:
                self.start_node(node)
            self.until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):
            self.command("scancel", "--signal=KILL", "--full", "--user=root")
            self.command("scancel", "--user=root")
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """slurmstepd of jobs, and what they have started: whoever has our configuration in its environment."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"SLURM_CONF={self.environment['SLURM_CONF']}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        ports = [free_port() for _ in range(1 + len(self.nodes))]
        values = {"folder": self.folder, "host": host, "port": ports[0], "plugins": self._libraries / "slurm-wlm"}
        text = CONFIGURATION.format(**values)
        for name, port in zip(self.nodes, ports[1:], strict=True):
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 Gres=gpu:2\n"
        (self.folder / "slurm.conf").write_text(text + PARTITIONS)
        gres = [f"NodeName={name} Name=gpu File={gpu}\n" for name in self.nodes for gpu in GPUS]
        (self.folder / "gres.conf").write_text("".join(gres))
        plugin = self.folder / "xmig_spank.so"
        build: list[str | Path] = [PACKAGED / "build.sh", plugin, self._programs / "include"]
        subprocess.run(build, check=True, capture_output=True)
        (self.folder / "plugstack.conf").write_text(f"required {plugin} task={PACKAGED}/slurm-task\n")
        (self.folder / "state").mkdir()
        for node in self.nodes:
            (self.folder / f"spool-{node}").mkdir()
        (self.folder / "bin").mkdir()
        self._script("bin/xmigctl", f'PYTHONPATH={ROOT}:{PACKAGES} exec {PYTHON} -m xmigd.cli "$@"')
        for name in ("prolog", "epilog", "health"):
            exports = "".join(f"export {key}='{value}'\n" for key, value in self.environment.items())
            log = self.folder / f"{name}.log"
            # Processors are few: nothing is checked unless a test wants it.
            wanted = f"[ -e {self.folder}/checked ] || exit 0\n" if name == "health" else ""
            self._script(name, f"{wanted}{exports}exec {PACKAGED}/slurm-{name} >>{log} 2>&1")

    def _script(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def _start(self, program: str, *arguments: str | Path, name: str = "") -> None:
        with (self.folder / f"{name or program}.out").open("ab") as output:
            self._daemons[name or program] = subprocess.Popen(
                [self._programs / "sbin" / program, *arguments], env=self.environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, "-d", self._programs / "sbin" / "slurmstepd", name=node)

    def lose_node(self, node: str, job: str) -> None:
        """As a machine that fails: Slurm's daemon is gone, and its one job with all processes."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        stepd = f"slurmstepd: [{job}.".encode()
        for pid in self._left():
            with contextlib.suppress(OSError):
                entry = Path(f"/proc/{pid}")
                its = f"SLURM_JOB_ID={job}".encode() in (entry / "environ").read_bytes().split(b"\0")
                if its or (entry / "cmdline").read_bytes().startswith(stepd):
                    os.kill(pid, signal.SIGKILL)

    # --- commands -----------------------------------------------------------------------------------------------------

    def command(self, program: str, *arguments: str | Path, **variables: str) -> str:
        """Its output. Fails with what it printed."""
        done = subprocess.run(
            [program, *arguments], env=self.environment | variables, cwd=self.folder, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout} {done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str, **variables: str) -> str:
        """A batch job; its id. Its output is out-ID."""
        path = self.folder / f"script-{time.monotonic_ns()}"
        path.write_text(f"#!/bin/bash\n{script}\n")
        output = f"--output={self.folder}/out-%j"
        return self.command("sbatch", "--parsable", output, *options, path, **variables).strip()

    def output(self, job: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"out-{job}").read_text()
        return ""

    def logs(self) -> str:
        """Of what Slurm starts, and of Slurm's nodes."""
        found = (path for path in sorted(self.folder.glob("*.log")) if path.name != "slurmctld.log")
        return "".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in found)

    def job(self, job: str) -> dict[str, str]:
        words = self.command("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def until(self, job: str, *states: str, timeout: float = 90) -> None:
        """Wait until Slurm has it in one of these states."""
        for _ in looks(timeout):
            found = self.job(job)
            if found["JobState"] in states:
                return
        raise AssertionError((found, self.output(job), self.logs()))

    def state(self, node: str) -> set[str]:
        words = self.command("scontrol", "--oneliner", "show", "node", node).split()
        return set(next(word for word in words if word.startswith("State=")).removeprefix("State=").split("+"))

    def until_idle(self, timeout: float = 150) -> None:
        """All nodes respond and have no jobs."""
        end = time.monotonic() + timeout
        while not all(self.state(node) == {"IDLE"} for node in self.nodes):
            found = {node: (self.state(node), self.reason(node)) for node in self.nodes}
            assert time.monotonic() < end, (found, self.xmig.client.get("/v1/devices"), self.logs())
            time.sleep(0.1)

    def resume(self, node: str) -> None:
        """One that is down. It may come back by itself at any moment."""
        while "DOWN" in self.state(node):
            with contextlib.suppress(AssertionError):
                self.command("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def reason(self, node: str) -> str:
        return self.command("sinfo", "--noheader", "--nodes", node, "--format=%E").strip()
