"""Addresses in networks of jobs."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

import pytest

from xmigd.errors import Conflict, Invalid
from xmigd.networks.addresses import addresses_of, check_range, routes

RANGE = "198.18.0.0/28"


def test_they_follow_from_the_nodes() -> None:
    """And a network is the one of a job: of its nodes in their order, its name and its user."""
    one = addresses_of(RANGE, ["one", "two"], "one", "job", 0)
    two = addresses_of(RANGE, ["one", "two"], "two", "job", 0)
    assert one.key == two.key
    assert (one.all, one.own, two.own, one.prefix) == (("198.18.0.1", "198.18.0.2"), 0, 1, 28)
    others = [
        addresses_of(RANGE, ["two", "one"], "one", "job", 0), addresses_of(RANGE, ["one", "two"], "one", "other", 0),
        addresses_of(RANGE, ["one", "two"], "one", "job", 1000),
        addresses_of("198.19.0.0/28", ["one", "two"], "one", "job", 0),
    ]  # fmt: skip
    assert len({each.key for each in (one, *others)}) == 5


def test_who_has_none() -> None:
    for nodes in (["one"], ["two", "three"], [f"n{number}" for number in range(14)] + ["one"]):
        with pytest.raises(Invalid):
            addresses_of(RANGE, nodes, "one", "job", 0)
    assert addresses_of(RANGE, [f"n{number}" for number in range(13)] + ["one"], "one", "job", 0).own == 13


def test_routes(tmp_path: Path) -> None:
    """As the kernel lists them: words of the machine's order; the default one is none that is in the way."""
    table = tmp_path / "route"
    table.write_text(
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        "eth0 00000000 0100A8C0 0003 0 0 0 00000000 0 0 0\n"
        "eth0 0000000A 0100A8C0 0003 0 0 0 000000FF 0 0 0\n"
        "eth0 000012C6 00000000 0001 0 0 0 0000FEFF 0 0 0\n"
    )
    found = routes(table)
    assert found == [IPv4Network("10.0.0.0/8"), IPv4Network("198.18.0.0/15")]
    check_range("172.30.0.0/24", found)
    for taken in ("10.4.0.0/24", RANGE):
        with pytest.raises(Conflict) as caught:
            check_range(taken, found)
        assert caught.value.code == "job_network_in_use"
    assert routes(tmp_path / "none") == []
