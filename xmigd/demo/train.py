"""Trains a classifier of handwritten digits: an ordinary CUDA program, written against the driver interface.

It knows nothing of xMIG and nothing of recoveries. The data are the 1,797 images that ship inside scikit-learn; the
network has two hidden layers; AdamW, minibatches, float32, all of it in kernels. It prints one JSON object per line:
per epoch the loss of every step, at the end accuracy and a hash of the weights.

    python -m xmigd.demo.train --kernels xmig_kernels.so

With `--ranks` it starts so many of itself, which train together: each computes a part of every batch, and NCCL averages
the gradients. Rank 0 prints its losses, all print their weights.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import time
from ctypes import c_float, c_uint32, c_uint64
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from xmigd.demo.collectives import Communicator

LAYERS = (64, 256, 128, 10)
BATCH = 64
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01
THREADS = 64

Floats = NDArray[np.float32]


def check(answer: tuple[Any, ...]) -> Any:
    """The results of a driver call, or an exception with the error's name."""
    code, *results = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"CUDA: {driver.cuGetErrorName(code)[1].decode()}")
    return results[0] if len(results) == 1 else tuple(results)


class Kernels:
    """The kernels of a module by name, each launched with one thread per index."""

    def __init__(self, path: Path) -> None:
        self._module = check(driver.cuModuleLoadData(path.read_bytes()))
        self._functions: dict[str, Any] = {}

    def __call__(self, name: str, indices: int, *arguments: Any) -> None:
        if name not in self._functions:
            self._functions[name] = check(driver.cuModuleGetFunction(self._module, name.encode()))
        values = tuple(a.value for a in arguments)
        types = tuple(type(a) for a in arguments)
        blocks = (indices + THREADS - 1) // THREADS
        check(driver.cuLaunchKernel(self._functions[name], blocks, 1, 1, THREADS, 1, 1, 0, 0, (values, types), 0))


def load_digits() -> tuple[Floats, NDArray[np.int32]]:
    """The images, 64 values from 0 to 1 each, and their labels. As sklearn.datasets.load_digits reads them; to import
    that takes ten times as long as the file."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise SystemExit("the data are in scikit-learn, which is not installed")
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz") as file:
        table = np.loadtxt(file, delimiter=",")
    return (table[:, :-1] / 16).astype(np.float32), table[:, -1].astype(np.int32)


def u32(value: int) -> c_uint32:
    return c_uint32(value)


class Array:
    """Float32 (or int32) values in device memory."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pointer = int(check(driver.cuMemAlloc(4 * count)))
        check(driver.cuMemsetD8(self.pointer, 0, 4 * count))

    @property
    def argument(self) -> c_uint64:
        return c_uint64(self.pointer)

    def at(self, index: int) -> c_uint64:
        return c_uint64(self.pointer + 4 * index)

    def write(self, values: NDArray[Any]) -> None:
        check(driver.cuMemcpyHtoDAsync(self.pointer, values.ctypes.data, values.nbytes, 0))

    def read(self, begin: int = 0, count: int | None = None) -> Floats:
        values = np.empty(self.count if count is None else count, np.float32)
        check(driver.cuMemcpyDtoH(values.ctypes.data, self.pointer + 4 * begin, values.nbytes))
        return values


class Parameter:
    """A weight or bias with its gradient and AdamW's two moments."""

    def __init__(self, initial: Floats) -> None:
        self.value, self.gradient = Array(initial.size), Array(initial.size)
        self.first, self.second = Array(initial.size), Array(initial.size)
        self.value.write(np.ascontiguousarray(initial))


