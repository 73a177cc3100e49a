"""The packages in a machine with systemd, as docs/install.md has it word by word: installed, used while their daemon is
disturbed in every way that a daemon can be, upgraded, removed."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT
from tests.packages import gated, paced
from tests.packages.conftest import CRIU, TREE
from tests.packages.container import Container

pytestmark = pytest.mark.timeout(900)

DOCUMENT = ROOT / "docs" / "install.md"
BLOCK = re.compile(r"<!-- (run|elsewhere): ([^>]+) -->\n```sh\n(.*?)```", re.DOTALL)
HOME = "/usr/lib64/xmig/xmigd"
PYTHON = "/home/alice/train/bin/python"
TRAIN = f"{PYTHON} {HOME}/demo/train.py --kernels {HOME}/native/xmig_kernels.so"
EPOCHS = 40


@dataclass(frozen=True)
class Commands:
    section: str
    user: str
    script: str


def commands() -> Iterator[Commands]:
    """The document's blocks that are to be run, in their order."""
    text = DOCUMENT.read_text()
    for match in BLOCK.finditer(text):
        if match[1] == "run":
            section = re.findall(r"^##+ (.*)$", text[: match.start()], re.MULTILINE)[-1]
            yield Commands(section, {"root": "", "user": "alice"}[match[2]], match[3])


def follow(machine: Container, section: str) -> str:
    """Do what a section of the document says. Returns what was printed."""
    blocks = [block for block in commands() if block.section.startswith(section)]
    assert blocks, f"{DOCUMENT.name} has no commands under {section!r}"
    return "".join(machine.run(block.script, user=block.user) for block in blocks)


def test_every_block_says_where_it_is_run() -> None:
    text = DOCUMENT.read_text()
    assert len(BLOCK.findall(text)) == text.count("```sh\n")


