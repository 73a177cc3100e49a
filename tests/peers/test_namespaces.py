"""Namespaces as tests use them: nodes reach each other, until one is unplugged; nothing is left of them."""

from __future__ import annotations

import subprocess
import sys

from tests.namespaces import PLACES, NetworkNode, needs_networks, nodes

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 9000), 0.5)"
LISTEN = """
import socket
server = socket.create_server(("", 9000))
print("ready", flush=True)
while True:
    server.accept()
"""


def reaches(node: NetworkNode, address: str) -> bool:
    return node.run([sys.executable, "-c", CONNECT, address], stderr=subprocess.DEVNULL).wait() == 0


@needs_networks
def test_nodes_reach_each_other_until_one_is_unplugged() -> None:
    with nodes(3) as each:
        listening = each[0].run([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
        assert listening.stdout is not None
        assert listening.stdout.readline() == b"ready\n"
        address = each[0].address
        assert reaches(each[1], address)
        assert reaches(each[2], address)
        each[1].unplug()
        assert not reaches(each[1], address)
        assert reaches(each[2], address)
        each[1].plug()
        assert reaches(each[1], address)
        each[0].link_down()
        assert not reaches(each[2], address)
        each[0].link_up()
        assert reaches(each[2], address)
        each[2].slow(1000)
        assert reaches(each[2], address)
        each[2].fast()
    with listening:
        assert listening.wait(10) == -9  # it ended with its namespace
    assert not [node for node in each if (PLACES / node.name).exists()]
