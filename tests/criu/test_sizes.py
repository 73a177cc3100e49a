"""Restored on a device of another size: where the content fits, and refused where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness
from tests.criu.stopping import stop_at_checkpoint
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.migration.moves import succeeded
from xmigd.client import Refused
from xmigd.demo.node import Node

pytestmark = pytest.mark.criu


def test_another_size(native_dir: Path, tmp_path: Path) -> None:
    output, undisturbed = tmp_path / "steps", tmp_path / "undisturbed"
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        let_end(undisturbed)
        assert start(node, native_dir, undisturbed, 0).finish()[0] == 0
        program = start(node, native_dir, output, 0)
        wait_for_lines(output, STEPS // 4)
        path = f"/v1/checkpoints/{stop_at_checkpoint(program)}:restore"
        restarted(node, 1 << 18)
        with pytest.raises(Refused, match=r"cpu:1 has room for .* are missing"):
            node.client.post(path, {"devices": ["cpu:1"]})
        restarted(node, 1 << 28)
        succeeded(node, node.client.post(path, {"devices": ["cpu:1"]}))
        let_end(output)
        wait_for_lines(output, STEPS)
        assert output.read_text() == undisturbed.read_text()


def restarted(node: Node, device_memory: int) -> None:
    """With devices of this size."""
    node.kill()
    node.environment["XMIG_DEVICE_MEMORY"] = str(device_memory)
    node.start()