def weights(output: str) -> str:
    """The hash of what was learnt, and every loss on the way."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return json.dumps([line["losses"] for line in lines if "losses" in line] + [lines[-1]["weights"]])


# Memory files by their inodes: those of the daemon that the manager, which is process 1, has no copy of.
KEPT = """
memory() {
  for fd in /proc/$1/fd/*; do
    case $(readlink $fd) in /memfd:xmig*) stat --dereference --format=%i $fd ;; esac
  done | sort --unique
}
daemon=$(systemctl show --value -p MainPID xmigd)
held=$(memory $daemon)
[ $(wc -l <<<"$held") -gt 6 ]
missing=$(comm -23 <(echo "$held") <(memory 1))
[ -z "$missing" ] || { echo "of $(wc -w <<<"$held") files the manager lacks:" $missing >&2; exit 1; }
"""

# What a process may do, and which files it sees.
LIMITS = "grep -E '^(Seccomp|NoNewPrivs|CapBnd):' /proc/{}/status; readlink /proc/{}/ns/mnt"


def settled(machine: Container) -> None:
    """Wait until the manager has a copy of every piece of memory that the daemon holds."""
    machine.until(KEPT, "everything is kept")


class Disturbed:
    """A training that is in the middle of its work for as long as the test wants it to be: as a service, or in a
    `login` of its user."""

    def __init__(self, machine: Container, name: str, user: str = "alice", *, login: bool = False) -> None:
        self._machine = machine
        self._name = name
        self._lines = 0
        self._folder = f"/srv/{name}"
        machine.run(f"mkdir {self._folder}; echo 0 >{self._folder}/gate; chown --recursive {user} {self._folder}")
        (machine.root / "srv" / name / "paced.py").write_bytes(Path(paced.__file__).read_bytes())
        command = f"{PYTHON} paced.py gate xmigctl run --name {name} {TRAIN} --epochs {EPOCHS}"
        script = f"cd {self._folder}; exec {command} >out 2>err"
        machine.start(script, user=user, unit=name, login=login)
        self.server()
        self.work()

    def work(self) -> None:
        """Some epochs more."""
        self._lines += 2
        self._machine.run(f"echo {self._lines} >{self._folder}/gate")
        self._machine.until(
            f"[ $(wc -l <{self._folder}/out) -ge {self._lines} ] || "
            f"{{ cat {self._folder}/err; systemctl show -p SubState {self._name}; false; }} >&2",
            "the job goes on",
        )

    def row(self, state: str = "running") -> dict[str, Any]:
        """Its process in the daemon's list, once it is in this state."""
        row: dict[str, Any] = json.loads(self._machine.until(self._listed(state), f"its process is {state}"))
        return row

    def _listed(self, state: str, field: str = "") -> str:
        """What prints its process, or one field of it, if it is in this state, and fails otherwise."""
        shown = f'row["{field}"]' if field else "row"
        return (
            f"xmigctl ps -o json | python3 -c 'import json, sys; print(next(json.dumps({shown}) "
            "for row in json.load(sys.stdin) "
            f'if row["job_name"] == "{self._name}" and row["state"] == "{state}"))\''
        )

    def server(self) -> int:
        """The pid of its server, which is in a unit of its own."""
        # Requested again each time: right after a crash the one that is named may be gone.
        found = self._machine.until(
            f"pid=$({self._listed('running', 'server_pid')}); "
            'grep -qE "^(0:|[0-9]+:name=systemd):.*/xmig.slice/xmig-server-$pid.scope$" /proc/$pid/cgroup; echo $pid',
            "it has a server, which is in its scope",
        )
        return int(found)

    def scope(self) -> str:
        """The unit that holds its program."""
        lines = self._machine.run(f"cat /proc/{self.row()['pid']}/cgroup").splitlines()
        groups = dict(line.split(":", 2)[1:] for line in lines)
        return groups.get("name=systemd") or groups[""]

    def kill_both(self) -> None:
        """Daemon and server at the same moment: the manager has the memory."""
        settled(self._machine)
        self.kill_daemon(f"kill -9 {{daemon}} {self.server()}", works=False)
        pid = self._machine.property("xmigd", "MainPID")
        self._machine.until(f"journalctl -o cat _PID={pid} | grep 'memory was kept'", "memory came back from the store")
        self.server()
        self.work()

    def kill_daemon(self, how: str, *, works: bool = True, upgrade: bool = False) -> None:
        """Put another daemon in the place of this one, while the program works."""
        before = int(self._machine.property("xmigd", "MainPID"))
        if upgrade:
            follow(self._machine, "Upgrade")
        else:
            self._machine.run(how.format(daemon=before))
        if works:
            self.work()
        self._machine.until(
            f'pid=$(systemctl show --value -p MainPID xmigd); [ "$pid" != 0 ] && [ "$pid" != {before} ] && '
            "systemctl is-active --quiet xmigd && xmigctl ps",
            "another daemon",
        )

    def finish(self) -> str:
        """Let it run to its end. Returns what it printed."""
        self._machine.run(f"echo 1000000 >{self._folder}/gate")
        self._machine.until(f'[ "$(systemctl show --value -p SubState {self._name})" = exited ]', "it ends", 300)
        reported = self._machine.run(f"cat {self._folder}/err")
        assert self._machine.property(self._name, "ExecMainStatus") == "0", reported
        return self._machine.run(f"cat {self._folder}/out")


@dataclass(frozen=True)
class Installed:
    printed: str
    layer: Path  # the machine's files then


