"""A DataLoader with worker processes and pinned batches, copied with non_blocking."""

from __future__ import annotations

import torch
import workload
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torch_workload import DEVICE, digest, memory, numbers, prepare


class Images(Dataset[tuple[torch.Tensor, int]]):
    """The same image for the same index, whichever worker makes it."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        chance = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=chance), index % 10


def main() -> None:
    parser = workload.arguments(__doc__, steps=60, warmup=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start", choices=["fork", "spawn", "forkserver"], default="fork")
    options = parser.parse_args()
    prepare(options)

    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images = Images(options.batch * (options.warmup + options.steps), options.image)
    loader = DataLoader(
        images, options.batch, shuffle=True, num_workers=options.workers, pin_memory=True, persistent_workers=True,
        multiprocessing_context=options.start, generator=torch.Generator().manual_seed(options.seed),
    )  # fmt: skip
    losses = []
    steps = workload.Steps(options, torch.cuda.synchronize)
    for _, (x, y) in zip(steps, loader, strict=True):
        steps.status.phase("copy")
        x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
        steps.status.phase("forward")
        loss = functional.cross_entropy(model(x), y)
        steps.status.phase("backward")
        loss.backward()
        steps.status.phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    workload.report(
        options, losses=numbers(losses), sha256=digest(model.state_dict().values()), **steps.figures(), **memory()
    )


if __name__ == "__main__":  # spawned workers import this file
    main()
