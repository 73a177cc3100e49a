"""Work that takes long, in a process of its own: JSON goes in, JSON comes out, and it is killed when its time is up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence


async def answer_of(
    command: Sequence[str], body: bytes, *, within: float, most: int, environment: Mapping[str, str] | None = None
) -> tuple[bytes | None, str]:
    """What it writes, at most so many bytes; or None and why, empty if its time was up. Nothing of it is left."""
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(child.communicate(body), within)
    except TimeoutError:
        return None, ""
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode != 0 or len(out) > most:
        return None, f"ended with exit code {child.returncode}"
    return out, ""
