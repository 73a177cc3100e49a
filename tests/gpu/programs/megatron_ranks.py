"""A small GPT of Megatron-core: tensor parallel in pairs of ranks, data parallel among pairs with the distributed
optimizer, two micro-batches in a step. Losses and a digest of the rank's weights, in one line of JSON.

--shared, --backend: torch_ranks.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch_ranks
import workload
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch_ranks import RANKS
from torch_workload import digest, prepare

parser = workload.arguments(__doc__, steps=80)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--context", type=int, default=256)
parser.add_argument("--words", type=int, default=4096)
parser.add_argument("--batch", type=int, default=2)
torch_ranks.arguments(parser)
options = parser.parse_args()
device = torch_ranks.use_device(options)
prepare(options)
torch_ranks.join(options, device)
status = torch_ranks.status(options)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
config = TransformerConfig(
    num_layers=options.layers, hidden_size=options.width, num_attention_heads=options.heads,
    tensor_model_parallel_size=2, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
    hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    bias_dropout_fusion=False, bias_activation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
)  # fmt: skip
model = GPTModel(config, get_gpt_layer_local_spec(), options.words, options.context).to(device).bfloat16()
sharded = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True
)
ddp = DistributedDataParallel(config, sharded, model)
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0
    ),
    [ddp],
)
config.finalize_model_grads_func = finalize_model_grads
config.no_sync_func = ddp.no_sync
config.grad_scale_func = optimizer.scale_loss
positions = torch.arange(options.context, device=device).expand(options.batch, -1)
mask = torch.ones(1, 1, options.context, options.context, dtype=torch.bool, device=device).triu(1)
chance = torch.Generator().manual_seed(1000 + parallel_state.get_data_parallel_rank())


def batches() -> Iterator[torch.Tensor]:
    while True:
        yield torch.randint(options.words, (options.batch, options.context + 1), generator=chance).to(device)


def forward(source: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    tokens = next(source)
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    return losses, loss_of


run = get_forward_backward_func()
source = batches()
losses: list[torch.Tensor] = []
for step in range(options.steps):
    status.step(step)
    status.phase("forward")
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    found = run(
        forward_step_func=forward, data_iterator=source, model=ddp, num_microbatches=2, seq_length=options.context,
        micro_batch_size=options.batch, decoder_seq_length=options.context, forward_only=False,
    )  # fmt: skip
    status.phase("optimizer")
    optimizer.step()
    losses += [each["loss"] for each in found]
    torch_ranks.synchronize()
status.phase("end")
weights = digest(each.detach() for each in model.parameters())
dist.barrier()
dist.destroy_process_group()
torch_ranks.report(losses=torch.stack(losses).tolist(), sha256=weights, ranks=RANKS)
