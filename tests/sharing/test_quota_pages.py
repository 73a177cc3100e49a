"""The page of a job's memory quota, as the daemon has it; what claims do in it: tests/native/server_quota_units.cc."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest

from xmigd.errors import ProtocolError, Unavailable
from xmigd.ids import new_id
from xmigd.ipc.fds import Fd
from xmigd.memory import quota
from xmigd.memory.quota import GRANULE, SEQUENCE_BITS, QuotaPage, Quotas

MIB = 1 << 20


def claim(page: QuotaPage, slot: int, mib: int) -> None:
    """As a server writes it."""
    fd = page.again()
    at = quota.HEADER_BYTES + slot * quota.SLOT_BYTES + quota.CLAIM_AT
    os.pwrite(fd.fileno(), struct.pack("<Q", (mib * MIB // GRANULE) << SEQUENCE_BITS | 5), at)


def test_slots_come_and_go() -> None:
    page = QuotaPage.make()
    one, other = new_id(), new_id()
    here = page.take(one, ["cpu:0", "cpu:1"])
    page.arrived(here)
    there = page.take(other, ["cpu:0"])
    claim(page, here[0], 40)
    claim(page, there[0], 20)
    assert (page.used("cpu:0"), page.used("cpu:1"), page.claimed(here)) == (60 * MIB, 0, 40 * MIB)
    assert page.slots_of(one, ["cpu:0", "cpu:1"]) == here
    assert page.slots_of(other, ["cpu:0"]) is None  # it only comes
    assert page.has(one, here, 2)
    assert not page.has(other, here, 2)
    assert not page.has(one, (5000,), 1)
    page.free(here)
    assert page.used("cpu:0") == 20 * MIB
    # What is taken again has no claim.
    assert page.claimed(page.take(one, ["cpu:2"])) == 0


def test_a_process_whose_move_has_just_ended() -> None:
    page, process = QuotaPage.make(), new_id()
    before, after = page.take(process, ["cpu:0", "cpu:1"]), page.take(process, ["cpu:2", "cpu:1"])
    page.arrived(before)
    page.arrived(after)
    firsts = [page.slots_of(process, [device, "cpu:1"]) for device in ("cpu:0", "cpu:2")]
    assert [None if each is None else each[0] for each in firsts] == [before[0], after[0]]
    page.left(before)
    assert page.slots_of(process, ["cpu:2", "cpu:1"]) == after
    page.free(after[1:])
    assert page.slots_of(process, ["cpu:2", "cpu:1"]) is None


def test_what_was_on_a_lost_device() -> None:
    page = QuotaPage.make()
    (moving,), (staying,) = page.take(new_id(), ["cpu:0"]), page.take(new_id(), ["cpu:1"])
    claim(page, moving, 40)
    claim(page, staying, 40)
    assert not page.move(moving, "cpu:1", 79 * MIB)
    assert page.move(moving, "cpu:1", 80 * MIB)
    assert (page.used("cpu:0"), page.used("cpu:1")) == (0, 80 * MIB)
    # While a server that has stopped has the lock, nothing is moved.
    fd = page.again()
    code = (
        f"import fcntl, sys; fcntl.lockf({fd.fileno()}, fcntl.LOCK_EX); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd.fileno(),)
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        assert not page.move(moving, "cpu:0", 80 * MIB)
        holder.kill()
    assert page.move(moving, "cpu:0", 80 * MIB)


def test_a_job_with_more_processes_than_slots() -> None:
    page = QuotaPage.make()
    for _ in range(quota.SLOTS):
        page.take(new_id(), ["cpu:0"])
    with pytest.raises(Unavailable):
        page.take(new_id(), ["cpu:0"])


def test_what_a_server_announces() -> None:
    awaited = {"job"}
    quotas = Quotas(lambda job: job in awaited)
    with pytest.raises(Unavailable):  # another server may have the page
        quotas.of_or_new("job")
    plain = Fd(os.memfd_create("plain", os.MFD_ALLOW_SEALING))
    os.ftruncate(plain.fileno(), quota.BYTES)
    with pytest.raises(ProtocolError):
        quotas.adopt("job", plain)
    page = QuotaPage.make()
    adopted = quotas.adopt("job", page.again())
    assert quotas.of_or_new("job") is adopted
    with pytest.raises(ProtocolError):
        quotas.adopt("job", QuotaPage.make().again())
    assert quotas.of_or_new("other") is not adopted
