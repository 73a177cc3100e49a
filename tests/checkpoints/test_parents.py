"""CRIU's image of a program that is to end with its parent."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmigd.checkpoints.parents import without_death_signal
from xmigd.store.objects import Damaged

# mtype 1; thread_info, of which nothing is known here; thread_core: futex_rla 300, futex_rla_len 24, a creds entry.
BEFORE = bytes.fromhex("0801 1203 616263".replace(" ", ""))
CORE = bytes.fromhex("08ac02 1018 5202 7879".replace(" ", ""))
DEATH = bytes.fromhex("4009")
AFTER = bytes.fromhex("31 0102030405060708 3d 01020304".replace(" ", ""))


def image(core: bytes, rest: bytes = b"") -> bytes:
    entry = BEFORE + bytes([0x2A, len(core)]) + core + AFTER
    return b"19CVTU8\x05" + struct.pack("<I", len(entry)) + entry + rest


class TestWithoutDeathSignal:
    @pytest.mark.parametrize("at", [0, 3, 5, 9])
    def test_nothing_else_is_changed(self, at: int) -> None:
        assert without_death_signal(image(CORE[:at] + DEATH + CORE[at:], b"rest")) == image(CORE, b"rest")
        assert without_death_signal(image(CORE)) == image(CORE)

    @pytest.mark.parametrize("length", range(12))
    def test_too_short(self, length: int) -> None:
        with pytest.raises(Damaged):
            without_death_signal(image(CORE)[:length])

    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=80))
    def test_anything(self, data: bytes) -> None:
        try:
            without_death_signal(data)
        except Damaged:
            return
