"""Networks between daemons that fail: messages arrive once and in order as long as both daemons live."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.namespaces import NetworkNode, needs_networks, nodes
from tests.peers.nodes import PeerNode, Proxy, acquainted, connected, daemons

COUNT, EACH, DISTURBANCES = 10_000, 100, 50
PORT = 7460


def test_nothing_is_lost_over_fifty_lost_connections(native_dir: Path) -> None:
    """Both directions go through proxies, so every connection is lost, whoever made it."""
    with daemons(native_dir, "a", "b") as (a, b), Proxy(b.address, 1) as to_b, Proxy(a.address, 2) as to_a:
        a.knows(b, to_b.address)
        b.knows(a, to_a.address)
        connected(a, b)
        to_a.delay = to_b.delay = 0.002  # so that much is under way at any time
        sent = lost = 0
        while sent < COUNT or lost < DISTURBANCES:
            before = to_a.forwarded + to_b.forwarded
            if sent < COUNT:
                sent += EACH
                assert a.send(b, EACH, 200) == b.send(a, EACH, 200) == EACH
                some = before + 1000 * (sent // EACH % 20)  # of the 50,000 bytes that this takes
                wait_until(lambda: to_a.forwarded + to_b.forwarded >= some, "some of it comes through")  # noqa: B023
            lost += to_a.sever() + to_b.sever()
            for here, there in ((a, b), (b, a)):
                here.until_heard(there, sent)
                here.until(there.name, "connected")
        for here, there in ((a, b), (b, a)):
            heard = here.heard(there)
            assert (heard["wrong"], heard["last"], heard["events"].count("session")) == ([], COUNT, 1)
            assert heard["events"].count("up") > DISTURBANCES


def test_a_slow_network_that_splits_everything(native_dir: Path) -> None:
    with daemons(native_dir, "a", "b") as (a, b), Proxy(b.address, 3) as to_b, Proxy(a.address, 4) as to_a:
        to_a.delay = to_b.delay = 0.005
        a.knows(b, to_b.address)
        b.knows(a, to_a.address)
        connected(a, b)
        assert a.send(b, 200, 1000) == b.send(a, 200, 1000) == 200
        for here, there in ((a, b), (b, a)):
            heard = here.until_heard(there, 200)
            assert (heard["wrong"], heard["events"]) == ([], ["session", "up"])


@contextlib.contextmanager
def joined(native_dir: Path, each: list[NetworkNode]) -> Iterator[list[PeerNode]]:
    """A daemon in each of these networks, all of which know each other."""
    with contextlib.ExitStack() as stack:
        made = []
        for network, name in zip(each, "abcdefgh", strict=False):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-")))
            node = PeerNode(folder, name, native_dir, network=network, port=PORT)
            made.append(stack.enter_context(node))
        acquainted(*made)
        yield made


@needs_networks
def test_nodes_with_networks_of_their_own(native_dir: Path) -> None:
    with nodes(3) as each, joined(native_dir, each) as (a, b, c):
        each[1].unplug()  # nobody is informed: both sides notice the silence
        a.until("b", "unreachable", "silent for 5 s")
        b.until("a", "unreachable")
        assert a.send(b, 500, 100) == b.send(a, 500, 100) == 500
        assert a.send(c, 500, 100) == c.until_heard(a, 500)["last"]  # others go on
        each[1].plug()
        for here, there in ((a, b), (b, a)):
            heard = here.until_heard(there, 500)
            assert (heard["wrong"], heard["events"].count("session")) == ([], 1)
        assert a.heard(c)["events"] == ["session", "up"]

        each[0].link_down()
        a.until("b", "unreachable")
        assert b.send(a, 500) == 500
        each[0].link_up()
        assert a.until_heard(b, 1000)["wrong"] == []

        each[2].slow(400)
        assert a.send(c, 100, 1000) == 100
        assert c.until_heard(a, 600)["wrong"] == []
        each[2].fast()


@needs_networks
@pytest.mark.parametrize("times", [10])
def test_a_network_that_comes_and_goes(native_dir: Path, times: int) -> None:
    """For shorter than the silence: TCP repeats what was lost, and no connection is."""
    with nodes(2) as each, joined(native_dir, each) as (a, b):
        for _ in range(times):
            each[1].unplug()
            assert a.send(b, 100) == b.send(a, 100) == 100
            each[1].plug()
        for here, there in ((a, b), (b, a)):
            heard = here.until_heard(there, 100 * times)
            assert (heard["wrong"], heard["events"]) == ([], ["session", "up"])
