"""What is run: programs with their arguments, on a GPU and, much smaller, for a rehearsal without one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

PATIENCE = 120.0  # seconds for one program
PATIENCE_FOR_FAULTS = 240.0  # and for one that loses its server again and again, beside others
PROGRAMS = Path(__file__).parent / "programs"

TINY_GPT = "--batch 2 --layers 2 --width 64 --heads 2 --context 32 --words 500 --warmup 2 --steps 4 --block 2"
TINY_RESNET = "--batch 2 --image 32 --depths 1,1,1,1 --width 8 --classes 10 --warmup 1 --steps 2 --block 1"
TINY_STEPS = "--warmup 1 --steps 4 --block 2"


@dataclass(frozen=True)
class Case:
    """A program and its arguments. ``tiny`` replaces sizes; ``target``: of the step time, times native; ``patience``:
    seconds for one run. ``turns``: parts of its steps, where native and xMIG have them in turn."""

    name: str
    program: str
    reported: str
    arguments: str = ""
    tiny: str = TINY_STEPS
    environment: Mapping[str, str] = field(default_factory=dict)
    target: float | None = None
    patience: float = PATIENCE
    turns: int = 4
    fills: bool = False  # the device, until it has no memory left for anybody
    devices: int = 1

    @property
    def deterministic(self) -> bool:
        return "--deterministic" in self.arguments

    def command(self, python: str, *, tiny: bool, more: str = "") -> list[str]:
        """Of repeated arguments the last counts."""
        words = f"{self.arguments} {self.tiny if tiny else ''} {more}"
        jax = self.program.startswith("jax") or "--what jax" in words
        launcher = [str(PROGRAMS.parent / "without_device_file.py")] if tiny and jax else []
        return [python, *launcher, str(PROGRAMS / f"{self.program}.py"), *shlex.split(words)]

    def steps(self, *, tiny: bool) -> int:
        """How many it does after those that warm up."""
        words = self.command("python", tiny=tiny)
        return int([number for option, number in pairwise(words) if option == "--steps"][-1])


# Their step times are compared: native and under xMIG in turn, nothing else on the GPU.
TIMED = [
    Case("gpt2", "gpt2", "GPT-2-small, B=8, 1024 tokens, bf16 autocast, AdamW fused", "--steps 80", TINY_GPT, target=1),
    Case("gpt2-b1", "gpt2", "GPT-2-small, B=1, 256 tokens, bf16 autocast, AdamW foreach",
         "--batch 1 --context 256 --optimizer foreach --steps 100 --deterministic", TINY_GPT, target=1),
    Case("resnet50", "resnet50", "ResNet-50, B=64, channels last, bf16 autocast, SGD", "", TINY_RESNET, target=1),
    Case("mlp", "mlp", "MLP of three layers, B=64, Adam", "--deterministic --steps 2500", target=1, turns=10),
    Case("decode", "decode", "GPT-2-small generates with a key-value cache, B=1, every token read",
         "--deterministic", TINY_GPT, target=1),
    Case("compile", "compile", "torch.compile, GPT-2 of 4 layers, B=8, kernels cached by compile-cold",
         "--deterministic", TINY_GPT, target=1.01),
    Case("graphs", "graphs", "a training step in a CUDA graph, GPT-2 of 4 layers, 256 wide, B=1",
         "--deterministic --context 256 --steps 1600 --block 20", TINY_GPT, target=1.01),
]  # fmt: skip

# Only their results are compared; several run at a time.
RESULTS = [
    Case("compile-cold", "compile", "torch.compile into empty caches, which it then has for its step time",
         "--steps 10 --deterministic", TINY_GPT),
    Case("gpt2-foreach", "gpt2", "GPT-2-small, AdamW foreach",
         "--batch 2 --context 256 --optimizer foreach --steps 10 --warmup 0 --deterministic", TINY_GPT),
    Case("gpt2-fused", "gpt2", "GPT-2-small, AdamW fused",
         "--context 256 --optimizer fused --steps 10 --warmup 0 --deterministic", TINY_GPT),
    Case("resnet50-exact", "resnet50", "ResNet-50 with cuDNN",
         "--batch 32 --steps 10 --warmup 0 --deterministic", TINY_RESNET),
    Case("graphed-callables", "graphs", "make_graphed_callables",
         "--kind callables --context 256 --steps 20 --warmup 0 --deterministic", TINY_GPT),
    Case("compile-graphs", "compile", "torch.compile, reduce-overhead",
         "--mode reduce-overhead --layers 2 --batch 2 --context 256 --steps 10 --warmup 0 --deterministic", TINY_GPT),
    Case("loader", "loader", "DataLoader, forked workers, pinned batches, non_blocking", "--deterministic"),
    Case("loader-spawn", "loader", "DataLoader, spawned workers", "--start spawn --steps 20 --deterministic"),
    Case("streams", "streams", "streams, events, copies in both directions", "--deterministic", "--size 32 --steps 10"),
    Case("linalg", "linalg", "cuSOLVER, cuFFT, cuSPARSE, cuRAND", "", "--size 32"),
    Case("alloc-default", "allocators", "caching allocator, default", "", "--mib 64 --steps 600"),
    Case("alloc-segments", "allocators", "caching allocator, expandable_segments", "", "--mib 64 --steps 600",
         {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, turns=1, fills=True),
    Case("alloc-async", "allocators", "caching allocator, cudaMallocAsync", "", "--mib 64 --steps 600",
         {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    Case("cupy", "cupy_prog", "CuPy", "", "--size 32 --steps 5 --block 5"),
    Case("jax", "jax_prog", "JAX: jit, grad, a training loop", "--deterministic", "--width 32 --layers 2 --batch 4"),
    Case("jax-graphs", "jax_graphs", "JAX: loops, branches and the gradient of a checkpointed scan, compiled to graphs",
         "--warmup 0", "--width 8 --steps 8"),
    Case("conditional", "conditional", "conditional nodes in graphs: if, else, while, switch, nested",
         "--warmup 0", "--steps 400"),
    Case("triton", "triton_prog", "Triton kernels", "", "--rows 8 --columns 100 --steps 5"),
    Case("mistakes", "mistakes", "what the driver's functions return for calls that are wrong", ""),
    Case("bug", "bug", "an index outside of a table: the error that the program gets", ""),
]  # fmt: skip

KILLED_GPT = f"{TINY_GPT} --steps 400"
SMALL_GPT = "--batch 4 --context 256 --layers 6 --deterministic"
KILLED = [
    Case("kills-training", "gpt2", "GPT-2, 6 layers of 768", f"{SMALL_GPT} --warmup 0 --steps 1200", KILLED_GPT,
         patience=PATIENCE_FOR_FAULTS),
    Case("kills-graphs", "graphs", "GPT-2 in a CUDA graph, 6 layers of 768",
         f"{SMALL_GPT} --width 768 --heads 12 --warmup 0 --steps 2000", KILLED_GPT,
         patience=PATIENCE_FOR_FAULTS),
    Case("kills-default", "gpt2", "GPT-2 in default mode, 6 layers of 768, 1024 tokens, every loss read",
         "--batch 2 --layers 6 --warmup 0 --steps 500 --read", KILLED_GPT,
         patience=PATIENCE_FOR_FAULTS),
]  # fmt: skip
RECOVERED = Case("recovery", "gpt2", "GPT-2-small and ballast",
                 "--context 256 --deterministic --block 1 --steps 5000 --ballast 7",
                 f"{TINY_GPT} --ballast 0 --block 1 --steps 5000")  # fmt: skip
# Injected at any moment; each step is synchronised, as by a program that reads its loss.
INJECTED_STEPS = "--block 1 --steps 100000"
INJECTED = [
    Case("training", "gpt2", "GPT-2-small, B=8, 1024 tokens, bf16 autocast, AdamW fused", INJECTED_STEPS,
         f"{TINY_GPT} {INJECTED_STEPS}", patience=PATIENCE_FOR_FAULTS),
    Case("training-deterministic", "gpt2", "the same in deterministic mode", f"{INJECTED_STEPS} --deterministic",
         f"{TINY_GPT} {INJECTED_STEPS}", patience=PATIENCE_FOR_FAULTS),
    Case("training-b1", "gpt2", "GPT-2-small, B=1, 256 tokens, bf16 autocast, AdamW foreach",
         f"--batch 1 --context 256 --optimizer foreach {INJECTED_STEPS}", f"{TINY_GPT} {INJECTED_STEPS}",
         patience=PATIENCE_FOR_FAULTS),
    Case("training-resnet50", "resnet50", "ResNet-50, B=64, channels last, bf16 autocast, SGD", INJECTED_STEPS,
         f"{TINY_RESNET} {INJECTED_STEPS}", patience=PATIENCE_FOR_FAULTS),
    Case("training-graphed", "graphs", "a training step in a CUDA graph, GPT-2 of 4 layers, 256 wide, B=1",
         f"--context 256 {INJECTED_STEPS}", f"{TINY_GPT} {INJECTED_STEPS}", patience=PATIENCE_FOR_FAULTS),
    Case("training-compiled", "compile", "torch.compile, GPT-2 of 4 layers, B=8", INJECTED_STEPS,
         f"{TINY_GPT} {INJECTED_STEPS}", patience=PATIENCE_FOR_FAULTS),
]  # fmt: skip
TRAINING = Case("training", "gpt2", "GPT-2-small, B=8, 1024 tokens, bf16 autocast, AdamW fused, each step synchronised",
                "--block 1 --steps 400", f"{TINY_GPT} --block 1 --steps 40", target=1)  # fmt: skip
FAULTED = Case("faults", "gpt2", "GPT-2, 4 layers of 512",
               "--batch 2 --context 128 --layers 4 --width 512 --heads 8 --warmup 0 --steps 800 --deterministic",
               f"{KILLED_GPT} --warmup 0", patience=PATIENCE_FOR_FAULTS)  # fmt: skip
FAULTED_GRAPHS = Case("faults-graphs", "graphs", "GPT-2 in a CUDA graph, 4 layers of 256",
                      "--context 128 --warmup 0 --steps 3000 --deterministic",
                      f"{TINY_GPT} --warmup 0 --steps 3000", patience=PATIENCE_FOR_FAULTS)  # fmt: skip
BUGS = Case("bugs", "bugs", "the program's own bugs, each in a process of its own", "", "")
COUNTERS = Case("counters", "counters", "kernels that count in variables of their module for which nobody asks", "",
                "--launches 2", patience=PATIENCE_FOR_FAULTS)  # fmt: skip
FILES = Case("files", "files", "a training program's device files")
PAIR = Case("two-jobs", "gpt2", "two jobs on one GPU",
            "--batch 4 --context 256 --layers 6 --steps 30 --warmup 0 --deterministic", TINY_GPT)  # fmt: skip
MOVED = Case("move-40GB", "moved", "40 GB that stay as they are, 64 MB that each step writes",
             "--mib 38147 --repeat 100 --hold",
             "--mib 64 --dirty-mib 2 --hold")  # fmt: skip
SMALL_MOVED = Case("move-4GB", "moved", "4 GB that stay as they are, 64 MB that each step writes", "--mib 3815 --hold",
                   "--mib 16 --dirty-mib 2 --hold")  # fmt: skip
SMALLEST_MOVED = Case("move-16MB", "moved", "16 MB, of which each step writes 2", "--mib 16 --dirty-mib 2 --hold",
                      "--mib 16 --dirty-mib 2 --hold")  # fmt: skip
TRAINED = Case("move-training", "gpt2", "GPT-2-small in training",
               "--context 256 --warmup 0 --steps 1500 --deterministic", f"{KILLED_GPT} --warmup 0")  # fmt: skip
INFERRED = Case("move-inference", "decode", "GPT-2-small generates, weights that are only read",
                "--context 1600 --warmup 0 --steps 1600 --deterministic",
                f"{KILLED_GPT} --warmup 0 --context 400")  # fmt: skip
HELD = Case("driver-training", "gpt2", "GPT-2-small with what its training has left in memory, which stands",
            "--context 256 --warmup 0 --steps 20 --deterministic --hold", f"{TINY_GPT} --hold")  # fmt: skip
# How often each is moved, and which move of xMIG's is compared with it.
DRIVEN = {"driver-40GB": (MOVED, 1, "move-40GB"), "driver-training": (HELD, 1, "move-training"),
          "driver-4GB": (SMALL_MOVED, 2, None)}  # fmt: skip
ASKS = Case("cuinit", "asks", "cuInit, names, identifiers and attributes of the device, and no context", "", "")
WARM = Case("warm", "mlp", "fills the page cache", "--steps 1 --warmup 1 --block 1")
SPLIT = Case("devices: split model", "split", "a model split over two devices, AdamW",
             "--steps 2500 --deterministic", "--width 32 --batch 4 --steps 3000 --block 2", devices=2,
             patience=PATIENCE_FOR_FAULTS)  # fmt: skip
OF_TWO = [
    Case(f"devices: {what}", "two", reported, f"--what {what}", f"--what {what} --elements 4096", devices=2)
    for what, reported in (
        ("copies", "copies between devices by the driver's functions, contexts and streams of each"),
        ("tensors", "PyTorch: Tensor.to, streams, events, a graph, scatter and gather"),
        ("cupy", "CuPy: copies, a raw kernel on the other device's memory"),
        ("jax", "JAX: arrays on two devices, without collectives"),
        ("transformers", "Transformers with a device map, random weights"),
    )
]  # fmt: skip
