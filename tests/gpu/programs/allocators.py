"""The caching allocator under stress: sizes of every kind, freed in any order, a step that runs out of memory.

Which allocator it is says PYTORCH_CUDA_ALLOC_CONF, as for any PyTorch program.
"""

from __future__ import annotations

import random

import torch
import workload
from torch_workload import DEVICE, digest, memory, prepare

parser = workload.arguments(__doc__, steps=200, warmup=20, block=20)
parser.add_argument("--mib", type=int, default=2048, help="memory that is live at a time")
options = parser.parse_args()
prepare(options)

chance = random.Random(options.seed)
live: list[torch.Tensor] = []
held, refused = 0, 0
steps = workload.Steps(options, torch.cuda.synchronize)
for number in steps:
    length = int(2 ** chance.uniform(4, 26 if options.mib > 512 else 20))
    live.append(torch.full((length,), float(number), device=DEVICE))
    held += 4 * length
    while held > options.mib << 20:
        gone = live.pop(chance.randrange(len(live)))
        held -= 4 * len(gone)
    if number % 64 == 63:
        try:
            torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)
        except torch.OutOfMemoryError:
            refused += 1
        torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
workload.report(
    options, backend=torch.cuda.get_allocator_backend(), sha256=digest(live), refused=refused,
    sane=0 < free < total, **steps.figures(), **memory(),
)  # fmt: skip
