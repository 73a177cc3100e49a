"""torch.compile: GPT-2's training step, its kernels made by Triton."""

from __future__ import annotations

import torch
import workload
from torch_workload import Tokens, digest, gpt_arguments, make_gpt, memory, numbers, prepare

parser = workload.arguments(__doc__, steps=50)
gpt_arguments(parser, layers=4)
parser.add_argument("--mode", choices=["default", "reduce-overhead"], default="default")
options = parser.parse_args()
prepare(options)

model = make_gpt(options)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
loss_of = torch.compile(model.loss, mode=options.mode)
tokens = Tokens(options)
losses = []
steps = workload.Steps(options, torch.cuda.synchronize)
for _ in steps:
    if options.mode == "reduce-overhead":
        torch.compiler.cudagraph_mark_step_begin()
    steps.status.phase("copy")
    batch = tokens()
    steps.status.phase("forward")
    loss = loss_of(batch)
    steps.status.phase("backward")
    loss.backward()
    steps.status.phase("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach().clone())
workload.report(
    options, losses=numbers(losses), sha256=digest(model.state_dict().values()), **steps.figures(), **memory()
)