@pytest.fixture(scope="module")
def installed(machine: Container, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The packages, on the machine."""
    printed = follow(machine, "openEuler")
    layer = tmp_path_factory.mktemp("layer") / "installed"
    machine.copy_changes(layer)
    return Installed(printed, layer)


@pytest.fixture(scope="module")
def alone(machine: Container, installed: Installed) -> str:
    """What the training learns when nobody disturbs it."""
    return weights(machine.run(f"xmigctl run --name alone {TRAIN} --epochs {EPOCHS}", user="alice"))


class TestPackages:
    """In this order: each begins where the one before has left the machine."""

    def test_installed_and_used(self, machine: Container, installed: Installed) -> None:
        assert "digits" in installed.printed
        assert machine.property("xmigd", "StatusText").startswith("cpu:0")
        assert machine.run("stat -c '%a %U' /var/lib/xmig /run/xmig").split("\n")[:2] == ["700 root", "755 root"]
        assert machine.property("xmig-web", "ActiveState") == "active"
        uid = machine.run("id -u xmig-web").strip()
        pid = machine.property("xmig-web", "MainPID")
        assert machine.run(f"stat -c %u /proc/{pid}").strip() == uid
        machine.until("exec 3<>/dev/tcp/127.0.0.1/7451", "the dashboard listens")
        verified = machine.run("rpm -V xmigd xmigd-shim xmigd-web || true")
        assert verified == "", verified

    def test_a_job_through_everything_that_can_happen_to_the_daemon(self, machine: Container, alone: str) -> None:
        job = Disturbed(machine, "disturbed")

        # A reload, a restart in order.
        server = job.server()
        job.work()
        follow(machine, "Settings")
        machine.until("journalctl -o cat -u xmigd | grep 'settings read again.*log_level'", "it was reloaded")
        assert job.server() == server
        job.work()

        # A crash.
        job.kill_daemon("kill -9 {daemon}")
        assert job.server() == server

        # One crash after the other, most of them while the daemon begins.
        job.kill_daemon(
            "last=0; for n in 1 2 3 4 5 6 7 8; do "
            'until pid=$(systemctl show --value -p MainPID xmigd); [ "$pid" != 0 ] && [ "$pid" != $last ]; do :; done; '
            "kill -9 $pid; last=$pid; done"
        )
        assert job.server() == server

        # An event loop that stands still.
        machine.run(
            "mkdir -p /run/systemd/system/xmigd.service.d; cd /run/systemd/system/xmigd.service.d; "
            "printf '[Service]\\nWatchdogSec=10s\\nTimeoutAbortSec=1s\\n' >quick.conf; "
            "systemctl daemon-reload; systemctl restart xmigd"
        )
        job.kill_daemon("kill -STOP {daemon}")
        machine.until("journalctl | grep 'xmigd.service: Watchdog timeout'", "it was the watchdog")
        machine.run("rm -r /run/systemd/system/xmigd.service.d; systemctl daemon-reload")
        assert job.server() == server

        job.kill_both()
        server = job.server()

        # Another release.
        job.kill_daemon("", upgrade=True)
        assert machine.run("rpm -q xmigd").strip() == "xmigd-0.1.0-2.x86_64"
        assert 'log_level = "debug"' in machine.run("cat /etc/xmig/xmigd.toml")
        assert job.server() == server

        assert weights(job.finish()) == alone
        recoveries = json.loads(machine.run("xmigctl recoveries --job disturbed -o json"))
        assert [(r["outcome"], r["exact"]) for r in recoveries] == [("resumed", True)]

    def test_moved_and_suspended_between_daemons(self, machine: Container, alone: str) -> None:
        job = Disturbed(machine, "moved")
        source = job.row()
        target = {"cpu:0": "cpu:1", "cpu:1": "cpu:0"}[source["device"]]
        machine.run(f"xmigctl migrate moved {target}", user="alice")
        assert (job.row()["device"], job.server() != source["server_pid"]) == (target, True)
        job.work()
        job.kill_daemon("kill -9 {daemon}")
        job.kill_both()

        machine.run("xmigctl suspend moved", user="alice")
        job.kill_daemon("kill -9 {daemon}", works=False)
        job.row("suspended")
        job.kill_daemon("systemctl restart xmigd", works=False)
        job.row("suspended")
        machine.run(f"xmigctl resume moved --device {source['device']}", user="alice")
        job.work()
        job.kill_daemon("kill -9 {daemon}")
        job.kill_both()

        assert weights(job.finish()) == alone
        recoveries = json.loads(machine.run("xmigctl recoveries --job moved -o json"))
        assert [(r["outcome"], r["exact"]) for r in recoveries] == [("resumed", True)] * 2
        moves = json.loads(machine.run("xmigctl migrations --job moved -o json"))
        assert [(m["kind"], m["state"]) for m in moves] == [("resume", "done"), ("suspend", "done"), ("move", "done")]

    def test_a_checkpoint_is_restored(self, machine: Container, alone: str) -> None:
        """By CRIU in a unit of its own: the program has none of the daemon's limits, and outlives it."""
        if not CRIU.is_dir():
            pytest.skip("make pytest unpacks the CRIU that goes into the machine")
        machine.run(f"echo 'criu = \"{CRIU}/criu\"' >>/etc/xmig/xmigd.toml; systemctl restart xmigd; mkdir /srv/kept")
        (machine.root / "srv" / "kept" / "gated.py").write_bytes(Path(gated.__file__).read_bytes())
        command = f"xmigctl run --name kept {TRAIN.replace(PYTHON, PYTHON + ' gated.py')} --epochs {EPOCHS}"
        machine.start(f"cd /srv/kept; exec {command} >out 2>err </dev/null", user="root", unit="kept")
        machine.until(
            f"[ $(wc -l </srv/kept/out) -ge {gated.LINES} ] || {{ cat /srv/kept/err; false; }} >&2", "it works"
        )
        machine.run("xmigctl checkpoint create kept --stop")
        assert machine.property("kept", "Result") == "signal"
        (created,) = json.loads(machine.run("xmigctl checkpoint list -o json"))
        machine.run(f"xmigctl restore {created['id']}")
        row = json.loads(machine.run("xmigctl ps -o json"))[0]
        unit = machine.run("systemctl list-units --plain --no-legend 'xmig-restore-*'").split()[0]
        assert f"/xmig.slice/{unit}" in machine.run(f"cat /proc/{row['pid']}/cgroup")
        assert int(machine.property(unit, "MainPID")) == row["pid"]
        assert machine.run(LIMITS.format(row["pid"], row["pid"])) == machine.run(LIMITS.format(1, 1))
        machine.run("systemctl restart xmigd; echo inf >/srv/kept/open")
        machine.until(f"! [ -e /proc/{row['pid']} ]", "it ends")
        assert weights(machine.run("cat /srv/kept/out")) == alone
        machine.until("! systemctl list-units --plain --no-legend 'xmig-restore-*' | grep .", "its unit ends with it")

    @pytest.mark.parametrize("user", ["root", "alice"])
    def test_a_job_of_a_login_has_a_unit_of_its_own(self, machine: Container, alone: str, user: str) -> None:
        job = Disturbed(machine, f"of-{user}", user, login=True)
        if user == "alice":
            # Her manager, and every unit of it, ends with her last session.
            assert re.search(r"/session-[^/]+\.scope$", job.scope()), job.scope()
            job.finish()
            machine.run("loginctl enable-linger alice")
            machine.until("systemctl is-active user@1500.service", "alice's manager stays")
            job = Disturbed(machine, "lingering", user, login=True)
        unit = f"xmig-job-{job.row()['job_id'][:12]}.scope"
        assert job.scope().endswith(f"/xmig.slice/{unit}")
        if user == "root":
            listed = machine.run(f"systemctl list-units --plain --no-legend {unit}")
            below = "/xmig.slice"
        else:
            manager = "XDG_RUNTIME_DIR=/run/user/1500 systemctl --user"
            listed = machine.run(f"{manager} list-units --plain --no-legend {unit}", user=user)
            below = "/user.slice/user-1500.slice"
        assert "active running" in " ".join(listed.split())
        assert unit in machine.run(f"systemd-cgls --no-pager --full {below}")

        server = job.server()
        machine.run("systemctl stop xmigd")
        job.work()
        machine.run("systemctl start xmigd")
        assert job.server() == server
        assert weights(job.finish()) == alone
        machine.until(f"! systemd-cgls --no-pager --full {below} | grep {unit}", "the unit ends with the job")

    def test_removed_under_a_job(self, machine: Container) -> None:
        job = Disturbed(machine, "last")
        job.server()
        follow(machine, "Removal")
        job.finish()
        units = "systemctl list-unit-files --no-legend 'xmig*'"
        machine.until(f"! {units} | grep .", "its server's unit ends with it, and there is no other")
        assert machine.try_run("systemctl cat xmigd").returncode != 0
        assert machine.run("rpm -qa 'xmig*'") == ""
        assert machine.run("ls /usr/lib64 | grep xmig || true") == ""
        left = machine.run("ls /var/lib/xmig /etc/xmig")
        assert "xmig.db" in left
        assert "xmigd.toml.rpmsave" in left


class TestWheel:
    def test_as_a_service(self, machine: Container) -> None:
        follow(machine, "Debian and others")

    def test_without_root(self, machine: Container) -> None:
        follow(machine, "Without root")


SHARED = "/shared"  # a file system that both machines have
POINT = "/run/point"  # where a test writes at which place the daemon dies (xmigd/failpoints.py)
NODE = """
peer_port = 7460
programs_from = "*"
criu = "/usr/local/bin/criu"
"""
HOLD = "/run/hold"  # while it is there, CRIU makes nothing again
HELD_CRIU = f"""#!/bin/sh
while [ "$1" = restore ] && [ -e {HOLD} ]; do sleep 0.05; done
exec {CRIU}/criu "$@"
"""


@pytest.fixture(scope="class")
def pair(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Container, Container]]:
    """Two machines that have installed the packages, and whose daemons know each other."""
    if not CRIU.is_dir():
        pytest.skip("make pytest unpacks the CRIU that goes into the machines")
    shutil.rmtree(installed.layer / "var/lib/xmig")  # each has an identity of its own
    shared = tmp_path_factory.mktemp("shared")
    addresses = {"one": "10.0.0.1", "two": "10.0.0.2"}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:

        def boot(name: str) -> Container:
            machine = Container(
                [installed.layer, TREE], tmp_path_factory.mktemp(name), name=name, binds={CRIU: str(CRIU)},
                writable={shared: SHARED},
            )  # fmt: skip
            return stack.enter_context(machine)

        one, two = pool.map(boot, addresses)
        one.join(two, (addresses["one"], addresses["two"]))
        one.begin_pids_at(20_000)  # a program has the same pid on both
        list(pool.map(lambda machine: configure(machine, addresses), (one, two)))
        for here, there in ((one, two), (two, one)):
            identity = json.loads(there.run("xmigctl peer show -o json"))
            here.run(f"xmigctl peer add {there.name} {there.name}:7460 {identity['fingerprint']}")
        for here in (one, two):
            here.until("xmigctl peer list | grep connected", "the daemons are connected")
        yield one, two


