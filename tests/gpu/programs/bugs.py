"""Bugs of a program's own, each in a process of its own: what the calls after it are told."""

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


def told(kind: str) -> list[str]:
    x = torch.randn(100, 16, device="cuda")
    torch.cuda.synchronize()

    def strike() -> None:
        for _ in range(50):
            x.add_(1)
        if kind == "index":
            x[torch.tensor([1000], device="cuda")].sum()
        else:
            torch.cuda._compile_kernel(SOURCES[kind], "bug")((1, 1, 1), (1, 1, 1), (x,))
        for _ in range(50):
            x.add_(1)

    said = []
    for call in (strike, torch.cuda.synchronize, lambda: x.sum().item(), lambda: torch.zeros(1, device="cuda").item()):
        try:
            call()
            said.append("nothing")
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    # Whether the first call is told already is a matter of time.
    return said[1:]


answers = {}
for kind in ("index", *SOURCES):
    answer, ours = os.pipe()
    if os.fork() == 0:
        os.write(ours, json.dumps(told(kind)).encode())
        os._exit(0)  # not through destructors, which natively abort
    os.close(ours)
    answers[kind] = os.fdopen(answer)
workload.report(options, told={kind: json.loads(answer.read() or '["it died"]') for kind, answer in answers.items()})
