"""Settings that cannot be used end either program before it has begun anything; it says which, why and what to do."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.harness import ROOT
from xmigd.api.server import bind_tcp
from xmigd.configuration import Configuration
from xmigd.settings import Settings
from xmigd.web.settings import WebSettings

PROGRAMS = [("xmigd", "xmigd.main", "XMIG_"), ("xmig-web", "xmigd.web.main", "XMIG_WEB_")]


def reported(folder: Path, module: str, *arguments: str, **variables: object) -> tuple[int, str]:
    """Exit code and standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XMIG_")}
    own = {"XMIG_RUNTIME_DIR": folder / "run", "XMIG_DATABASE": folder / "xmig.db", "PYTHONPATH": ROOT}
    environment |= {name: str(value) for name, value in (own | variables).items()}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(("program", "module", "prefix"), PROGRAMS)
class TestRefused:
    def test_a_file_that_is_not_there(self, program: str, module: str, prefix: str, tmp_path: Path) -> None:
        code, text = reported(tmp_path, module, "--config", str(tmp_path / "none.toml"))
        assert (code, text) == (2, f"{program}: there is no settings file {tmp_path}/none.toml\n")

    def test_a_file_that_is_not_there_and_that_the_environment_names(
        self, program: str, module: str, prefix: str, tmp_path: Path
    ) -> None:
        code, text = reported(tmp_path, module, **{prefix + "CONFIG": tmp_path / "none.toml"})
        assert (code, text) == (2, f"{program}: there is no settings file {tmp_path}/none.toml\n")

    def test_names_that_are_no_settings(self, program: str, module: str, prefix: str, tmp_path: Path) -> None:
        """A misspelt one leaves the default, with which the node is another one."""
        file = tmp_path / "settings.toml"
        file.write_text('prot = 0\nrainbow = "many"\n')
        code, text = reported(tmp_path, module, "--config", str(file))
        assert code == 2
        assert text.splitlines() == [
            f"{program}: {file} has prot: there is no such setting; is it port?",
            f"{program}: {file} has rainbow: there is no such setting",
        ]

    def test_a_file_that_cannot_be_read(self, program: str, module: str, prefix: str, tmp_path: Path) -> None:
        file = tmp_path / "settings.toml"
        for content in (b'port = "', b"port = \xff"):
            file.write_bytes(content)
            code, text = reported(tmp_path, module, **{prefix + "CONFIG": file})
            assert code == 2
            assert text.startswith(f"{program}: the settings file {file} cannot be read: ")

    def test_values(self, program: str, module: str, prefix: str, tmp_path: Path) -> None:
        file = tmp_path / "settings.toml"
        file.write_text('port = 99999\nlog_level = "loud"\n')
        code, text = reported(tmp_path, module, "--config", str(file))
        assert code == 2
        first, second = text.splitlines()
        assert first.startswith(f"{program}: setting port ({prefix}PORT): Input should be less than")
        assert second.startswith(f"{program}: setting log_level ({prefix}LOG_LEVEL): Input should be 'debug'")

    def test_a_port_that_is_taken(self, program: str, module: str, prefix: str, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            code, text = reported(tmp_path, module, **{prefix + "PORT": taken.getsockname()[1]})
        assert code == 1
        assert text.splitlines()[-1].startswith(f"{program}: cannot listen at 127.0.0.1 port ")
        assert f"choose another port with {prefix}PORT" in text


@pytest.mark.parametrize(("name", "settings"), [("xmigd", Settings), ("xmig-web", WebSettings)])
def test_packaged_files_have_settings_with_their_defaults(name: str, settings: type[Configuration]) -> None:
    lines = re.findall(r"^#([a-z_]+ = .*)$", (ROOT / "packaging" / f"{name}.toml").read_text(), re.MULTILINE)
    packaged = tomllib.loads("\n".join(lines))
    assert packaged
    assert set(packaged) <= set(settings.model_fields)
    if settings is Settings:  # the other one has examples, too
        assert {key: settings.model_fields[key].default for key in packaged} == packaged


def test_who_is_reported_the_address_can_connect() -> None:
    """Before the event loop that will answer runs."""
    with contextlib.closing(bind_tcp("127.0.0.1", 0)) as listening:
        socket.create_connection(listening.getsockname(), timeout=10).close()


def test_a_certificate_of_the_dashboard_that_is_none(tmp_path: Path) -> None:
    none = tmp_path / "none.pem"
    code, text = reported(
        tmp_path, "xmigd.web.main", XMIG_WEB_PORT=0, XMIG_WEB_TLS_CERTIFICATE=none, XMIG_WEB_TLS_KEY=none
    )
    assert code == 1
    assert f"xmig-web: {none} and {none} cannot be used" in text
    assert "XMIG_WEB_TLS_KEY" in text
