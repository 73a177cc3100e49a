"""Settings of the dashboard."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from xmigd.configuration import Configuration
from xmigd.connection_settings import Connections, IdleTimeout, RequestTimeout, UserConnections, UserStreams
from xmigd.place import API_SOCKET, default_runtime_dir, find_place, local_socket


def _address(value: str) -> str:
    if value.startswith(("unix:/", "http://", "https://")):
        return value.rstrip("/")
    raise ValueError("write unix:/path/to/api.sock, or http://… or https://…")


def _local_socket() -> Path:
    """As `xmigctl` finds it."""
    try:
        return local_socket(find_place()).absolute()
    except (OSError, ValueError):  # the daemon's file is not for us
        return default_runtime_dir() / API_SOCKET


class WebSettings(Configuration):
    """Every setting is also an environment variable: XMIG_WEB_ and its name in capitals."""

    model_config = SettingsConfigDict(env_prefix="XMIG_WEB_", extra="forbid")
    program = "xmig-web"
    file = "/etc/xmig/xmig-web.toml"
    file_variable = "XMIG_WEB_CONFIG"

    api: Annotated[str, AfterValidator(_address)] = Field(
        default_factory=lambda: f"unix:{_local_socket()}",
        description="where xmigd answers: unix:/path/to/api.sock, http://host:port or https://host:port; default: in "
        "the runtime directory that xmigd's settings name",
    )
    api_ca: Path | None = Field(default=None, description="certificates (PEM) that an https API is trusted by")
    host: str = Field(default="127.0.0.1", description="address to listen at")
    port: int = Field(default=7451, ge=0, le=65535, description="its port; 0: any free one")
    names: str = Field(
        default="", description="names that visitors may call this host by, separated by commas; default: any, or only "
        "localhost if it listens there",
    )  # fmt: skip
    local: bool = Field(
        default=False,
        description="visitors from this machine who are the user that xmig-web runs as, or root, need no token; "
        "the API gives them what it gives that user",
    )
    tls_certificate: Path | None = Field(default=None, description="certificate chain (PEM); with it, https is spoken")
    tls_key: Path | None = Field(default=None, description="its private key (PEM)")
    session_hours: float = Field(default=12.0, gt=0, le=720, description="hours without a visit that end a session")
    connections: Connections = 1024
    user_connections: UserConnections = 128
    user_streams: UserStreams = 64
    request_timeout: RequestTimeout = 10.0
    idle_timeout: IdleTimeout = 15
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the least important messages that are logged"
    )
    log_json: bool = Field(default=False, description="log a JSON object per line")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        if self.local and not self.listens_here_only:
            raise ValueError(f"local visitors need no token, so the host must be a loopback address, not {self.host}")
        if not self.tls_certificate and not self.listens_here_only and not self.names:
            raise ValueError(
                f"at {self.host}, tokens would cross the network readable by anyone: set tls_certificate and tls_key, "
                "or, behind a proxy that uses https, names"
            )
        return self

    @property
    def listens_here_only(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def allowed_names(self) -> frozenset[str]:
        """Empty: any."""
        names = {name.strip().lower() for name in self.names.split(",") if name.strip()}
        if self.listens_here_only:
            names |= {"localhost", "127.0.0.1", "[::1]", self.host}
        return frozenset(names)
