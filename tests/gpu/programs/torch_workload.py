"""What the PyTorch programs share: deterministic mode, digests of tensors, and a GPT-2."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
import torch._inductor.config  # with all that it needs: use_deterministic_algorithms() would import it, and optimizers
import workload
from torch import nn
from torch.nn import functional

DEVICE = "cuda"


def prepare(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(options.deterministic)
    torch.backends.cudnn.deterministic = options.deterministic


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of tensors of any type, on any device."""
    return workload.digest(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for t in tensors)


def numbers(losses: list[torch.Tensor]) -> list[float]:
    """Losses that were left on the device."""
    found: list[float] = torch.stack(losses).float().tolist()
    return found


def memory() -> dict[str, Any]:
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2; the small one has 12 layers, 768 wide, 12 heads and 50,257 words, padded to 50,304."""

    def __init__(self, layers: int, width: int, heads: int, context: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def gpt_arguments(parser: argparse.ArgumentParser, *, batch: int = 8, layers: int = 12, width: int = 768) -> None:
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--heads", type=int, default=width // 64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--words", type=int, default=50304)


def make_gpt(options: argparse.Namespace) -> GPT:
    return GPT(options.layers, options.width, options.heads, options.context, options.words).to(DEVICE)


class Tokens:
    """Random batches, made on the host, copied from pinned memory, as a loader does."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._shape = options.batch, options.context + 1
        self._words = options.words
        self._chance = torch.Generator().manual_seed(options.seed + 1)

    def __call__(self) -> torch.Tensor:
        tokens = torch.randint(self._words, self._shape, generator=self._chance)
        return tokens.pin_memory().to(DEVICE, non_blocking=True) if DEVICE == "cuda" else tokens
