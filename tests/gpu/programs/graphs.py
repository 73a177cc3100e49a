"""CUDA graphs: a whole GPT-2 training step captured and replayed, or a model that make_graphed_callables made."""

from __future__ import annotations

import torch
import workload
from torch_workload import DEVICE, Tokens, digest, gpt_arguments, make_gpt, memory, numbers, prepare

parser = workload.arguments(__doc__, steps=100)
gpt_arguments(parser, batch=1, layers=4, width=256)
parser.add_argument("--kind", choices=["step", "callables"], default="step")
options = parser.parse_args()
prepare(options)

model = make_gpt(options)
tokens = Tokens(options)
static = tokens()
losses: list[torch.Tensor] = []
steps = workload.Steps(options, torch.cuda.synchronize)


def train_by_graph() -> None:
    """Forward, backward and optimizer in one graph."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)

    def step() -> torch.Tensor:
        loss = model.loss(static)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in steps:
        steps.status.phase("copy")
        static.copy_(tokens())
        steps.status.phase("replay")
        graph.replay()
        losses.append(loss.clone())


def train_by_callables() -> None:
    """The blocks' forward and backward as graphs, the rest eager."""
    sample = torch.randn(options.batch, options.context, options.width, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
        made = torch.cuda.make_graphed_callables(tuple(model.blocks), tuple((sample,) for _ in model.blocks))
        model.blocks = torch.nn.ModuleList(made)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in steps:
        steps.status.phase("copy")
        batch = tokens()
        steps.status.phase("replay")
        with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        steps.status.phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())


train_by_graph() if options.kind == "step" else train_by_callables()
workload.report(
    options, losses=numbers(losses), sha256=digest(model.state_dict().values()), **steps.figures(), **memory()
)
