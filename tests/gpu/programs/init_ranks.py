"""Two communicators, one after the other, of as many ranks as there are: how long each takes to its first sum.

Starts its ranks itself, all at once, for torchrun would import PyTorch before them. Each rank prints a line of JSON.
--shared: the ranks are on one GPU. --own: each rank sees one GPU, its own. --everywhere: each rank opens a context on
every GPU that it sees, as a program that uses one GPU does not."""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--shared", action="store_true")
parser.add_argument("--own", action="store_true")
parser.add_argument("--everywhere", action="store_true")
options = parser.parse_args()
if "RANK" not in os.environ:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, *sys.argv]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(options.ranks)}
    started = [
        subprocess.Popen(command, env=os.environ | meeting | {"RANK": str(each)}) for each in range(options.ranks)
    ]
    sys.exit(max(abs(each.wait()) for each in started))

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["NCCL_NVLS_ENABLE"] = "0"
if options.shared:  # NCCL takes each rank for another machine's
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
if options.own:  # before anybody has called cuInit
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

device = torch.device("cuda", 0 if options.shared else rank % torch.cuda.device_count())
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0)


def meet(where: str) -> None:
    """What one takes longer to get here is not the communicator's time."""
    store.set(f"{where} {rank}", "")
    store.wait([f"{where} {each}" for each in range(ranks)])


meet("start")
began = time.monotonic()
torch.cuda.set_device(device)
torch.zeros(1, device=device).cpu()  # natively the context is there before
if options.everywhere:
    for each in range(torch.cuda.device_count()):
        torch.zeros(1, device=f"cuda:{each}").cpu()
result: dict[str, object] = {"rank": rank, "context_s": time.monotonic() - began, "visible": torch.cuda.device_count()}
for name in ("first", "second"):
    meet(name)
    began = time.monotonic()
    dist.init_process_group("nccl", store=dist.PrefixStore(name, store), rank=rank, world_size=ranks, device_id=device)
    joined = time.monotonic() - began
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    result |= {f"{name}_joined_s": joined, f"{name}_s": time.monotonic() - began}
    dist.destroy_process_group()
meet("end")
result["processors"] = len(os.sched_getaffinity(0))
os.write(1, f"{json.dumps(result)}\n".encode())  # at once: all ranks write into the same file
meet("over")  # before the store is gone
