"""ResNet-50 trained with cuDNN: channels last, bf16 autocast, SGD with momentum."""

from __future__ import annotations

import torch
import workload
from torch import nn
from torch.nn import functional
from torch_workload import DEVICE, digest, memory, numbers, prepare


def convolution(inside: int, outside: int, size: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(outside))


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce, self.spatial = convolution(inside, width, 1), convolution(width, width, 3, stride)
        self.expand = convolution(width, 4 * width, 1)
        same = stride == 1 and inside == 4 * width
        self.shortcut = nn.Identity() if same else convolution(inside, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.spatial(functional.relu(self.reduce(x))))
        return functional.relu(self.expand(inner) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, depths: list[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, inside = [], width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                blocks.append(Bottleneck(inside, width << stage, 2 if stage and not i else 1))
                inside = 4 * width << stage
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


parser = workload.arguments(__doc__, steps=40)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--image", type=int, default=224)
parser.add_argument("--depths", default="3,4,6,3", help="blocks of each stage")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--classes", type=int, default=1000)
options = parser.parse_args()
prepare(options)

model = ResNet([int(n) for n in options.depths.split(",")], options.width, options.classes)
model = model.to(DEVICE, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
chance = torch.Generator().manual_seed(options.seed + 1)
images = torch.randn(options.batch, 3, options.image, options.image, generator=chance).pin_memory()
losses = []
steps = workload.Steps(options, torch.cuda.synchronize)
for _ in steps:
    steps.status.phase("copy")
    x = images.to(DEVICE, non_blocking=True, memory_format=torch.channels_last)
    y = torch.randint(options.classes, (options.batch,), generator=chance).pin_memory().to(DEVICE, non_blocking=True)
    steps.status.phase("forward")
    with torch.autocast(DEVICE, torch.bfloat16):
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
