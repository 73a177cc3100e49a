"""A small MLP: nothing but launches."""

from __future__ import annotations

import torch
import workload
from torch import nn
from torch.nn import functional
from torch_workload import DEVICE, digest, memory, numbers, prepare

parser = workload.arguments(__doc__, steps=1000, warmup=100, block=50)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--batch", type=int, default=64)
options = parser.parse_args()
prepare(options)

width = options.width
model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
model.to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
chance = torch.Generator().manual_seed(options.seed + 1)
x = torch.randn(options.batch, width, generator=chance).to(DEVICE)
y = torch.randint(10, (options.batch,), generator=chance).to(DEVICE)
losses = []
steps = workload.Steps(options, torch.cuda.synchronize)
for _ in steps:
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
workload.report(
    options, losses=numbers(losses), sha256=digest(model.state_dict().values()), **steps.figures(), **memory()
)
