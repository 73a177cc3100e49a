"""A job is registered, and what its program's environment becomes: for the commands that start programs."""

from __future__ import annotations

import os
from typing import Any

from xmigd import naming
from xmigd.client import Client
from xmigd.devices.visible import names_devices


def register_job(client: Client, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Register the job of `body`, which gets the devices of CUDA_VISIBLE_DEVICES unless it names its own. Returns the
    answer, and the environment of its program: ours, and what makes it one under xMIG. Raises XmigError."""
    inherited = dict(os.environ)
    inherited.pop("XMIG_STDERR", None)
    inherited.pop("XMIG_MOVABLE", None)  # what a movable program starts is in its namespaces anyway
    if body.get("device") is not None:
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
    elif names_devices(inherited.get("CUDA_VISIBLE_DEVICES", "")):
        body = body | {"visible_devices": readable(inherited.pop("CUDA_VISIBLE_DEVICES"))}
    job = client.post("/v1/jobs", body)
    # Daemons of earlier versions do not tell everything.
    defaults = {} if inherited.get("XMIG_CACHED_BLOCKS") == "keep" else job.get("defaults", {})
    environment = defaults | inherited | job["environment"]
    for variable, ours in (("LD_PRELOAD", job["preload"]), ("LD_LIBRARY_PATH", job.get("library_path"))):
        theirs = inherited.get(variable)
        if ours is not None:
            environment[variable] = f"{ours}:{theirs}" if theirs else ours
    if (stderr := _own_stderr()) is not None:
        environment["XMIG_STDERR"] = stderr
    return job, environment


def name_optimizer_state(environment: dict[str, str], entries: str) -> None:
    """The Python programs of this environment name these entries of the state of PyTorch's optimizers, separated by
    commas (naming/sitecustomize.py)."""
    folder, theirs = os.path.dirname(naming.__file__), environment.get("PYTHONPATH")
    environment["XMIG_LOSSY_OPTIMIZER_STATE"] = entries
    if theirs is None or folder not in theirs.split(":"):
        environment["PYTHONPATH"] = f"{folder}:{theirs}" if theirs else folder


def _own_stderr() -> str | None:
    """The file that is this command's standard error, for the shim: is the program's descriptor 2 still the same?"""
    try:
        status = os.fstat(2)
    except OSError:
        return None
    return f"{status.st_dev}:{status.st_ino}"


def readable(words: str) -> str:
    """Bytes of the command line that are not UTF-8, as \\xff and the like: the program gets them as they are."""
    return os.fsencode(words).decode(errors="backslashreplace")
