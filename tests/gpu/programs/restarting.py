"""GPT-2-small trained data-parallel, with what people use to survive the loss of a rank: `--how` plain (nothing),
torchrun (a checkpoint, and all workers started again), nvrx (NVRx's restart in the process), torchft (a replica that
comes back gets its state from the other), lighthouse (what torchft needs beside it).

Each rank appends a line for each step to FOLDER/steps.RANK: which life of the rank it is, when, and the step; its
process is in FOLDER/pid.RANK. Ends when FOLDER/stop is there. SIGUSR1: an exception in that rank, in a step."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_ranks
import torch_workload
import workload
from torch_ranks import RANK, RANKS
from torch_workload import Tokens, gpt_arguments, make_gpt, prepare

parser = workload.arguments(__doc__, steps=100_000)
gpt_arguments(parser)
torch_ranks.arguments(parser)
parser.add_argument("--how", choices=["plain", "torchrun", "nvrx", "torchft", "lighthouse"], required=True)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
parser.add_argument("--port", type=int, default=29510, help="the lighthouse's")
options = parser.parse_args()
lives = 0
replica = int(os.environ.get("REPLICA_GROUP_ID", RANK))  # torchft's ranks have a group each


def fail(*_: Any) -> None:
    raise RuntimeError("an injected exception")


class Training:
    """The model and its steps. `around`: what makes them data-parallel."""

    def __init__(self, device: torch.device) -> None:
        global lives
        lives += 1
        (options.folder / f"pid.{replica}").write_text(str(os.getpid()))
        self.device = device
        prepare(options)
        self.model = make_gpt(options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step = 0
        self._log = (options.folder / f"steps.{replica}").open("a", buffering=1)
        options.seed += replica
        self._tokens = Tokens(options)
        options.seed -= replica

    def one_step(self, call: Any, optimizer: Any) -> None:
        batch = self._tokens()
        optimizer.zero_grad()
        with torch.autocast(torch_workload.DEVICE, torch.bfloat16):
            logits = call(batch[:, :-1])
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        torch_ranks.synchronize()
        self.step += 1
        self._log.write(f"{os.getpid()}.{lives} {time.monotonic()} {self.step}\n")

    def over(self) -> bool:
        return torch_ranks.over(self.step, options.folder / "stop", self.device)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def run(self, *, checkpoints: bool) -> None:
        """With DDP, in the default group."""
        checkpoint = options.folder / "checkpoint"
        if checkpoints and checkpoint.exists():
            self.restore(torch.load(checkpoint, map_location=self.device))
        ddp = torch.nn.parallel.DistributedDataParallel(self.model)
        while not self.over() and self.step < options.steps:
            self.one_step(ddp, self.optimizer)
            if checkpoints and self.step % options.every == 0:
                if RANK == 0:
                    torch.save(self.state(), checkpoint.with_suffix(".new"))
                    checkpoint.with_suffix(".new").rename(checkpoint)
                dist.barrier()


def restarted_by_nvrx() -> None:
    import datetime

    import nvidia_resiliency_ext.inprocess as inprocess

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    device = torch_ranks.use_device(options)
    signal.signal(signal.SIGUSR1, fail)
    if options.backend == "gloo":
        os.environ.pop("LOCAL_RANK")  # by which it looks whether the GPU is well
    often = datetime.timedelta(milliseconds=100)

    def train(call_wrapper: Any = None) -> None:
        dist.init_process_group(
            options.backend, store=dist.PrefixStore(str(call_wrapper.iteration), store), rank=RANK, world_size=RANKS,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        Training(device).run(checkpoints=True)

    # It gives its own to the parameter that has this class, and not the class's name.
    train.__annotations__["call_wrapper"] = inprocess.CallWrapper
    wrapped = inprocess.Wrapper(
        store_kwargs={"port": options.port + 1},
        monitor_thread_interval=often, monitor_process_interval=often, progress_watchdog_interval=often,
        heartbeat_interval=often, last_call_wait=often,
    )(train)  # fmt: skip
    wrapped()


def replicated_by_torchft() -> None:
    import torchft

    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{options.port}"
    if options.backend == "nccl":
        torch.cuda.set_device(replica % torch.cuda.device_count())
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = torch.device("cuda", torch.cuda.current_device()) if options.backend == "nccl" else torch.device("cpu")
    if options.backend == "gloo":
        torch_ranks.use_device(options)
    training = Training(device)
    group = torchft.ProcessGroupNCCL() if options.backend == "nccl" else torchft.ProcessGroupGloo()
    manager = torchft.Manager(
        pg=group, load_state_dict=training.restore, state_dict=training.state, min_replica_size=1,
        replica_id=f"replica-{replica}",
    )  # fmt: skip
    ddp = torchft.DistributedDataParallel(manager, training.model)
    optimizer = torchft.Optimizer(manager, training.optimizer)
    while not (options.folder / "stop").exists():
        training.one_step(ddp, optimizer)


def main() -> None:
    if options.how == "lighthouse":
        from torchft._torchft import LighthouseServer

        server = LighthouseServer(bind=f"[::]:{options.port}", min_replicas=1, join_timeout_ms=100)
        print(server.address(), flush=True)
        while not (options.folder / "stop").exists():
            time.sleep(0.1)
    elif options.how == "nvrx":
        restarted_by_nvrx()
    elif options.how == "torchft":
        replicated_by_torchft()
    else:
        device = torch_ranks.use_device(options)
        torch_ranks.join(options, device)
        Training(device).run(checkpoints=options.how == "torchrun")
        dist.destroy_process_group()


main()
sys.stdout.flush()
os._exit(0)  # other libraries' threads and processes are not waited for
