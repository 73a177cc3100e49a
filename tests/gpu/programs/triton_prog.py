"""Triton's own kernels: addition, and a softmax over rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
import workload
from torch_workload import DEVICE, digest, memory, prepare


@triton.jit
def add_kernel(x, y, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax_kernel(x, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * columns + at, mask=at < columns, other=-float("inf"))
    power = tl.exp(row - tl.max(row, axis=0))
    tl.store(out + tl.program_id(0) * columns + at, power / tl.sum(power, axis=0), mask=at < columns)


parser = workload.arguments(__doc__, steps=50)
parser.add_argument("--rows", type=int, default=1024)
parser.add_argument("--columns", type=int, default=1000)
options = parser.parse_args()
prepare(options)

chance = torch.Generator().manual_seed(options.seed)
x, y = (torch.randn(options.rows, options.columns, generator=chance).to(DEVICE) for _ in range(2))
total, soft = torch.empty_like(x), torch.empty_like(x)
steps = workload.Steps(options, torch.cuda.synchronize)
for _ in steps:
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, total, x.numel(), BLOCK=1024)
    softmax_kernel[(options.rows,)](total, soft, options.columns, BLOCK=triton.next_power_of_2(options.columns))
error = (soft - torch.softmax(x + y, 1)).abs().max().item()
workload.report(options, sha256=digest([total, soft]), error=error, **steps.figures(), **memory())
