"""Daemons that start fast: a process that has imported everything forks one for each line `{"env": ..., "log": ...}`
on its standard input, and answers with its pid. Nothing but the time to import is saved; each is a daemon like any."""

from __future__ import annotations

import json
import os
import signal
import sys

from xmigd import daemon, failpoints
from xmigd.main import main


def become_a_daemon(environment: dict[str, str], log: str) -> None:
    os.setsid()
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_APPEND), (2, os.O_WRONLY | os.O_APPEND)):
        fd = os.open(os.devnull if number == 0 else log, flags | (os.O_CREAT if number else 0), 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    failpoints.arm(environment.get("XMIG_FAILPOINT", ""))
    sys.argv = ["xmigd"]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    main()


assert daemon.logger is not None  # to import it is what takes the time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for them
for line in sys.stdin:
    wanted = json.loads(line)
    pid = os.fork()
    if pid == 0:
        become_a_daemon(wanted["env"], wanted["log"])
        os._exit(0)
    print(pid, flush=True)
