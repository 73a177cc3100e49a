"""Several streams that wait for each other by events, with copies in both directions beside the kernels."""

from __future__ import annotations

import torch
import workload
from torch_workload import DEVICE, digest, memory, prepare

parser = workload.arguments(__doc__, steps=100)
parser.add_argument("--streams", type=int, default=4)
parser.add_argument("--size", type=int, default=512)
options = parser.parse_args()
prepare(options)

size = options.size
streams = [torch.cuda.Stream(priority=-(i % 2)) for i in range(options.streams)]
chance = torch.Generator().manual_seed(options.seed)
sources = [torch.randn(size, size, generator=chance).pin_memory() for _ in streams]
results = [torch.empty(size, size, pin_memory=True) for _ in streams]
state = torch.eye(size, device=DEVICE)
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record()
steps = workload.Steps(options, torch.cuda.synchronize)
for _ in steps:
    parts, done = [], []
    ready = torch.cuda.current_stream().record_event()
    for stream, source, result in zip(streams, sources, results, strict=True):
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            part = (source.to(DEVICE, non_blocking=True) @ state).tanh()
            result.copy_(part, non_blocking=True)
            part.record_stream(torch.cuda.current_stream())
            parts.append(part)
            done.append(stream.record_event())
    for event in done:
        torch.cuda.current_stream().wait_event(event)
    state = torch.stack(parts).mean(0)
end.record()
torch.cuda.synchronize()
workload.report(
    options, sha256=digest([state, *results]), measured=begin.elapsed_time(end) > 0, **steps.figures(), **memory()
)
