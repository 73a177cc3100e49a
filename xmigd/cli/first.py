"""The first process of a job that has a pid namespace of its own: it starts the program, and waits for what has lost
its parent. It is dumped with the program, so it is as small as it can be: a script that imports nothing of xMIG.

`first.py INSTRUCTIONS COMMAND...`; the instructions are JSON: `status`, a descriptor into which it writes how the
program ended (`exited CODE` or `killed SIGNAL`); `blocked`, signals that the program is to find
blocked; `ignored`, those that it is to ignore; `passed_on`, those that go to the program; `preload`, its LD_PRELOAD.
"""

import json
import os
import signal
import sys


def main() -> int:
    given = json.loads(sys.argv[1])
    command = sys.argv[2:]
    passed_on = {*given["passed_on"], signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    program = os.fork()
    if program == 0:
        _become(given, command)
    while True:
        got = signal.sigwaitinfo(passed_on)
        if got.si_signo != signal.SIGCHLD:
            os.kill(program, got.si_signo)  # which is there until it was waited for, below
            continue
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == program:
                return _report(given["status"], status)


def _become(given: dict[str, object], command: list[str]) -> None:
    os.close(given["status"])  # type: ignore[arg-type]
    for number in given["ignored"]:  # type: ignore[attr-defined]
        signal.signal(number, signal.SIG_IGN)
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, given["blocked"])  # type: ignore[arg-type]
    if given["preload"]:
        os.environ["LD_PRELOAD"] = str(given["preload"])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"xmigctl: {command[0]!r} cannot be started: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _report(descriptor: int, status: int) -> int:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        os.pwrite(descriptor, b"killed %d" % number, 0)
        return 128 + number
    os.pwrite(descriptor, b"exited %d" % os.WEXITSTATUS(status), 0)
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    os._exit(main())
