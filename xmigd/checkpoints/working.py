"""Where CRIU works for an operation: a folder for its images, which the next daemon looks into if this one ends in the
middle."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from xmigd.checkpoints.criu import ended
from xmigd.checkpoints.making import of_the_store
from xmigd.checkpoints.pids import end, stopped, tree
from xmigd.operations.operation import Operation
from xmigd.store.objects import private_folder


class Working:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self, operation: Operation) -> Path:
        return self._folder / f"criu-{operation.id}"

    @contextlib.contextmanager
    def images(self, operation: Operation) -> Iterator[Path]:
        """Raises Unavailable: there is no room for it."""
        folder = self.folder(operation)
        with of_the_store("there is no folder for CRIU"):
            private_folder(folder)
        try:
            yield folder
        except asyncio.CancelledError:  # this daemon leaves, and CRIU goes on
            raise
        except BaseException:
            self.forget(operation)
            raise
        self.forget(operation)

    def forget(self, operation: Operation) -> None:
        """Blocks."""
        shutil.rmtree(self.folder(operation), ignore_errors=True)

    async def left(self, operation: Operation) -> int | None:
        """The pid of what the CRIU of an earlier daemon has restored, once that CRIU has ended."""
        return await asyncio.to_thread(ended, self.folder(operation))

    async def settle(self, operation: Operation) -> None:
        """Wait for the CRIU that an earlier daemon started. What it has restored is ended, if it stands still."""
        pid = await self.left(operation)
        if pid is not None:
            with contextlib.suppress(OSError):  # it has ended
                if stopped(pid):
                    await end(tree(pid))
        await asyncio.to_thread(self.forget, operation)
