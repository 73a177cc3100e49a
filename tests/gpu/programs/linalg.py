"""cuSOLVER, cuFFT, cuSPARSE, cuRAND and sorting: a digest for each operation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import workload
from torch_workload import DEVICE, digest, memory, prepare

parser = workload.arguments(__doc__, steps=3, warmup=1, block=1)
parser.add_argument("--size", type=int, default=256)
options = parser.parse_args()
prepare(options)

size = options.size
chance = torch.Generator().manual_seed(options.seed)
a = torch.randn(size, size, generator=chance).to(DEVICE)
symmetric = a @ a.T + size * torch.eye(size, device=DEVICE)
sparse = torch.where(a.abs() > 1.5, a, 0)
batch = torch.randn(8, 32, 32, generator=chance).to(DEVICE)
operations: dict[str, Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "svd": lambda: tuple(torch.linalg.svd(a)),
    "qr": lambda: tuple(torch.linalg.qr(a)),
    "eigh": lambda: tuple(torch.linalg.eigh(symmetric)),
    "cholesky": lambda: torch.linalg.cholesky(symmetric),
    "solve": lambda: torch.linalg.solve(symmetric, a),
    "inverse, batched": lambda: torch.linalg.inv(batch),
    "fft": lambda: torch.view_as_real(torch.fft.fft(a)),
    "fft, 2 dimensions": lambda: torch.view_as_real(torch.fft.rfft2(batch)),
    "fft, length of a prime": lambda: torch.view_as_real(torch.fft.fft(a[:, :251])),
    "sparse by dense": lambda: sparse.to_sparse_csr() @ a,
    "sparse by sparse": lambda: (sparse.to_sparse_csr() @ sparse.to_sparse_csr()).to_dense(),
    "random": lambda: torch.randn(size, size, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)),
    "sort": lambda: tuple(torch.sort(a.flatten())),
    "cumsum": lambda: a.double().cumsum(1),
    "int8 product": lambda: torch._int_mm(a.to(torch.int8), a.to(torch.int8)),
}
digests, failed = {}, {}
steps = workload.Steps(options, torch.cuda.synchronize)
for _ in steps:
    for name, operation in operations.items():
        try:
            result = operation()
            digests[name] = digest(result if isinstance(result, tuple) else [result])
        except (RuntimeError, ValueError) as error:
            failed[name] = str(error).split("\n")[0][:200]
workload.report(options, digests=digests, failed=failed, **steps.figures(), **memory())
