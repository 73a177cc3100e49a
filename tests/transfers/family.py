"""A CUDA program with two children: `family.py OUTPUT STEPS PAUSE`. One has a device, too, and does the same, with
OUTPUT.child. The other one has none, and answers through a pipe as long as the program runs; at the end OUTPUT.talk has
how often that went well. All of it is client.py."""

import runpy
import subprocess
import sys
import threading
from pathlib import Path

CLIENT = Path(__file__).with_name("client.py")
ANSWERS = "import sys\nfor line in sys.stdin: print(int(line) + 1, flush=True)"
output, *rest = sys.argv[1:]
child = subprocess.Popen([sys.executable, CLIENT, f"{output}.child", *rest])
worker = subprocess.Popen([sys.executable, "-c", ANSWERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
over = threading.Event()
wrong, answers = 0, 0


def talk() -> None:
    global wrong, answers
    assert worker.stdin is not None
    assert worker.stdout is not None
    while not over.wait(0.01):
        print(answers, file=worker.stdin, flush=True)
        wrong += int(worker.stdout.readline()) != answers + 1
        answers += 1


talking = threading.Thread(target=talk)
talking.start()
sys.argv = [str(CLIENT), output, *rest]
runpy.run_path(str(CLIENT))
over.set()
talking.join()
worker.stdin.close()  # type: ignore[union-attr]
codes = child.wait(), worker.wait()
Path(f"{output}.talk").write_text(f"{answers > 0} {wrong} {codes}")
