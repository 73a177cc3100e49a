"""CuPy's NCCL with two devices in one process: sums, broadcasts, gathers and what one device sends to the other, in
streams of their own. A digest of the results, in one line of JSON."""

from __future__ import annotations

import os

import workload

parser = workload.arguments(__doc__, steps=3000)
parser.add_argument("--size", type=int, default=1 << 18)
options = parser.parse_args()
os.environ["NCCL_NVLS_ENABLE"] = "0"

import cupy  # noqa: E402  (after the arguments: --help needs no GPU)
from cupy.cuda import nccl  # noqa: E402

size = options.size
every = (0, 1)
communicators = nccl.NcclCommunicator.initAll(list(every))
streams, values, received, gathered = [], [], [], []
for device in every:
    with cupy.cuda.Device(device):
        streams.append(cupy.cuda.Stream(non_blocking=True))
        values.append(cupy.arange(size, dtype=cupy.float32) % 97 + device)
        received.append(cupy.zeros(size, dtype=cupy.float32))
        gathered.append(cupy.zeros(2 * size, dtype=cupy.float32))
        cupy.cuda.Device(device).synchronize()
status = workload.Status(options.status.with_suffix(".0") if options.status else None)
for number in range(options.steps):
    status.step(number)
    status.phase("forward")
    nccl.groupStart()
    for device, communicator in zip(every, communicators, strict=True):
        with cupy.cuda.Device(device):
            at = values[device].data.ptr
            communicator.allReduce(at, at, size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, streams[device].ptr)
    nccl.groupEnd()
    nccl.groupStart()
    for device, communicator in zip(every, communicators, strict=True):
        with cupy.cuda.Device(device):
            communicator.send(values[device].data.ptr, size, nccl.NCCL_FLOAT32, 1 - device, streams[device].ptr)
            communicator.recv(received[device].data.ptr, size, nccl.NCCL_FLOAT32, 1 - device, streams[device].ptr)
    nccl.groupEnd()
    nccl.groupStart()
    for device, communicator in zip(every, communicators, strict=True):
        with cupy.cuda.Device(device):
            communicator.allGather(
                received[device].data.ptr, gathered[device].data.ptr, size, nccl.NCCL_FLOAT32, streams[device].ptr
            )
    nccl.groupEnd()
    for device in every:
        with cupy.cuda.Device(device), streams[device]:
            values[device][:] = gathered[device][::2] * 0.25 + device + number % 3
    for device in every:
        with cupy.cuda.Device(device):
            streams[device].synchronize()
status.phase("end")
digests = []
for device in every:
    with cupy.cuda.Device(device):
        digests += [cupy.asnumpy(each) for each in (values[device], received[device], gathered[device])]
for communicator in communicators:
    communicator.destroy()
workload.report(options, rank=0, losses=[], sha256=workload.digest(digests))
