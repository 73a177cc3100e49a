"""Settings: built-in defaults, then the configuration file (TOML), then the environment (XMIG_*)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

MIB = 1 << 20


def default_runtime_dir() -> Path:
    """/run/xmig for root; for others a folder in $XDG_RUNTIME_DIR, or in /tmp named after the user."""
    if os.geteuid() == 0:
        return Path("/run/xmig")
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "xmig" if base else Path(f"/tmp/xmig-{os.geteuid()}")


def default_state_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/xmig")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "xmig"


def _device_names(value: str) -> str:
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names:
        raise ValueError('no device named; for example "cpu:0,cpu:1"')
    for name in names:
        kind, _, ordinal = name.partition(":")
        if kind not in ("cpu", "null", "cuda") or not ordinal.isdecimal() or int(ordinal) > 63:
            raise ValueError(f'"{name}" is not a device; write kind:ordinal, for example "cpu:0"')
    if len(set(names)) != len(names):
        raise ValueError("a device is named twice")
    return ",".join(names)


class Settings(BaseSettings):
    """Every setting is also an environment variable: XMIG_ and its name in capitals."""

    model_config = SettingsConfigDict(env_prefix="XMIG_", extra="ignore")

    runtime_dir: Path = Field(default_factory=default_runtime_dir, description="sockets and the lock file")
    database: Path = Field(
        default_factory=lambda: default_state_dir() / "xmig.db", description="the SQLite database file"
    )
    native_dir: Path | None = Field(
        default=None, description="folder with xmig-server and libcuda.so.1; default: where the package has them"
    )
    devices: Annotated[str, AfterValidator(_device_names)] = Field(
        default="cpu:0,cpu:1", description="this node's devices, kind:ordinal, separated by commas"
    )
    device_memory: int = Field(default=0, ge=0, description="bytes of each cpu or null device; 0: the device's default")
    journal_mib: int = Field(default=64, ge=4, le=4096, description="size of a process's journal")
    cut_budget: float = Field(default=0.01, gt=0, le=0.5, description="share of a process's time that cuts may cost")
    host: str = Field(default="127.0.0.1", description="address of the read-only TCP API")
    port: int = Field(default=7450, ge=-1, le=65535, description="its port; 0: any free one, -1: no TCP API")
    hang_timeout: float = Field(
        default=300.0, ge=0, le=1e9,
        description="seconds without progress after which a device's work counts as hung; 0: never",
    )  # fmt: skip
    standby: bool = Field(default=True, description="keep one warm standby server per process")
    start_timeout: float = Field(default=30.0, gt=0, description="seconds a new process waits for its server")
    recovery_timeout: float = Field(default=300.0, gt=0, description="seconds a recovery may stay in one phase")
    max_attempts: int = Field(
        default=5, ge=1, description="recoveries in a row without progress before a process is lost"
    )
    stable_after: float = Field(
        default=1.0, gt=0, description="seconds of running after which a recovery counts as progress"
    )
    adoption_grace: float = Field(
        default=5.0, ge=0, description="seconds after a start in which servers of earlier days may announce themselves"
    )
    stop_grace: float = Field(
        default=10.0, ge=0, description="seconds between SIGTERM and SIGKILL when a job is stopped"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False

    @property
    def device_names(self) -> list[str]:
        return self.devices.split(",")

    @property
    def client_socket(self) -> Path:
        return self.runtime_dir / "client.sock"

    @property
    def control_socket(self) -> Path:
        return self.runtime_dir / "control.sock"

    @property
    def api_socket(self) -> Path:
        return self.runtime_dir / "api.sock"

    @property
    def lock_file(self) -> Path:
        return self.runtime_dir / "xmigd.lock"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = os.environ.get("XMIG_CONFIG", "/etc/xmig/xmigd.toml")
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)