def configure(machine: Container, addresses: dict[str, str]) -> None:
    """As an operator does it; and it dies where a test says so."""
    hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
    unit = f"[Service]\nEnvironment=XMIG_FAILPOINT={POINT}\n"
    folder = "/run/systemd/system/xmigd.service.d"
    machine.run(
        f"mkdir -p {folder}; echo {shlex.quote(unit)} >{folder}/point.conf; echo {shlex.quote(hosts)} >>/etc/hosts; "
        f"echo {shlex.quote(HELD_CRIU)} >/usr/local/bin/criu; chmod 755 /usr/local/bin/criu; "
        f"echo {shlex.quote(NODE)} >>/etc/xmig/xmigd.toml; systemctl daemon-reload; systemctl restart xmigd"
    )


class Moving:
    """A training that is in the middle of its work for as long as the test wants, on either of two machines."""

    def __init__(self, machines: tuple[Container, Container]) -> None:
        self._machines = machines
        self._lines = gated.LINES
        self._one = machines[0]
        self._one.run(f"cat >{SHARED}/gated.py <<'END'\n{Path(gated.__file__).read_text()}END\n")
        command = f"xmigctl run --name moving {TRAIN.replace(PYTHON, PYTHON + ' gated.py')} --epochs {EPOCHS}"
        self._one.start(f"cd {SHARED}; exec {command} >out 2>err </dev/null", user="root", unit="moving")
        self.work()

    def work(self) -> None:
        """Some epochs more."""
        self._lines += 2
        self._one.run(f"echo {self._lines} >{SHARED}/open")
        self._one.until(
            f"[ $(wc -l <{SHARED}/out) -ge {self._lines} ] || {{ cat {SHARED}/err; false; }} >&2", "the job goes on"
        )

    def finish(self) -> str:
        """Let it run to its end. Returns what it printed."""
        self._one.run(f"echo inf >{SHARED}/open")
        for machine in self._machines:
            machine.until("! systemctl list-units --plain --no-legend 'xmig-restore-*' | grep .", "its unit has ended")
        return self._one.run(f"cat {SHARED}/out")

    def where(self) -> Container:
        """The machine on which it runs, once nothing is under way: on the other one nothing is left of it."""
        there = [machine.until(SETTLED, f"{machine.name} is settled").split() for machine in self._machines]
        having = [machine for machine, its in zip(self._machines, there, strict=True) if its]
        assert len(having) == 1, there
        return having[0]


