"""GPT-2-small trained eagerly: bf16 autocast, gradient clipping, AdamW."""

from __future__ import annotations

import torch
import workload
from torch_workload import Tokens, digest, gpt_arguments, make_gpt, memory, numbers, prepare

parser = workload.arguments(__doc__, steps=50)
gpt_arguments(parser)
parser.add_argument("--optimizer", choices=["foreach", "fused"], default="fused")
parser.add_argument("--ballast", type=float, default=0, metavar="GB", help="live memory that is not touched again")
parser.add_argument("--read", action="store_true", help="read every loss at once, as a program does that prints it")
options = parser.parse_args()
prepare(options)

model = make_gpt(options)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **{options.optimizer: True})
tokens = Tokens(options)
pieces = round(options.ballast * 1e9 / (64 << 20))
ballast = [torch.full((16 << 20,), float(i), device="cuda") for i in range(pieces)]
losses = []
steps = workload.Steps(options, torch.cuda.synchronize)
for _ in steps:
    steps.status.phase("copy")
    batch = tokens()
    steps.status.phase("forward")
    loss = model.loss(batch)
    steps.status.phase("backward")
    loss.backward()
    steps.status.phase("optimizer")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item() if options.read else loss.detach())
wrong = sum(bool((piece != i).any()) for i, piece in enumerate(ballast))
workload.report(
    options, losses=losses if options.read else numbers(losses), sha256=digest(model.state_dict().values()),
    corrupted=wrong, **steps.figures(), **memory(),
)  # fmt: skip
