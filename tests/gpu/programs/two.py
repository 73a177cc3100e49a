"""Two devices: what arrives from one on the other, whichever way it goes, is what left. --what: which ways."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable
from itertools import product
from typing import Any

import workload

parser = workload.arguments(__doc__, steps=0, warmup=0)
parser.add_argument("--what", default="copies")
parser.add_argument("--elements", type=int, default=1 << 20)
options = parser.parse_args()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np  # noqa: E402

digests: dict[str, str] = {}
failed: dict[str, str] = {}  # what is not as NumPy says
source = np.random.default_rng(options.seed)


def check(name: str, got: Any, expected: Any = None) -> None:
    found = np.ascontiguousarray(got)
    digests[name] = hashlib.sha256(found.tobytes()).hexdigest()[:16]
    if expected is not None and not np.array_equal(found, expected):
        failed[name] = f"{int((found != expected).sum())} of {found.size} elements"


def copies() -> None:
    """By the driver's functions: every form, with either context current, in streams of both."""
    import ctypes

    import torch

    cuda = ctypes.CDLL("libcuda.so.1")
    contexts, streams = [], []
    for device in range(2):
        torch.zeros(1, device=f"cuda:{device}")
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        cuda.cuCtxSetCurrent(context)
        cuda.cuStreamCreate(ctypes.byref(stream), 1)
        contexts.append(context)
        streams.append(stream)
    word, size = ctypes.c_uint64, ctypes.c_size_t

    def of(tensor: Any) -> Any:
        return word(tensor.data_ptr())

    def peer(to: Any, frm: Any, bytes_: int, stream: Any, there: int, here: int) -> int:
        return int(cuda.cuMemcpyPeerAsync(of(to), contexts[there], of(frm), contexts[here], size(bytes_), stream))

    def plain(to: Any, frm: Any, bytes_: int, stream: Any, there: int, here: int) -> int:
        return int(cuda.cuMemcpyDtoDAsync_v2(of(to), of(frm), size(bytes_), stream))

    def unified(to: Any, frm: Any, bytes_: int, stream: Any, there: int, here: int) -> int:
        return int(cuda.cuMemcpyAsync(of(to), of(frm), size(bytes_), stream))

    def blocking(to: Any, frm: Any, bytes_: int, stream: Any, there: int, here: int) -> int:
        return int(cuda.cuMemcpyPeer(of(to), contexts[there], of(frm), contexts[here], size(bytes_)))

    def rows(to: Any, frm: Any, bytes_: int, stream: Any, there: int, here: int) -> int:
        # CUDA_MEMCPY2D: whole rows of 4096 bytes, all but the last 96 of each
        sides = [(0, 0, 2, 0, tensor.data_ptr(), 0, 4096) for tensor in (frm, to)]
        fields = (*sides[0], *sides[1], 4000, bytes_ // 4096)
        return int(cuda.cuMemcpy2DAsync_v2((word * 16)(*fields), stream))

    forms: dict[str, Callable[..., int]] = {f.__name__: f for f in (peer, plain, unified, blocking, rows)}
    for (name, form), here, current, stream in product(forms.items(), range(2), range(2), (None, 0, 1)):
        there = 1 - here
        data = source.integers(0, 1 << 31, options.elements, dtype=np.int32)
        frm = torch.from_numpy(data).to(f"cuda:{here}")
        to = torch.zeros(options.elements, dtype=torch.int32, device=f"cuda:{there}")
        for device in range(2):
            torch.cuda.synchronize(device)
        cuda.cuCtxSetCurrent(contexts[current])
        code = form(to, frm, 4 * options.elements, None if stream is None else streams[stream], there, here)
        for context in contexts:
            cuda.cuCtxSetCurrent(context)
            code = code or int(cuda.cuCtxSynchronize())
        expected = data.copy()
        if form is rows:
            expected.reshape(-1, 1024)[:, 1000:] = 0
        what = f"{name} {here}->{there}, current {current}, stream {stream}"
        check(what, to.cpu().numpy(), expected)
        digests[what] += f" {code}"


def tensors() -> None:
    """PyTorch: tensors to the other device, contiguous or not; streams, events, a graph, scatter and gather."""
    import torch

    for count, here in product((1, 8, 1000, options.elements), range(2)):
        data = source.standard_normal(count).astype(np.float32)
        tensor = torch.from_numpy(data).to(f"cuda:{here}")
        check(f"to {count} {here}", tensor.to(f"cuda:{1 - here}").cpu().numpy(), data)
        check(f"back {count} {here}", tensor.to(f"cuda:{1 - here}").to(f"cuda:{here}").cpu().numpy(), data)
    data = source.standard_normal((512, 768)).astype(np.float32)
    tensor = torch.from_numpy(data).to("cuda:0")
    check("transposed", tensor.t().to("cuda:1").cpu().numpy(), data.T)
    check("strided", tensor[::3, 5:700:2].to("cuda:1").cpu().numpy(), data[::3, 5:700:2])
    check("other type", tensor.to("cuda:1", torch.float64).cpu().numpy(), data.astype(np.float64))
    other = torch.empty(512, 768, device="cuda:1")
    streams = [torch.cuda.Stream(device=device) for device in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.default_stream(stream.device))
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            tensor += 1
            other.copy_(tensor, non_blocking=True)
            event = streams[0].record_event()
        streams[1].wait_event(event)
        with torch.cuda.stream(streams[1]):
            other *= 0.5
            tensor.copy_(other, non_blocking=True)
        streams[0].wait_stream(streams[1])
    for stream in streams:
        stream.synchronize()
    check("streams", tensor.cpu().numpy())
    torch.cuda.synchronize(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(0), torch.cuda.graph(graph):
        tensor.mul_(0.75).add_(1)
    for _ in range(5):
        graph.replay()
        other.copy_(tensor)
    check("graph, then copied", other.cpu().numpy(), tensor.cpu().numpy())
    parts = torch.nn.parallel.scatter(torch.from_numpy(data).to("cuda:0"), [0, 1])
    check("scatter", np.concatenate([part.cpu().numpy() for part in parts]), data)
    check("gather", torch.nn.parallel.gather([part * 2 for part in parts], 0).cpu().numpy(), data * 2)
    digests["peer"] = str([torch.cuda.can_device_access_peer(a, b) for a, b in ((0, 1), (1, 0))])


RAW = r"""extern "C" __global__ void both(float* here, float* there, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) { here[i] += there[i]; there[i] *= 2; }
}"""


def cupy() -> None:
    """CuPy: copies, streams, and a raw kernel that reads and writes the other device's memory."""
    import cupy as cp

    n = options.elements
    data = source.standard_normal(n).astype(np.float32)
    arrays = []
    for device in range(2):
        with cp.cuda.Device(device):
            arrays.append(cp.asarray(data * (device + 1)))
    with cp.cuda.Device(1):
        moved = cp.asarray(arrays[0])
        check("asarray", cp.asnumpy(moved), data)
        moved[...] = arrays[0] if cp.cuda.runtime.deviceCanAccessPeer(1, 0) else moved
        check("assigned", cp.asnumpy(moved), data)
        digests["peer"] = str(cp.cuda.runtime.deviceCanAccessPeer(1, 0))
        if cp.cuda.runtime.deviceCanAccessPeer(1, 0):
            try:
                cp.cuda.runtime.deviceEnablePeerAccess(0)
            except cp.cuda.runtime.CUDARuntimeError as error:
                digests["enable"] = str(error.status)  # CuPy enables it by itself at times
            kernel = cp.RawKernel(RAW, "both")
            for _ in range(3):
                kernel(((n + 255) // 256,), (256,), (arrays[1], arrays[0], np.int32(n)))
            cp.cuda.Device().synchronize()
    check("a kernel's own", cp.asnumpy(arrays[1]))
    check("a kernel's other", cp.asnumpy(arrays[0]), data * 8 if "peer" in digests and digests["peer"] != "0" else None)


def jax() -> None:
    """JAX: arrays on each device, moved between them, and programs on each."""
    # XLA takes the kernel of a product that was the quickest when it tried them: another one in another run.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
    import jax as j
    import jax.numpy as jnp

    if j.default_backend() != "gpu" or len(j.devices()) < 2:
        raise SystemExit(f"JAX has {j.devices()}")
    data = source.standard_normal((256, 256)).astype(np.float32)
    first, second = (j.device_put(data, device) for device in j.devices()[:2])
    for name, array, device in (("over", first, 1), ("back", second, 0)):
        check(name, j.device_put(array, j.devices()[device]), data)
    step = j.jit(lambda x, y: jnp.tanh(x @ y / 16) + x)
    for turn in range(10):
        first = step(first, j.device_put(second, j.devices()[0]))
        second = step(second, j.device_put(first, j.devices()[1]))
        if turn % 5 == 4:
            check(f"turn {turn}", second)


def transformers() -> None:
    """Transformers with a device map; random weights."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(True)
    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=128)
    whole = AutoModelForCausalLM.from_config(config).eval()
    layers = {f"transformer.h.{i}": i // 2 for i in range(4)}
    names = {"transformer.wte": 0, "transformer.wpe": 0, "transformer.drop": 0, "transformer.ln_f": 1, "lm_head": 0}
    from accelerate import dispatch_model

    model = dispatch_model(whole, device_map=layers | names)
    tokens = torch.randint(0, 1000, (2, 64), generator=torch.Generator().manual_seed(1)).to("cuda:0")
    with torch.no_grad():
        check("logits", model(tokens).logits.cpu().numpy())
        check("tokens", model.generate(tokens, max_new_tokens=16, do_sample=False, pad_token_id=0).cpu().numpy())


WAYS = {way.__name__: way for way in (copies, tensors, cupy, jax, transformers)}
NEEDS = {"transformers": ("transformers", "accelerate"), "cupy": ("cupy",), "jax": ("jax",)}
missing = [name for name in NEEDS.get(options.what, ()) if importlib.util.find_spec(name) is None]
if missing:
    digests["left out"] = f"not installed: {', '.join(missing)}"
else:
    WAYS[options.what]()
workload.report(options, digests=digests, failed=failed)
