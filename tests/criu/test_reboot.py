"""After a restart of the machine, for which a daemon stands in namespaces of its own: other pids, an empty /dev/shm and
/run, another runtime directory. What is left is the disk."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest

from tests import harness
from tests.criu.stopping import stop_at_checkpoint
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.migration.moves import succeeded
from xmigd.demo import node as plain

pytestmark = pytest.mark.criu

FRESH = 'mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && exec "$@"'


class AfterReboot(plain.Node):
    def popen(self, log: IO[bytes]) -> plain.Child:
        command = [
            "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "sh", "-c", FRESH, "sh",
            sys.executable, "-m", "xmigd.main",
        ]  # fmt: skip
        return subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def stop(self) -> None:
        """unshare ignores SIGTERM; everything in its namespace ends with it."""
        if self.process is not None:
            self.kill()


def test_it_is_restored(native_dir: Path, tmp_path: Path) -> None:
    output, undisturbed = tmp_path / "steps", tmp_path / "undisturbed"
    settings = {"criu": criu_or_skip(), "port": -1, "native_dir": native_dir, "device_memory": 1 << 30}
    with harness.own_node(native_dir, port=-1, criu=criu_or_skip()) as node:
        let_end(undisturbed)
        assert start(node, native_dir, undisturbed, 0).finish()[0] == 0
        program = start(node, native_dir, output, 0)
        wait_for_lines(output, STEPS // 4)
        checkpoint = stop_at_checkpoint(program)
        node.kill()
        with tempfile.TemporaryDirectory(prefix="xmig-") as runtime:
            again = AfterReboot(Path(runtime), database=node.folder / "xmig.db", **settings)
            with again:
                succeeded(again, again.client.post(f"/v1/checkpoints/{checkpoint}:restore", {}))
                let_end(output)
                wait_for_lines(output, STEPS)
        assert output.read_text() == undisturbed.read_text()
