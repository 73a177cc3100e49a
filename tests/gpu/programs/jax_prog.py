"""JAX: jit, grad and a training loop with donated arguments."""

from __future__ import annotations

import os

import workload

parser = workload.arguments(__doc__, steps=100)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--batch", type=int, default=128)
options = parser.parse_args()
# By default JAX takes three quarters of the device at once; two of these programs share one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if options.deterministic:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"

from functools import partial  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

if jax.default_backend() != "gpu":
    raise SystemExit(f"JAX has found no GPU; its backend is {jax.default_backend()}")
keys = jax.random.split(jax.random.key(options.seed), options.layers + 1)
weights = [jax.random.normal(key, (options.width, options.width)) / options.width**0.5 for key in keys[1:]]
x = jax.random.normal(keys[0], (options.batch, options.width))


def loss_of(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    y = x
    for weight in weights:
        y = jnp.tanh(y @ weight)
    return jnp.mean((y - x) ** 2)


@partial(jax.jit, donate_argnums=0)
def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    loss, slopes = jax.value_and_grad(loss_of)(weights, x)
    return [weight - 0.1 * slope for weight, slope in zip(weights, slopes, strict=True)], loss


losses: list[jax.Array] = []
steps = workload.Steps(options, lambda: jax.block_until_ready(losses[-1:]))
for _ in steps:
    weights, loss = step(weights, x)
    losses.append(loss)
spectrum = jnp.abs(jnp.fft.fft(weights[0]))
solved = jnp.linalg.solve(weights[0].T @ weights[0] + jnp.eye(options.width), x.T)
workload.report(
    options, losses=[float(loss) for loss in losses],
    sha256=workload.digest(np.asarray(a) for a in (*weights, spectrum, solved)), **steps.figures(),
)  # fmt: skip