# Once no transfer is under way, the folders of /proc of what xMIG runs; nothing else has the training's output open.
SETTLED = f"""
systemctl is-active xmigd >&2
xmigctl transfer list -o json | python3 -c '
import json, sys
under_way = {{row["state"] for row in json.load(sys.stdin)}} - {{"done", "failed", "running", "dropped"}}
sys.exit(str(under_way) if under_way else 0)'
listed=$(xmigctl ps -o json | python3 -c '
import json, sys
for row in json.load(sys.stdin): print("/proc", row["pid"], "fd", sep="/")')
open=$(find /proc/[0-9]*/fd/1 -lname {SHARED}/out -printf '%h\\n')
[ "$listed" = "$open" ] || {{ echo "xMIG has $listed, and there are $open" >&2; exit 1; }}
echo $listed
"""

# Where CRIU works for a transfer: in a unit of its own, which outlives the daemon.
RESTORES = "systemctl list-units --plain --no-legend --state=activating 'xmig-restore-*' | grep ."


class TestTwoMachines:
    def test_a_training_moves_while_daemons_are_restarted(self, pair: tuple[Container, Container], alone: str) -> None:
        one, two = pair
        job = Moving(pair)
        for here, there in ((one, two), (two, one)):
            here.run(f"xmigctl migrate moving --to {there.name}")
            assert job.where() is there
            job.work()
        assert one.property("moving", "Result") == "signal"  # what has started it says so

        # The source's daemon dies when it has decided that the job goes.
        before = int(one.property("xmigd", "NRestarts"))
        one.run(f"printf 'write.committed transfers.committed' >{POINT}")
        one.run("xmigctl migrate moving --to two")  # it waits for the next daemon, which knows of it
        one.until(f"[ $(systemctl show --value -p NRestarts xmigd) = {before + 1} ]", "its daemon has died once")
        assert job.where() is two
        job.work()

        # The target's is restarted while CRIU works, which is in a unit of its own. What it makes is ended by the next.
        one.start(
            f"touch {HOLD}; until {RESTORES}; do :; done; systemctl restart xmigd; rm {HOLD}", user="root", unit="held"
        )
        one.until(f"[ -e {HOLD} ]", "CRIU would wait")
        assert two.try_run("xmigctl migrate moving --to one").returncode != 0
        one.until('[ "$(systemctl show --value -p SubState held)" = exited ]', "its daemon was restarted")
        assert job.where() is two
        job.work()

        unit = two.run("systemctl list-units --plain --no-legend 'xmig-restore-*'").split()[0]
        pid = two.property(unit, "MainPID")
        assert f"/xmig.slice/{unit}" in two.run(f"cat /proc/{pid}/cgroup")
        assert two.run(LIMITS.format(pid, pid)) == two.run(LIMITS.format(1, 1))
        assert weights(job.finish()) == alone
        for machine in pair:
            assert "Traceback" not in machine.run("journalctl -o cat -u xmigd")
