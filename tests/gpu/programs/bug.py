"""A program's own bug: an index outside of a table, and what it is told, then and afterwards."""

from __future__ import annotations

import torch
import workload
from torch_workload import DEVICE, prepare

parser = workload.arguments(__doc__, steps=0)
parser.add_argument("--times", type=int, default=2)
options = parser.parse_args()
prepare(options)

table = torch.randn(100, 16, device=DEVICE)
good = torch.arange(50, device=DEVICE)
before = table[good].sum().item()
told = []
for _ in range(options.times):
    try:
        table[good + 1000].sum().item()
        told.append("nothing")
    except RuntimeError as error:
        told.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
workload.report(options, told=told, before=before)
