"""A small Llama of Transformers, its layers divided among the ranks by its own tensor-parallel plan, trained. Losses
and a digest of the rank's parts, in one line of JSON.

--folder: where rank 0 leaves the model that all load. --shared, --backend: torch_ranks.py."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch_ranks
import workload
from torch.distributed.tensor import DTensor
from torch_ranks import RANK
from torch_workload import digest, prepare
from transformers import AutoModelForCausalLM, LlamaConfig

parser = workload.arguments(__doc__, steps=200)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--context", type=int, default=256)
parser.add_argument("--words", type=int, default=4096)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--folder", type=Path, required=True)
torch_ranks.arguments(parser)
options = parser.parse_args()
device = torch_ranks.use_device(options)
prepare(options)
torch_ranks.join(options, device)
status = torch_ranks.status(options)
if RANK == 0:
    torch.manual_seed(options.seed)
    AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=options.words, hidden_size=options.width, intermediate_size=2 * options.width,
            num_hidden_layers=options.layers, num_attention_heads=options.heads, num_key_value_heads=options.heads,
            max_position_embeddings=options.context,
        )
    ).save_pretrained(written := options.folder.with_suffix(".new"))  # fmt: skip
    written.rename(options.folder)
while not options.folder.exists():
    time.sleep(0.05)
model = AutoModelForCausalLM.from_pretrained(options.folder, tp_plan="auto", dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
chance = torch.Generator().manual_seed(1000)  # the same on all ranks
losses: list[torch.Tensor] = []
for step in range(options.steps):
    status.step(step)
    status.phase("forward")
    tokens = torch.randint(options.words, (options.batch, options.context), generator=chance).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    status.phase("backward")
    loss.backward()
    status.phase("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
    torch_ranks.synchronize()
status.phase("end")


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


weights = digest(local(each.detach()) for each in model.parameters())
divided = sum(isinstance(each, DTensor) or each.shape != whole.shape for each, whole in zip(
    model.parameters(), AutoModelForCausalLM.from_config(model.config).parameters(), strict=True
))  # fmt: skip
dist.barrier()
dist.destroy_process_group()
torch_ranks.report(losses=[float(local(each)) for each in losses], sha256=weights, divided=divided)
