"""JAX's compiled graphs: loops, branches and gradients of scans, whose nodes it sets again when its memory moves."""

from __future__ import annotations

import os

import workload

parser = workload.arguments(__doc__, steps=40)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Loops and branches as conditional nodes of graphs, however small these are.
kinds = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1 "
    "--xla_gpu_deterministic_ops=true"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

if jax.default_backend() != "gpu":
    raise SystemExit(f"JAX has found no GPU; its backend is {jax.default_backend()}")


@jax.checkpoint
def one(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sin(carry) * x, carry


@jax.jit
@jax.grad
def slope_of_scan(start: jax.Array) -> jax.Array:
    return lax.scan(one, start, jnp.arange(1.0, 9.0))[0].sum()


@jax.jit
def loop(x: jax.Array, rounds: jax.Array) -> tuple[jax.Array, jax.Array]:
    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, v = state
        v = lax.cond(v[0] > 5, lambda v: v * 0.5, lambda v: v + 1, v)
        return i + 1, lax.switch(i % 3, [lambda v: v + 1, lambda v: v * 1.5, lambda v: v - 2], v)

    return lax.while_loop(lambda state: state[0] < rounds, body, (jnp.int32(0), x))


@jax.jit
def branch(which: jax.Array, x: jax.Array) -> jax.Array:
    return lax.switch(
        which, [jnp.sin, jnp.cos, lambda v: v @ v.T @ v, lambda v: lax.cond(v[0, 0] > 0, jnp.exp, jnp.abs, v)], x
    )


results: list[jax.Array] = []
kept: list[jax.Array] = []
steps = workload.Steps(options, lambda: jax.block_until_ready(results[-1:]))
square = jax.random.normal(jax.random.key(options.seed), (options.width, options.width))
for number, _ in enumerate(steps):
    results.append(slope_of_scan(jnp.ones(options.width) + number))
    results.extend(loop(jnp.arange(float(options.width)) + number, jnp.int32(number % 7)))
    results.append(branch(jnp.int32(number % 5), square))
    if number % 3 == 0:
        kept.append(jnp.zeros((number + 1, 1000)))  # so that memory moves
workload.report(
    options, last=[float(np.asarray(result).sum()) for result in results[-4:]],
    sha256=workload.digest(np.asarray(result) for result in results), **steps.figures(),
)  # fmt: skip
