"""What is in the state directory: this daemon's key, and the peers that were entered."""

from __future__ import annotations

import json
import ssl
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmigd.errors import Conflict, Invalid, NotFound, StartError
from xmigd.peers.certificates import FILE, fingerprint_of, open_identity, read_server_name, server_name
from xmigd.peers.known import FILE as KNOWN
from xmigd.peers.known import MOST, KnownPeer, KnownPeers, split_address
from xmigd.settings import Settings, node_name


def test_an_identity_is_made_once(tmp_path: Path) -> None:
    first = open_identity(tmp_path)
    assert open_identity(tmp_path) == first
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert fingerprint_of(first.certificate) == first.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    other = tmp_path / "other"
    other.mkdir()
    assert open_identity(other).fingerprint != first.fingerprint
    assert "PRIVATE" not in first.certificate


def test_identities_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / FILE
    whole = open_identity(tmp_path)
    text = path.read_text()
    for broken in ("", "x", whole.certificate, text[: len(text) // 2], "\u00e9"):
        path.write_text(broken)
        with pytest.raises(StartError, match=FILE):
            open_identity(tmp_path)
    path.write_text(text)
    path.chmod(0o640)
    with pytest.raises(StartError, match="others may read"):
        open_identity(tmp_path)
    with pytest.raises(StartError, match="cannot be read or made"):
        open_identity(tmp_path / "nowhere")


@given(st.from_regex(r"[a-z0-9.-]{1,64}", fullmatch=True))
def test_a_client_names_itself(name: str) -> None:
    sent = server_name(name)
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=sent)
    assert read_server_name(sent) == name


@given(st.text())
def test_any_name_is_read(name: str) -> None:
    assert isinstance(read_server_name(name), str)
    assert isinstance(read_server_name(name + ".peer.xmig"), str)


@given(st.text())
def test_any_host_has_a_name_as_a_node(host: str) -> None:
    assert Settings(node=node_name(host)).node


def test_addresses() -> None:
    assert split_address("host-1.example:7460") == ("host-1.example", 7460)
    assert split_address("[fe80::1%eth0]:1") == ("fe80::1%eth0", 1)
    for wrong in ("", "host", "host:", ":1", "host:0", "host:65536", "fe80::1:1", "[fe80::1]", "a b:1", "host:1\n"):
        with pytest.raises(ValueError, match=r"address|port"):
            split_address(wrong)


def peer(name: str, fingerprint: str = "") -> KnownPeer:
    return KnownPeer(name, f"{name}:1", fingerprint or name.encode().hex().zfill(64))


def test_what_is_entered_is_there_again(tmp_path: Path) -> None:
    identity = open_identity(tmp_path)
    known = KnownPeers(tmp_path, "a", identity)
    (tmp_path / "b").mkdir()
    certified = open_identity(tmp_path / "b")
    for each in (KnownPeer("b", "b:1", certified.fingerprint), peer("c")):
        known.check(each)
        known.write(known.content(also=each))
        known.put(each)
    known.learn("b", certified.certificate)
    known.write(known.content())
    assert list(KnownPeers(tmp_path, "a", identity)) == list(known)
    assert stat.S_IMODE((tmp_path / KNOWN).stat().st_mode) == 0o600
    known.write(known.content(without="b"))
    assert [each.name for each in KnownPeers(tmp_path, "a", identity)] == ["c"]
    for wrong in (peer("c"), peer("d", peer("c").fingerprint)):
        with pytest.raises(Conflict):
            known.check(wrong)
    with pytest.raises(Invalid, match="d is this node"):
        known.check(peer("d", identity.fingerprint))
    with pytest.raises(Invalid, match="called a, too: two nodes with one name"):
        known.check(peer("a"))
    with pytest.raises(NotFound):
        known.find("x")
    for number in range(MOST):
        known.put(peer(f"n{number}"))
    with pytest.raises(Conflict, match=f"{MOST} peers"):
        known.check(peer("d"))


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    identity = open_identity(tmp_path)
    good = {"name": "b", "address": "b:1", "fingerprint": "0" * 64}
    wrong: list[object] = [
        None, [], {}, {"peers": 1}, {"peers": [{}]}, {"peers": [good | {"more": 1}]}, {"peers": [good, good]},
        {"peers": [good | {"name": "B"}]}, {"peers": [good | {"address": 1}]}, {"peers": [good | {"certificate": "x"}]},
    ]  # fmt: skip
    for content in wrong:
        (tmp_path / KNOWN).write_text(json.dumps(content))
        with pytest.raises(StartError, match=KNOWN):
            KnownPeers(tmp_path, "a", identity)
    (tmp_path / KNOWN).write_bytes(b"\xff")
    with pytest.raises(StartError, match=KNOWN):
        KnownPeers(tmp_path, "a", identity)


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    identity = open_identity(tmp_path)
    known = KnownPeers(tmp_path, "a", identity)
    known.write(known.content(also=peer("b")))
    (tmp_path / f".{KNOWN}.new").mkdir()  # nothing can be written there
    with pytest.raises(OSError, match="directory"):
        known.write(known.content())
    assert [each.name for each in KnownPeers(tmp_path, "a", identity)] == ["b"]
