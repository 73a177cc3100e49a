"""Files of keys that the daemon reads because a request names them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import needs_root
from xmigd.checkpoints.keys import private_key
from xmigd.errors import Invalid

KEY = bytes(range(32))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


def refused(path: Path) -> str:
    with pytest.raises(Invalid) as caught:
        private_key(str(path))
    assert caught.value.code == "bad_key"
    return str(caught.value)


class TestPrivateKey:
    def test_bytes_or_digits(self, file: Path) -> None:
        assert private_key(str(file)) == KEY
        file.write_text(KEY.hex() + "\n")
        assert private_key(str(file)) == KEY
        assert private_key(None) is None

    def test_others_must_not_read_it(self, file: Path) -> None:
        for mode in (0o640, 0o604, 0o620):
            file.chmod(mode)
            assert f"chmod 600 {file}" in refused(file)

    @needs_root
    def test_it_must_not_be_another_users(self, file: Path) -> None:
        os.chown(file, 60_010, 60_010)
        assert "others than xmigd" in refused(file)

    def test_a_credential_of_systemd(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file.chmod(0o440)
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(file.parent))
        assert private_key(str(file)) == KEY
        outside = file.parent.with_name("outside")
        outside.write_bytes(KEY)
        outside.chmod(0o644)
        refused(file.parent / ".." / "outside")

    def test_what_is_no_key(self, file: Path, tmp_path: Path) -> None:
        file.write_bytes(b"a secret of somebody")
        assert "secret" not in refused(file)
        os.mkfifo(tmp_path / "pipe", 0o600)
        for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", Path("/dev/zero"), Path("/a\0b")):
            refused(path)
