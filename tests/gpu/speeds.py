"""What the device and its buses can: hashing, and copies between it and host memory that is not page-locked."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gpu.bench import Bench
from xmigd.measurements import Row

MIB = 12288
HASHED = 0.9  # of what the device's memory can do
WAYS = {  # with the target of each
    "to_new": ("from the device to new host memory", None),
    "to_kept": ("from the device to host memory kept ready", 45),
    "from_kept": ("from host memory to the device", 45),
}


def measure(bench: Bench) -> Iterator[Row]:
    reported = bench.can(64 if bench.rehearsal else MIB)
    size = f"{reported['bytes'] / 1e9:.1f} GB"
    peak = bench.memory_bandwidth()
    yield Row(
        name="content hash", value=round(reported["hash_gb_s"], 1), unit="GB/s", target=round(HASHED * peak),
        better="higher", conditions=f"chunks of 2 MiB, {size}; median of 9; the target is {HASHED:.0%} of {peak:.0f} "
        "GB/s, what the memory's clock and width can do",
    )  # fmt: skip
    yield Row(
        name="content copied and hashed", value=round(reported["copy_and_hash_gb_s"], 1), unit="GB/s", better="higher",
        conditions=f"on the device, half of {size} to the other half, chunks of 2 MiB that lie apart; median of 9",
    )  # fmt: skip
    yield Row(
        name="a server's driver and context", value=round(reported["open_ms"], 1), unit="ms", better="lower",
        conditions="the driver's start, one context, the built-in kernels; once",
    )  # fmt: skip
    for way, (text, target) in WAYS.items():
        speeds = {int(threads): figures[f"{way}_gb_s"] for threads, figures in reported["threads"].items()}
        spent = reported["threads"]["16"][f"{way}_thread_ms"]
        others = ", ".join(f"{threads}: {speeds[threads]:.1f}" for threads in sorted(speeds))
        yield Row(
            name=text, value=round(speeds[16], 1), unit="GB/s", target=target, better="higher",
            conditions=f"{size} in memfds of 64 MiB, 16 threads; by number of threads {others}; "
            f"the sixteen spent {spent['copying']} ms copying, {spent['device']} waiting for the device, "
            f"{spent['buffers']} making buffers",
        )  # fmt: skip
