"""The command between slurmstepd and a task: it runs the task under xMIG, and stays beside it for Slurm's signals.

  SIGTSTP   Slurm suspends the job: its device memory goes to host memory. SIGSTOP follows after two seconds.
  SIGCONT   it goes on: back to a device.
  SIGTERM   with --xmig-checkpoint, if the job is being requeued: a checkpoint, with which the task ends. The next start
            of the job goes on from there.

A task with --xmig-checkpoint is dumped from its first process on: a batch script is at the same line afterwards. What
was restored is no descendant of slurmstepd, so signals are passed on to its process group.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NoReturn

from xmigd.cli import slurm_controller as controller
from xmigd.cli.common import connect
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.follow import OVER
from xmigd.cli.launch import Reactions, end_as, tell
from xmigd.cli.launch import run as launch
from xmigd.cli.starting import readable, register_job
from xmigd.client import RESTART_PATIENCE, Client, NoDaemon, Refused
from xmigd.errors import XmigError
from xmigd.ipc import exits
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.fds import Fd

SUSPENDED_WITHIN = 600.0  # seconds
INTERVAL = 0.1  # seconds between two looks
KEPT = 2  # checkpoints by the clock
MOST_WALLTIME = 366 * 86400.0  # seconds; more is no limit, and the API takes no more
MOST_DIGITS = 12
MOST_FILES = 1000  # that are brought back to where they were
GROWN = re.compile(r"(/.*) was written to since: it has \d+ bytes, and had (\d+)")
Wanted = Literal["suspended", "running"]
PASSED_ON = frozenset({signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM})


def run(command: list[str]) -> NoReturn:
    """Ends as the task does. Raises XmigError: it cannot be started."""
    slurm_job = os.environ.get("SLURM_JOB_ID", "")
    if not slurm_job.isdecimal():
        raise CommandError("there is no SLURM_JOB_ID: this command is Slurm's", exit_code=Exit.USAGE)
    client = connect()
    task = Task(client, slurm_job, dict(os.environ))
    if task.checkpoint and task.restarts and (checkpoint := task.last_checkpoint()) is not None:
        task.go_on_from(checkpoint)
    task.start(command)


def walltime(variables: Mapping[str, str], now: float) -> float | None:
    """Seconds until Slurm ends the job. None: there is no limit, or this version does not pass it to tasks. Nobody
    requests it of the controller: all tasks of a large job would at once."""
    end = variables.get("SLURM_JOB_END_TIME", "")
    left = float(end) - now if end.isdecimal() and len(end) <= MOST_DIGITS else 0.0
    return left if 0.0 < left <= MOST_WALLTIME else None


class Task:
    """One task of a job. `variables`: Slurm's."""

    def __init__(self, client: Client, slurm_job: str, variables: Mapping[str, str]) -> None:
        self._client = client
        self._slurm_job = slurm_job
        self._variables = variables
        self._steering = threading.Lock()
        self._wanted: Wanted = "running"  # by Slurm's last signal
        self._is_steered = False  # a thread brings it there
        self.checkpoint = variables.get("XMIG_SLURM_CHECKPOINT", "")  # seconds; empty: none
        self.strict = variables.get("XMIG_SLURM_MODE") == "strict"
        self.external_id = f"slurm:{slurm_job}"
        self.step = ".".join(
            variables.get(name, default) for name, default in (("SLURM_STEP_ID", "batch"), ("SLURM_PROCID", "0"))
        )
        restarts = variables.get("SLURM_RESTART_COUNT", "")
        self.restarts = int(restarts) if restarts.isdecimal() else 0
        self.job = ""  # xMIG's

    # --- the first time -----------------------------------------------------------------------------------------------

    def start(self, command: list[str]) -> NoReturn:
        """Raises XmigError."""
        labels = {
            name.lower(): self._variables.get(f"SLURM_JOB_{name}", "") for name in ("USER", "PARTITION", "NAME")
        } | {"step": self.step, "restarts": str(self.restarts)}  # fmt: skip
        body: dict[str, Any] = {
            "name": _label(labels["name"]), "command": readable(shlex.join(command))[:4096], "watch": True,
            "strict": self.strict, "external_id": self.external_id, "device": self.devices(),
            "labels": {key: _label(value) for key, value in labels.items() if value},
        }  # fmt: skip
        if (left := walltime(self._variables, time.time())) is not None:
            body["walltime_s"] = left
        job, environment = register_job(self._client, body)
        self.job = job["id"]
        path = f"/v1/jobs/{self.job}:exited"

        def report(status: int) -> None:
            ended = {"exit_signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {
                "exit_code": os.WEXITSTATUS(status)}  # fmt: skip
            self._client.post(path, ended)

        prepare = None
        if self.checkpoint:
            environment["XMIG_CHECKPOINT_WHOLE"] = "1"
            prepare = _lead
            self._keep_checkpoints()
        try:
            if self.strict:
                from xmigd.cli.strict import run_strictly

                status = run_strictly(command, environment, self._client, self.job, self.reactions())
            else:
                status = launch(command, environment, prepare, self.reactions())
        except OSError as failure:
            with contextlib.suppress(XmigError):
                report(Exit.NOT_EXECUTABLE << 8)
            raise CommandError(
                f"{command[0]!r} cannot be started: {failure.strerror}", exit_code=Exit.NOT_EXECUTABLE
            ) from None
        tell(report, status)
        end_as(status)

    def devices(self) -> str | None:
        """xMIG's, by the numbers of Slurm's GRES; None: it has none, and xMIG chooses. Raises CommandError."""
        step = self._variables.get("SLURM_STEP_GPUS", "")
        given = step or self._variables.get("SLURM_JOB_GPUS", "")
        if not given:
            return None
        known = [each for each in self._client.get("/v1/devices") if each["configured"]]
        kinds = [each["kind"] for each in known]
        kind = "cuda" if "cuda" in kinds or not kinds else kinds[0]
        numbers = given.split(",")
        lacking = [each for each in numbers if f"{kind}:{each}" not in {one["id"] for one in known}]
        if lacking:
            raise CommandError(
                f"Slurm gave the job GPU {lacking[0]}, and xMIG has no device {kind}:{lacking[0]}",
                hint="give xmigd the devices of gres.conf, in the same order (XMIG_DEVICES)", exit_code=Exit.NOT_FOUND,
            )  # fmt: skip
        return f"{kind}:{','.join(numbers)}"

    def _keep_checkpoints(self) -> None:
        seconds = int(self.checkpoint)
        if seconds:
            path = f"/v1/jobs/{self.job}/checkpoint-policy"
            self._client.put(path, {"every_minutes": seconds / 60, "keep": KEPT}, "*")

    # --- after a requeue ----------------------------------------------------------------------------------------------

    def _own_jobs(self) -> list[dict[str, Any]]:
        """xMIG's jobs of this task, the newest first. Root sees those of everybody."""
        found = self._client.get("/v1/jobs", external_id=self.external_id, limit=1000)
        return [each for each in found if each["uid"] == os.geteuid() and each["labels"].get("step") == self.step]

    def last_checkpoint(self) -> str | None:
        """Of this task, by an earlier start of the job. What still runs of that is ended: its node was lost to Slurm
        only."""
        jobs = self._own_jobs()
        for each in jobs:
            if each["processes"]:
                self._client.delete(f"/v1/jobs/{each['id']}")
        end = time.monotonic() + RESTART_PATIENCE
        while any(each["processes"] for each in self._own_jobs()) and time.monotonic() < end:
            time.sleep(INTERVAL)
        made = [one for each in jobs for one in self._client.get("/v1/checkpoints", job=each["id"])]
        return max(made, key=lambda one: float(one["created_at"]))["id"] if made else None

    def go_on_from(self, checkpoint: str) -> NoReturn:
        """Raises XmigError: it cannot be restored."""
        devices = self.devices()
        named: list[str] = []
        if devices is not None:
            kind, _, numbers = devices.partition(":")
            named = [f"{kind}:{number}" for number in numbers.split(",")]
        operation = self._finished(self._restoring(checkpoint, named))
        self.job, root = operation["result"]["job"], int(operation["result"]["root"])
        with contextlib.closing(Fd(os.pidfd_open(root))) as pidfd:
            started = pidfds.start_time(root)
            self._client.patch(f"/v1/jobs/{self.job}", {"labels": {"restarts": str(self.restarts)}}, "*")
            self._keep_checkpoints()
            reactions = dict(self.reactions(root))
            for number in PASSED_ON - reactions.keys():
                reactions[number] = partial(_signal_group, root, number)
            signal.pthread_sigmask(signal.SIG_BLOCK, reactions.keys())
            while not select.select([pidfd.fileno()], [], [], 0)[0]:
                got = signal.sigtimedwait(reactions.keys(), INTERVAL)
                if got is not None:
                    reactions[signal.Signals(got.si_signo)]()
            status = exits.exit_status(pidfd, root, started)
        if status is None:
            print("xmigctl: this kernel does not say how the restored program ended", file=sys.stderr)
        end_as(status or 0)

    def _restoring(self, checkpoint: str, devices: list[str]) -> dict[str, Any]:
        """Files that the task has written to since are brought back to where they were: Slurm's own lines in the
        output among them, and what the task will write again."""
        for _ in range(MOST_FILES):
            try:
                return self._client.start(f"/v1/checkpoints/{checkpoint}:restore", {"devices": devices})
            except Refused as refused:
                grown = GROWN.match(str(refused.problem.get("detail")))
                if refused.code != "file_changed" or grown is None:
                    raise
                os.truncate(grown[1], int(grown[2]))
        raise CommandError("its files are written to by somebody else", exit_code=Exit.REFUSED)

    # --- Slurm's signals ----------------------------------------------------------------------------------------------

    def reactions(self, restored: int = 0) -> Reactions:
        """`restored`: the first process of what was restored."""
        does: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGTSTP: partial(self._steer, "suspended", restored),
            signal.SIGCONT: partial(self._steer, "running", restored),
        }
        if self.checkpoint:
            does[signal.SIGTERM] = self._aside(self._terminate)
        return does

    def _aside(self, work: Callable[[], None]) -> Callable[[], None]:
        busy = threading.Lock()

        def carry_out() -> None:
            with busy:
                _try(work)

        def react() -> None:
            if not busy.locked():
                threading.Thread(target=carry_out, name="terminating", daemon=True).start()

        return react

    def _steer(self, wanted: Wanted, restored: int) -> None:
        """The last signal counts, also if what an earlier one has begun is still under way."""
        if restored:  # nobody else stops it, or lets it go on
            _signal_group(restored, signal.SIGSTOP if wanted == "suspended" else signal.SIGCONT)
        with self._steering:
            self._wanted = wanted
            if not self._is_steered:
                self._is_steered = True
                threading.Thread(target=self._follow_signals, name="steering", daemon=True).start()

    def _follow_signals(self) -> None:
        done: Wanted | None = None
        while True:
            with self._steering:
                wanted = self._wanted
                if wanted == done:
                    self._is_steered = False
                    return
            _try(self._suspend if wanted == "suspended" else self._resume)
            done = wanted

    def _suspend(self) -> None:
        body = {"deadline_seconds": SUSPENDED_WITHIN, "prefer": "suspend"}
        with contextlib.suppress(Refused):  # it has no program yet, or the prolog of another job was earlier
            self._client.start(f"/v1/jobs/{self.job}:preempt", body)

    def _resume(self) -> None:
        """Slurm has let it go on. Its preemption may still be under way, and the device may still be another's."""
        while self._wanted == "running":
            job = self._client.get(f"/v1/jobs/{self.job}")
            if job["state"] == "suspended":
                with contextlib.suppress(Refused):
                    self._client.start(f"/v1/jobs/{self.job}:continue", {"devices": []})
            elif not self._client.get("/v1/operations", job=self.job, kind="preemption", state="running", limit=1):
                return
            time.sleep(INTERVAL)

    def _terminate(self) -> None:
        """Slurm ends the job, and after KillWait by SIGKILL."""
        if controller.restarts(self._slurm_job) > self.restarts:
            try:
                self._finished(self._client.start("/v1/checkpoints", {"job": self.job, "stop": True}))
                return
            except XmigError as error:
                print(f"xmigctl: no checkpoint was made: {error}", file=sys.stderr, flush=True)
        self._client.delete(f"/v1/jobs/{self.job}")

    def _finished(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Raises XmigError: it has not succeeded."""
        silent_since = time.monotonic()
        while operation["state"] not in OVER:
            time.sleep(INTERVAL)
            try:
                operation = self._client.get(f"/v1/operations/{operation['id']}")
                silent_since = time.monotonic()
            except NoDaemon:  # it is being restarted
                if time.monotonic() - silent_since > RESTART_PATIENCE:
                    raise
        if operation["state"] != "succeeded":
            error = operation["error"] or {}
            raise CommandError(
                str(error.get("detail") or f"the {operation['kind']} has {operation['state']}"),
                hint=str(error.get("hint") or ""), exit_code=Exit.OPERATION_FAILED,
            )  # fmt: skip
        return operation


def _try(work: Callable[[], None]) -> None:
    try:
        work()
    except XmigError as error:
        with contextlib.suppress(OSError, ValueError):
            print(f"xmigctl: {error}", file=sys.stderr, flush=True)


def _lead() -> None:
    """A session and a process group of its own: what is restored gets them again, and can be stopped as a whole."""
    os.setsid()


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _label(value: str) -> str:
    """What a label may have."""
    return "".join(each if (each.isprintable() and not each.isspace()) or each == " " else "?" for each in value)[:255]
