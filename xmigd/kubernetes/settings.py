"""Settings of the adapter to Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from xmigd.configuration import Configuration

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where a pod has its own


def _address(value: str) -> str:
    if value.startswith(("https://", "http://127.0.0.1:", "http://[::1]:")):
        return value.rstrip("/")
    raise ValueError("write https://HOST:PORT: over http, the token could be read")


class KubernetesSettings(Configuration):
    """Every setting is also an environment variable: XMIG_KUBERNETES_ and its name in capitals."""

    model_config = SettingsConfigDict(env_prefix="XMIG_KUBERNETES_", extra="forbid")
    program = "xmig-kubernetes"
    file = "/etc/xmig/xmig-kubernetes.toml"
    file_variable = "XMIG_KUBERNETES_CONFIG"

    node_name: str = Field(
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", description="what Kubernetes calls this node; required"
    )
    server: Annotated[str, AfterValidator(_address)] = Field(
        default="https://kubernetes.default.svc", description="Kubernetes' API server"
    )
    token: Path = Field(default=ACCOUNT / "token", description="file with the token; read again for each request")
    ca: Path = Field(default=ACCOUNT / "ca.crt", description="PEM file of who signed the API server's certificate")
    interval: float = Field(
        default=5.0, gt=0, le=60, description="seconds between two looks at xMIG; changes in Kubernetes come at once"
    )
    drain_seconds: float = Field(
        default=0.0, ge=0, le=86400,
        description="within which the devices of a node that is unschedulable are drained; 0: only if its annotation "
        "xmig.io/drain says so",
    )  # fmt: skip
    margin: float = Field(
        default=2.0,
        ge=0,
        le=60,
        description="seconds before the end of a pod's grace at which a checkpoint is given up",
    )
    proc: Path = Field(default=Path("/proc"), description="the machine's processes, by their pids there")
    control_groups: Path = Field(
        default=Path("/sys/fs/cgroup"),
        description="the machine's control groups: what is restored for a pod comes into its",
    )
    pods_folder: Path | None = Field(
        default=None,
        description="folder that pods mount, with the programs' socket; on the file system of xMIG's runtime "
        "directory, by default beside that, with its name and -pods",
    )  # fmt: skip
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the least important messages that are logged"
    )
    log_json: bool = Field(default=False, description="log a JSON object per line")
