"""A model whose halves are on two devices, in training: activations go over, gradients come back."""

from __future__ import annotations

import torch_workload
import workload

parser = workload.arguments(__doc__, steps=1500, warmup=0, block=10)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--batch", type=int, default=256)
options = parser.parse_args()

import torch  # noqa: E402
from torch import nn  # noqa: E402

if torch.cuda.device_count() < 2:
    raise SystemExit(f"it needs two devices, and sees {torch.cuda.device_count()}")
torch_workload.prepare(options)
FRONT, BACK = torch.device("cuda:0"), torch.device("cuda:1")
front = nn.Sequential(nn.Linear(options.width, 2 * options.width), nn.ReLU()).to(FRONT)
back = nn.Sequential(nn.Linear(2 * options.width, options.width), nn.ReLU(), nn.Linear(options.width, 10)).to(BACK)
optimizer = torch.optim.AdamW([*front.parameters(), *back.parameters()])
source = torch.Generator().manual_seed(options.seed)
batches = [torch.randn(options.batch, options.width, generator=source).pin_memory() for _ in range(8)]
losses: list[torch.Tensor] = []


def synchronize() -> None:
    for device in (FRONT, BACK):
        torch.cuda.synchronize(device)


steps = workload.Steps(options, synchronize)
for step in steps:
    steps.status.phase("copy")
    batch = batches[step % len(batches)].to(FRONT, non_blocking=True)
    steps.status.phase("forward")
    loss = back(front(batch).to(BACK)).square().mean()
    steps.status.phase("backward")
    loss.backward()
    steps.status.phase("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
workload.report(
    options, losses=torch_workload.numbers(losses),
    sha256=torch_workload.digest([*front.parameters(), *back.parameters()]),
    peer=torch.cuda.can_device_access_peer(0, 1), **steps.figures(),
)  # fmt: skip
