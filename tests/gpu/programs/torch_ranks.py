"""What the PyTorch programs of several ranks share, each rank a process of torchrun's.

--backend gloo: on the processor, where there is no GPU. --shared: several ranks are on one GPU. --own: each rank
sees one GPU, its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_workload
import workload

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LOOK_EVERY = 8  # steps


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")


def use_device(options: argparse.Namespace) -> torch.device:
    """The rank's device, and what NCCL is to know of the others."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if options.shared:  # NCCL takes each rank for another machine's
        os.environ |= {"NCCL_HOSTID": f"rank-{RANK}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    if options.own:  # before anybody has called cuInit
        os.environ["CUDA_VISIBLE_DEVICES"] = str(RANK)
    if options.backend == "gloo":
        torch_workload.DEVICE = "cpu"
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", RANK % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join(options: argparse.Namespace, device: torch.device) -> None:
    """All ranks are in the default group, and have communicated."""
    # torchrun keeps one store over all of its restarts: a rank must not meet those of an earlier one there.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    bound = device if device.type == "cuda" else None
    dist.init_process_group(options.backend, store=own, rank=RANK, world_size=RANKS, device_id=bound)
    dist.all_reduce(torch.ones(1, device=device))
    synchronize()


def synchronize() -> None:
    if torch_workload.DEVICE == "cuda":
        torch.cuda.synchronize()


def status(options: argparse.Namespace) -> workload.Status:
    """Each rank's is in a file of its own."""
    return workload.Status(options.status.with_suffix(f".{RANK}") if options.status else None)


def over(step: int, until: Path | None, device: torch.device) -> bool:
    """Is this to be the last step? All ranks get the same answer; most steps nobody looks."""
    if until is None or step % LOOK_EVERY:
        return False
    there = torch.full((1,), float(until.exists()), device=device)
    dist.all_reduce(there, op=dist.ReduceOp.MAX)
    return bool(there.item())


def agreed(number: int, until: Path | None) -> bool:
    """The same, without the device: rank 0 looks, and the others read in torchrun's store what it has seen."""
    if until is None or number % LOOK_EVERY:
        return False
    store = dist.distributed_c10d._get_default_store()
    if RANK == 0:
        store.set(f"over {number}", str(int(until.exists())))
    return bool(store.get(f"over {number}") == b"1")


def report(**results: Any) -> None:
    """Print the line, at once: all ranks write into the same file."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"{json.dumps({'rank': RANK, **results})}\n".encode())
