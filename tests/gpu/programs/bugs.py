"""Bugs of a program's own, each in a process of its own: what the calls after it are informed, and, where launches
block (CUDA_LAUNCH_BLOCKING), which call it is that reports the error first."""

from __future__ import annotations

import json
import os

import torch
import workload

parser = workload.arguments(__doc__, steps=0)
options = parser.parse_args()

SOURCES = {
    "store": 'extern "C" __global__ void bug(float* p) { *(volatile long long*)16 = 1; }',
    "misaligned": 'extern "C" __global__ void bug(float* p) { *(volatile long long*)((char*)p + 1) = 1; }',
    "trap": 'extern "C" __global__ void bug(float* p) { asm volatile("trap;"); }',
}


def reported(kind: str, *, blocking: bool) -> list[str]:
    if blocking:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    x = torch.randn(100, 16, device="cuda")
    torch.cuda.synchronize()

    done = []

    def add() -> None:
        for _ in range(50):
            x.add_(1)
            done.append("add")

    def inject() -> None:
        add()
        if kind == "index":
            x[torch.tensor([1000], device="cuda")].sum()
        else:
            torch.cuda._compile_kernel(SOURCES[kind], "bug")((1, 1, 1), (1, 1, 1), (x,))
        add()

    reported = []
    for call in (inject, torch.cuda.synchronize, lambda: x.sum().item(), lambda: torch.zeros(1, device="cuda").item()):
        try:
            call()
            reported.append("nothing")
        except RuntimeError as error:
            # Where launches block, the launch tells of it or, seldom, and natively, the next one. That is another
            # caller of the driver, with a class of its own.
            kind_of_error = "error" if blocking and call is inject else type(error).__name__
            reported.append(f"{kind_of_error}: {str(error).splitlines()[0]}")
    # Whether the first call is informed already is a matter of time, unless launches block.
    return [f"{len(done)} launches before", *reported] if blocking else reported[1:]


answers = {}
for kind in ("index", *SOURCES):
    for blocking in (False, True):
        answer, ours = os.pipe()
        if os.fork() == 0:
            os.write(ours, json.dumps(reported(kind, blocking=blocking)).encode())
            os._exit(0)  # not through destructors, which natively abort
        os.close(ours)
        answers[f"{kind}, blocking" if blocking else kind] = os.fdopen(answer)
workload.report(
    options, reported={kind: json.loads(answer.read() or '["it died"]') for kind, answer in answers.items()}
)
