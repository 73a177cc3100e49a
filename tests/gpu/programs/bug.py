"""A program's own bug: an index outside of a table, and what it is sent, then and afterwards."""

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
reported = []
for _ in range(options.times):
    try:
        table[good + 1000].sum().item()
        reported.append("nothing")
    except RuntimeError as error:
        reported.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
workload.report(options, reported=reported, before=before)
