"""Requests to Slurm's controller, through Slurm's own commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from xmigd.cli.exits import CommandError, Exit

PATIENCE = 30.0  # seconds for one command


def _slurm(program: str, *arguments: str) -> str:
    """Its output. Raises CommandError."""
    found = shutil.which(program) or shutil.which(program, path="/usr/bin:/usr/local/bin:/opt/slurm/bin")
    if found is None:
        raise CommandError(f"there is no {program} here", hint="put Slurm's commands into PATH", exit_code=Exit.FAILED)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        done = subprocess.run(
            [found, *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=PATIENCE, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise CommandError(f"{program} did not answer within {PATIENCE:g} s", exit_code=Exit.FAILED) from None
    if done.returncode != 0:
        why = done.stderr.strip() or f"exit code {done.returncode}"
        raise CommandError(f"{program} {' '.join(arguments)}: {why}", exit_code=Exit.FAILED)
    return done.stdout


def _field(text: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return "" if found is None else found[1]


def restarts(job: str) -> int:
    """How often it was requeued, also if its processes are just being ended for that. Raises CommandError."""
    number = _field(_slurm("scontrol", "--oneliner", "show", "job", job), "Restarts")
    return int(number) if number.isdecimal() else 0


def suspended(job: str) -> bool:
    """Does Slurm have it suspended? Raises CommandError."""
    return _field(_slurm("scontrol", "--oneliner", "show", "job", job), "JobState") == "SUSPENDED"


def node_state(node: str) -> tuple[set[str], str]:
    """Its state and flags in capitals, and the reason of a drain. Raises CommandError."""
    text = _slurm("scontrol", "--oneliner", "show", "node", node)
    reason = re.search(r" Reason=(.*?)(?: \[[^\[\]]*\])?\s*(?: Comment=.*)?$", text.strip())
    return set(re.split(r"[+*]", _field(text, "State"))), "" if reason is None else reason[1].strip()


def drain(node: str, reason: str) -> None:
    """No new jobs. Raises CommandError."""
    _slurm("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")


def resume(node: str) -> None:
    """Raises CommandError."""
    _slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
