"""How `xmigctl run` starts a program, so that its exit code is known to the daemon as it is to whoever called us.

Where the kernel tells the daemon how a process ended (Linux 6.15), the program takes this process's place: nothing is
in between. Elsewhere only a parent learns it: this process stays, passes on the signals that are sent to it, waits,
reports, and ends as the program did. If it is killed, the program is, too, as it would be in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from xmigd.client import RESTART_PATIENCE, NoDaemon
from xmigd.errors import XmigError

Report = Callable[[int], None]  # a wait status; raises XmigError
Reactions = Mapping[signal.Signals, Callable[[], None]]  # what a signal does instead of being passed on; must not wait
# What a terminal sends goes to the whole group, and so to the program itself. What somebody sends to this process is
# for the program.
PASSED_ON = frozenset({
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGWINCH,
})  # fmt: skip
PR_SET_PDEATHSIG = 1


def become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Raises OSError: it cannot be started."""
    os.execvpe(command[0], command, environment)


def wait_for(
    command: list[str], environment: Mapping[str, str], report: Report, reactions: Reactions | None = None
) -> NoReturn:
    """Run it, and end as it did. Raises OSError: it cannot be started."""
    status = run(command, environment, reactions=reactions)
    tell(report, status)
    end_as(status)


def run(
    command: list[str], environment: Mapping[str, str], prepare: Callable[[], None] | None = None,
    reactions: Reactions | None = None, started: Callable[[int], None] | None = None, passes_all: bool = False,
    entered: Callable[[], None] | None = None, kept: Collection[int] = (),
) -> int:  # fmt: skip
    """Run it and wait for its end: the wait status. What is sent to this process is passed on from its first moment,
    and stays blocked afterwards. `prepare`: what the child does before it becomes the program; OSError keeps it from
    that. `reactions`: to signals that the program ignores unless it says otherwise itself: a scheduler sends them to
    all processes of a job. `started`: what this process does when there is a child, with its pid. `entered`: when that
    has become the program. `passes_all`: also what a terminal sends, because the child has a session of its own.
    `kept`: descriptors that the program inherits. Raises OSError: it cannot be started."""
    reactions = reactions or {}
    waited_for = PASSED_ON | {signal.SIGCHLD} | reactions.keys()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _die_with(parent)
        for number in reactions:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            if prepare is not None:
                prepare()
            for fd in kept:
                os.set_inheritable(fd, True)
            os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(writing, str(error.errno).encode())
        os._exit(127)
    os.close(writing)
    if started is not None:
        started(child)
    with open(reading, "rb") as reported:
        failed = reported.read()
    if failed:
        os.waitpid(child, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise OSError(int(failed), os.strerror(int(failed)))
    if entered is not None:
        entered()
    return _wait(child, waited_for, reactions, passes_all)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent, 0):  # it was gone before that was set; 0: it is in another pid namespace
        os._exit(128 + signal.SIGKILL)


def _wait(child: int, signals: frozenset[signal.Signals], reactions: Reactions, passes_all: bool) -> int:
    while True:
        got = signal.sigwaitinfo(signals)
        if got.si_signo == signal.SIGCHLD:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status
        elif (react := reactions.get(signal.Signals(got.si_signo))) is not None:
            react()
        elif passes_all or (got.si_code <= 0 and got.si_pid != child):  # a process has sent it, not the terminal
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, got.si_signo)


def tell(report: Report, status: int) -> None:
    """Now, or where no daemon answers by a process that goes on trying for as long as a restart takes."""
    try:
        report(status)
    except NoDaemon:
        if os.fork() == 0:
            _keep_trying(report, status)
    except XmigError as error:
        print(f"xmigctl: the end of the job was not taken: {error}", file=sys.stderr)


def _keep_trying(report: Report, status: int) -> NoReturn:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # whoever reads the program's output is not to wait for us
        os.dup2(nothing, fd)
    end = time.monotonic() + RESTART_PATIENCE
    while time.monotonic() < end:
        time.sleep(0.2)
        try:
            report(status)
        except NoDaemon:
            continue
        except XmigError:
            break
        break
    os._exit(0)


def end_as(status: int) -> NoReturn:
    """As the program did, whose wait status this is."""
    sys.stdout.flush()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left its own
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))
