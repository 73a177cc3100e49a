"""JAX with two devices in one process: `pmap` with a sum of gradients, and `shard_map` with a gather and a permutation.
Losses and a digest of the weights, in one line of JSON."""

from __future__ import annotations

import os

import workload

parser = workload.arguments(__doc__, steps=1500)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--batch", type=int, default=64)
options = parser.parse_args()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["NCCL_NVLS_ENABLE"] = "0"
if options.deterministic:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"

from functools import partial  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

devices = jax.devices()[:2]
if len(devices) < 2 or devices[0].platform != "gpu":
    raise SystemExit(f"JAX has found {devices}: two GPUs are needed")
width = options.width
key = jax.random.key(options.seed)
weights = jax.random.normal(key, (width, width)) / width**0.5
batches = jax.random.normal(jax.random.split(key)[1], (2, options.batch, width))


def loss_of(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ weights) - x) ** 2)


@partial(jax.pmap, axis_name="data", devices=devices)
def train(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, slope = jax.value_and_grad(loss_of)(weights, x)
    return weights - 0.1 * jax.lax.pmean(slope, "data"), jax.lax.pmean(loss, "data")


mesh = Mesh(np.array(devices), ("part",))


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("part"), out_specs=PartitionSpec("part"))
def turn(x: jax.Array) -> jax.Array:
    whole = jax.lax.all_gather(x, "part", tiled=True)
    other = jax.lax.ppermute(x, "part", [(0, 1), (1, 0)])
    return jnp.cos(other + jax.lax.psum_scatter(whole, "part", tiled=True))


both = jnp.stack([weights, weights])
turned = jax.random.normal(key, (2 * options.batch, width))
losses: list[jax.Array] = []
status = workload.Status(options.status.with_suffix(".0") if options.status else None)
for number in range(options.steps):
    status.step(number)
    status.phase("forward")
    both, loss = train(both, batches)
    turned = turn(turned)
    losses.append(loss)
    jax.block_until_ready((loss, turned))
status.phase("end")
workload.report(
    options, rank=0, losses=[float(loss[0]) for loss in losses],
    sha256=workload.digest(np.asarray(each) for each in (both, turned)),
)  # fmt: skip
