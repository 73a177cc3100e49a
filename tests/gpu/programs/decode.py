"""A GPT-2 generates with a key-value cache, batch 1; every token is read, as a loop with a stop word does."""

from __future__ import annotations

import torch
import workload
from torch.nn import functional
from torch_workload import DEVICE, Block, digest, gpt_arguments, make_gpt, memory, prepare

parser = workload.arguments(__doc__, steps=300, warmup=20, block=20)
gpt_arguments(parser, batch=1)
parser.add_argument("--read-every", type=int, default=1, metavar="N", help="look at every Nth token only")
options = parser.parse_args()
if options.warmup + options.steps > options.context:
    parser.error("more steps than the model's context holds")
prepare(options)

model = make_gpt(options).to(torch.bfloat16).eval()
shape = options.batch, options.heads, options.context, options.width // options.heads
caches = [(torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16), torch.zeros(shape, device=DEVICE,
           dtype=torch.bfloat16)) for _ in model.blocks]  # fmt: skip
# The whole cache with a mask: with a length that grows cuDNN makes a new plan for every token, in 100 ms each.
past = torch.ones(options.context, options.context, dtype=torch.bool, device=DEVICE).tril()[:, None]


def attend(block: Block, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: int) -> torch.Tensor:
    """A block for one token."""
    q, k, v = block.qkv(block.norm1(x)).view(options.batch, 1, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
    keys[:, :, place], values[:, :, place] = k[:, :, 0], v[:, :, 0]
    attended = functional.scaled_dot_product_attention(q, keys, values, attn_mask=past[place])
    x = x + block.out(attended.transpose(1, 2).reshape(x.shape))
    return x + block.mlp(block.norm2(x))


@torch.inference_mode()
def next_token(token: torch.Tensor, place: int) -> torch.Tensor:
    x = model.words(token) + model.places.weight[place]
    for block, (keys, values) in zip(model.blocks, caches, strict=True):
        x = attend(block, x, keys, values, place)
    return model.head(model.norm(x)).argmax(-1)


token = torch.full((options.batch, 1), 1, device=DEVICE)
written = []
steps = workload.Steps(options, torch.cuda.synchronize)
for place in steps:
    steps.status.phase("forward")
    token = next_token(token, place)
    if place % options.read_every == 0:
        token[0, 0].item()
    written.append(token)
text = torch.cat(written, 1)
kept = [text, *(keys for keys, _ in caches)]
workload.report(options, sha256=digest(kept), tokens=text[0].tolist(), **steps.figures(), **memory())
