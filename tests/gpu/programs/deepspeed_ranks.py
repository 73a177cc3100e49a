"""A small GPT trained by DeepSpeed with ZeRO-1: the optimizer's state is divided among the ranks. Losses and a digest
of the weights, in one line of JSON.

--shared, --backend: torch_ranks.py."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
import torch_ranks
import torch_workload
import workload
from torch_ranks import RANK
from torch_workload import Tokens, digest, gpt_arguments, prepare

parser = workload.arguments(__doc__, steps=200)
gpt_arguments(parser)
torch_ranks.arguments(parser)
options = parser.parse_args()
device = torch_ranks.use_device(options)
prepare(options)
torch_ranks.join(options, device)
deepspeed.init_distributed(options.backend, verbose=False)
status = torch_ranks.status(options)
torch.manual_seed(options.seed)
model = torch_workload.GPT(2, 64 * options.heads, options.heads, options.context, options.words).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(
    model=model, optimizer=optimizer,
    config={
        "train_micro_batch_size_per_gpu": options.batch, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
    },
)  # fmt: skip
options.seed += RANK
tokens = Tokens(options)
losses: list[torch.Tensor] = []
for step in range(options.steps):
    status.step(step)
    status.phase("forward")
    batch = tokens()
    logits = engine(batch[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    status.phase("backward")
    engine.backward(loss)
    status.phase("optimizer")
    engine.step()
    losses.append(loss.detach())
    torch_ranks.synchronize()
status.phase("end")
weights = digest(model.state_dict().values())
dist.barrier()
dist.destroy_process_group()
torch_ranks.report(losses=torch.stack(losses).float().tolist(), sha256=weights)