class Network:
    """A multilayer perceptron with ReLU and softmax cross entropy."""

    def __init__(self, kernels: Kernels, chance: np.random.Generator, steps: int, rate: float) -> None:
        self.kernels = kernels
        self.rate = rate
        self.steps = 0
        shapes = list(pairwise(LAYERS))
        self.weights = [
            Parameter((chance.standard_normal((a, b)) * np.sqrt(2 / a)).astype(np.float32)) for a, b in shapes
        ]
        self.biases = [Parameter(np.zeros(b, np.float32)) for _, b in shapes]
        self.activations = [Array(BATCH * size) for size in LAYERS]
        self.gradients = [Array(BATCH * size) for size in LAYERS]
        self.labels = Array(BATCH)
        self.row_loss = Array(BATCH)
        self.losses = Array(steps)  # the sum over the batch, of every step
        self.correct = Array(1)

    def forward(self, images: Floats, labels: NDArray[np.int32]) -> int:
        """From a batch of images to logits; returns the rows."""
        rows = len(images)
        self.activations[0].write(images)
        self.labels.write(labels)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            into, out = self.activations[i], self.activations[i + 1]
            a, b = LAYERS[i], LAYERS[i + 1]
            self.kernels(
                "gemm",
                rows,
                into.argument,
                weight.value.argument,
                out.argument,
                u32(rows),
                u32(b),
                u32(a),
                u32(0),
                u32(0),
                u32(0),
            )
            self.kernels("bias_add", rows, out.argument, bias.value.argument, u32(rows), u32(b))
            if b != LAYERS[-1]:
                self.kernels("relu", rows * b, out.argument, c_uint64(rows * b))
        return rows

    def backward(self, rows: int) -> None:
        """Gradients of the mean loss; the loss itself goes to ``losses``."""
        self.kernels(
            "softmax_cross_entropy",
            rows,
            self.activations[-1].argument,
            self.labels.argument,
            self.row_loss.argument,
            self.gradients[-1].argument,
            u32(rows),
            u32(LAYERS[-1]),
        )
        self.kernels("reduce_sum", 1, self.row_loss.argument, self.losses.at(self.steps), u32(rows), u32(1))
        for i in reversed(range(len(self.weights))):
            a, b = LAYERS[i], LAYERS[i + 1]
            into, gradient = self.activations[i], self.gradients[i + 1]
            self.kernels(
                "gemm",
                a,
                into.argument,
                gradient.argument,
                self.weights[i].gradient.argument,
                u32(a),
                u32(b),
                u32(rows),
                u32(1),
                u32(0),
                u32(0),
            )
            self.kernels("reduce_sum", b, gradient.argument, self.biases[i].gradient.argument, u32(rows), u32(b))
            if i:
                self.kernels(
                    "gemm",
                    rows,
                    gradient.argument,
                    self.weights[i].value.argument,
                    self.gradients[i].argument,
                    u32(rows),
                    u32(a),
                    u32(b),
                    u32(0),
                    u32(1),
                    u32(0),
                )
                self.kernels("relu_backward", rows * a, into.argument, self.gradients[i].argument, c_uint64(rows * a))

    def average(self, communicator: Communicator) -> None:
        """Every gradient over all ranks."""
        with communicator.group():
            for p in self.weights + self.biases:
                communicator.average(p.gradient.pointer, p.gradient.count)

    def update(self) -> None:
        """One step of AdamW over every parameter."""
        self.steps += 1
        for p in self.weights + self.biases:
            n = p.value.count
            self.kernels(
                "adamw",
                n,
                p.value.argument,
                p.gradient.argument,
                p.first.argument,
                p.second.argument,
                c_uint64(n),
                c_float(self.rate),
                c_float(BETA1),
                c_float(BETA2),
                c_float(EPSILON),
                c_float(DECAY),
                u32(self.steps),
            )

    def accuracy(self, images: Floats, labels: NDArray[np.int32]) -> float:
        """Share of images whose largest logit is the label's."""
        check(driver.cuMemsetD8(self.correct.pointer, 0, 4))
        for begin in range(0, len(images), BATCH):
            rows = self.forward(images[begin : begin + BATCH], labels[begin : begin + BATCH])
            # One block: the count is one number.
            self.kernels(
                "count_correct",
                1,
                self.activations[-1].argument,
                self.labels.argument,
                self.correct.argument,
                u32(rows),
                u32(LAYERS[-1]),
            )
        return int(self.correct.read().view(np.uint32)[0]) / len(images)

    def hash(self) -> str:
        """SHA-256 over every parameter."""
        digest = hashlib.sha256()
        for p in self.weights + self.biases:
            digest.update(p.value.read().tobytes())
        return digest.hexdigest()


def start_ranks(ranks: int, folder: Path) -> int:
    """One process for each, with these arguments. Returns the exit code of the first that did not end well."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "xmigd.demo.train", *sys.argv[1:], "--rank"]
    children = [subprocess.Popen([*command, str(rank)]) for rank in range(ranks)]
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children):  # the others would wait for it
            for child in children:
                child.kill()
        time.sleep(0.01)
    return next((1 for child in children if child.returncode), 0)


def say(what: dict[str, Any]) -> None:
    """A line of its own, whoever else writes into the same pipe, and however Python buffers (PYTHONUNBUFFERED)."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernels", type=Path, required=True, help="the module image with the kernels")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together")
    parser.add_argument("--rank", type=int, help="which of them this is; default: it starts them")
    parser.add_argument("--folder", type=Path, help="where the ranks find each other")
    options = parser.parse_args()
    if options.ranks > 1 and options.rank is None:
        sys.exit(start_ranks(options.ranks, options.folder))

    rank = options.rank or 0
    chance = np.random.default_rng(options.seed)
    images, labels = load_digits()
    order = chance.permutation(len(images))
    train, test = order[:1437], order[1437:]
    batches = len(train) // BATCH

    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
    network = Network(Kernels(options.kernels), chance, options.epochs * batches, options.rate)
    communicator = Communicator(rank, options.ranks, options.folder) if options.ranks > 1 else None

    began = time.monotonic()
    for epoch in range(options.epochs):
        shuffled = chance.permutation(train)
        for batch in range(batches):
            chosen = shuffled[batch * BATCH : (batch + 1) * BATCH]
            network.backward(
                network.forward(images[chosen[rank :: options.ranks]], labels[chosen[rank :: options.ranks]])
            )
            if communicator is not None:
                network.average(communicator)
            network.update()
        losses = network.losses.read(epoch * batches, batches) / (BATCH // options.ranks)
        if rank:
            continue
        # Hexadecimal digits: nothing is rounded.
        every = [x.hex() for x in losses.tolist()]
        say({"epoch": epoch + 1, "loss": float(losses.mean()), "losses": every})
    say(
        {
            "rank": rank,
            "images": len(images),
            "train": len(train),
            "test": len(test),
            "steps": network.steps,
            "accuracy": network.accuracy(images[test], labels[test]),
            "weights": network.hash(),
            "seconds": time.monotonic() - began,
        }
    )
    if communicator is not None:
        communicator.end()


if __name__ == "__main__":
    main()
