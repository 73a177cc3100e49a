"""Two tenants of a GPU: a decoder that answers requests as they come, and a training that takes what is left.

`shared.py --role decoder|training|both --seconds S`. It warms up, prints `ready`, and begins when it gets a line.
Requests come by a Poisson process of `--rate` a second, whether the decoder is done with the last or not; a request's
latency counts from when it came. It prints, as JSON, the latencies in ms and the number of steps of those seconds.
`both`: in one process, each in a thread and a stream of its own, the decoder's with the higher priority.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from typing import Any

import torch


class Decoder:
    """A token at batch 1 through a stack of layers: small kernels, one after the other."""

    def __init__(self, options: argparse.Namespace, stream: Any) -> None:
        self.stream, self.tokens = stream, options.tokens
        width, layers = options.width, options.layers
        self.up = [torch.randn(width, 4 * width, device="cuda", dtype=torch.bfloat16) / width for _ in range(layers)]
        self.down = [torch.randn(4 * width, width, device="cuda", dtype=torch.bfloat16) / width for _ in range(layers)]
        self.state = torch.randn(1, width, device="cuda", dtype=torch.bfloat16)

    def answer(self) -> None:
        """One request."""
        with torch.cuda.stream(self.stream), torch.no_grad():
            for _ in range(self.tokens):
                for up, down in zip(self.up, self.down, strict=True):
                    self.state = self.state + torch.relu(self.state @ up) @ down
                self.state = self.state / (1 + self.state.abs().max())
        self.stream.synchronize()

    def serve(self, seconds: float, rate: float, seed: int) -> list[float]:
        """Latencies, ms."""
        arrivals, at, chance = [], 0.0, random.Random(seed)
        while (at := at + chance.expovariate(rate)) < seconds:
            arrivals.append(at)
        began, latencies = time.monotonic(), []
        for arrival in arrivals:
            early = began + arrival - time.monotonic()
            if early > 0:
                time.sleep(early)
            self.answer()
            latencies.append((time.monotonic() - began - arrival) * 1e3)
        return latencies


class Training:
    """Steps of an MLP with Adam: kernels that fill the device."""

    def __init__(self, options: argparse.Namespace, stream: Any) -> None:
        self.stream, width = stream, options.training_width
        with torch.cuda.stream(stream):
            self.model = torch.nn.Sequential(
                torch.nn.Linear(width, 4 * width), torch.nn.ReLU(), torch.nn.Linear(4 * width, width)
            ).cuda()
            self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=True)
            self.batch = torch.randn(options.batch, width, device="cuda")

    def step(self) -> None:
        with torch.cuda.stream(self.stream):
            self.optimizer.zero_grad(set_to_none=True)
            (self.model(self.batch) - self.batch).square().mean().backward()
            self.optimizer.step()
        self.stream.synchronize()

    def run(self, seconds: float) -> int:
        """How many steps it did."""
        end, steps = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            self.step()
            steps += 1
        return steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=("decoder", "training", "both"), required=True)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rate", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--training-width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    decoder = training = None
    if options.role in ("decoder", "both"):
        decoder = Decoder(options, torch.cuda.Stream(priority=-1))
        for _ in range(3):
            decoder.answer()
    if options.role in ("training", "both"):
        training = Training(options, torch.cuda.Stream())
        for _ in range(3):
            training.step()
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    result: dict[str, Any] = {"seconds": options.seconds}
    beside = None
    if training is not None:

        def train(training: Training = training) -> None:
            result["steps"] = training.run(options.seconds)

        beside = threading.Thread(target=train)
        beside.start()
    if decoder is not None:
        result["latencies_ms"] = decoder.serve(options.seconds, options.rate, options.seed)
    if beside is not None:
        beside.join()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
