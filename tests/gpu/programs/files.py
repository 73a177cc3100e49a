"""Which device files and libraries of the driver a training program holds, while it trains."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
import workload
from torch import nn
from torch_workload import DEVICE, prepare

parser = workload.arguments(__doc__, steps=20)
options = parser.parse_args()
prepare(options)

model = nn.Linear(64, 64).to(DEVICE)
nvml = ctypes.CDLL("libnvidia-ml.so.1")  # what monitors of training programs open
nvml.nvmlInit_v2()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
found: set[str] = set()
steps = workload.Steps(options, torch.cuda.synchronize)
for _ in steps:
    model(torch.randn(8, 64, device=DEVICE)).square().mean().backward()
    optimizer.step()
    torch.cuda.mem_get_info()
    links = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    maps = [line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()]
    found |= {name for name in (*links, *(name[0] for name in maps if name)) if "/dev/nvidia" in name}
workload.report(options, device_files=sorted(found), **steps.figures())
