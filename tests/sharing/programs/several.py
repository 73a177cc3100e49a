"""Starts the processes of a job: `several.py COUNT PROGRAM`, or one more at a line `start`. A line `1 take 4` goes to
process 1; its answer is printed. `all take 4` goes to each at once; so many answers are printed, in their order."""

import subprocess
import sys
from pathlib import Path

HOLDS = Path(__file__).parent / "holds.py"
children: list[subprocess.Popen[str]] = []


def start() -> None:
    children.append(subprocess.Popen([sys.executable, HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))


def tell(child: subprocess.Popen[str], words: str) -> None:
    assert child.stdin is not None
    child.stdin.write(words + "\n")
    child.stdin.flush()


def reply(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip() or "it has ended"


for _ in range(int(sys.argv[1])):
    start()
began = [reply(child) for child in children]
assert set(began) <= {"ready"}, began
print(*[child.pid for child in children], flush=True)
for line in sys.stdin:
    whom, _space, words = line.strip().partition(" ")
    if whom == "start":
        start()
        print(reply(children[-1]), children[-1].pid, flush=True)
    elif whom == "end":
        child = children[int(words)]
        child.communicate()
        print(child.returncode, flush=True)
    elif whom == "all":
        for child in children:
            tell(child, words)
        print(*[reply(child) for child in children], flush=True)
    else:
        child = children[int(whom)]
        tell(child, words)
        print(reply(child), flush=True)
