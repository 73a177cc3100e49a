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
    def images(self, operation: Operation, place: Path | None = None) -> Iterator[Path]:
        """`place`: a folder of a tmpfs, in which its content is. Raises Unavailable: there is no room for it."""
        folder = self.folder(operation)
        with of_the_store("there is no folder for CRIU"):
            if place is None:
                private_folder(folder)
            else:  # which the next daemon finds, whatever its settings are
                private_folder(folder.parent)
                folder.symlink_to(place.absolute() / folder.name)
                folder.readlink().mkdir(mode=0o700)
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
        folder = self.folder(operation)
        if folder.is_symlink():
            shutil.rmtree(folder.readlink(), ignore_errors=True)
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)

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
