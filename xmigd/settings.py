"""Settings of the daemon."""

from __future__ import annotations

import os
import re
import socket
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from xmigd.configuration import Configuration
from xmigd.connection_settings import Connections, IdleTimeout, RequestTimeout, UserConnections, UserStreams
from xmigd.peers.contract import NAME
from xmigd.place import FILE, FILE_VARIABLE, PREFIX, Place, default_runtime_dir

MIB = 1 << 20
# What `systemctl reload` takes over, for what happens or begins from then on. What is a policy, too, is changed through
# the API, and by a restart.
RELOADED = frozenset({
    "journal_mib", "log_json", "log_level", "recovery_timeout", "stable_after", "standby", "start_timeout",
    "stop_grace",
})  # fmt: skip


def default_state_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/xmig")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "xmig"


def node_name(host: str) -> str:
    """A host's name as a node's."""
    return re.sub(r"[^a-z0-9.-]", "-", host.lower())[:64] or "node"


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


def _each_device(value: str) -> str:
    """None, or as `devices`. Raises ValueError."""
    return _device_names(value) if value.strip(", ") else ""


def _range(value: str) -> str:
    """Raises ValueError."""
    found = IPv4Network(value)
    if not 16 <= found.prefixlen <= 28 or found.is_loopback or found.is_multicast or found.is_link_local:
        raise ValueError("write a range of IPv4, from /16 to /28, for example 198.18.0.0/24")
    return str(found)


def _mirror(value: str) -> str:
    if "://" not in value:
        return str(Path(value).absolute()) if value else ""
    parts = urlsplit(value)
    if parts.scheme != "s3" or not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc):
        raise ValueError("name a directory, or s3://BUCKET/PREFIX")
    if not re.fullmatch(r"(/[A-Za-z0-9._=-]+)*/?", parts.path) or parts.query or parts.fragment:
        raise ValueError("the prefix consists of letters, digits, and . _ = -, with / between its parts")
    return value.rstrip("/")


def _endpoint(value: str) -> str:
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment):
        raise ValueError("write https://HOST:PORT")
    if "@" in parts.netloc:
        raise ValueError("credentials do not belong here: name their file with checkpoint_mirror_credentials")
    return value.rstrip("/")


def _endpoints(value: str) -> str:
    """Raises ValueError."""
    for each in filter(None, value.split(",")):
        parts = urlsplit(each)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or "@" in parts.netloc:
            raise ValueError(f"{each!r} is no address of etcd: write http(s)://HOST:PORT")
        _ = parts.port  # raises ValueError
    return ",".join(each.rstrip("/") for each in value.split(",") if each)


class Settings(Configuration):
    """Every setting is also an environment variable: XMIG_ and its name in capitals."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid")
    program = "xmigd"
    file = FILE
    file_variable = FILE_VARIABLE

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
    stall_bound: float = Field(
        default=0.2,
        gt=0,
        le=3600,
        description="seconds below which the expected stall of a process is kept by snapshots",
    )
    snapshot_cost: float = Field(
        default=0.01, gt=0, le=0.5, description="share of a process's time that snapshots may cost for that"
    )
    standby_communicators_mib: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="device memory that the communicators of a rank's standby may take; 0: standbys make none",
    )
    replica_copies_mib: int = Field(
        default=0,
        ge=0,
        le=1 << 24,
        description="host memory for copies of what only one device of a job's ranks has, shared equally; 0: none",
    )
    neighbour_copies_rate: float = Field(
        default=0,
        ge=0,
        le=1e6,
        allow_inf_nan=False,
        description="MiB a second of such copies that the next node of a job may be sent; 0: it is sent none",
    )
    neighbour_copies_mib: int = Field(
        default=0,
        ge=0,
        le=1 << 24,
        description="host memory for such copies of other nodes; 0: none are kept",
    )
    replica_check: float = Field(
        default=10.0,
        ge=0,
        le=1e6,
        description="seconds between two comparisons of what a job's ranks hold; 0: none",
    )
    replica_policy: Literal["report", "restore", "stop"] = Field(
        default="report",
        description="when the memory of a rank differs from that of its replicas, unless the job says what then",
    )
    host: str = Field(default="127.0.0.1", description="address of the API on TCP, for callers with a token")
    port: int = Field(default=7450, ge=-1, le=65535, description="its port; 0: any free one, -1: no TCP API")
    tls_cert: Path | None = Field(default=None, description="PEM file: the certificate of the TCP API, with its chain")
    tls_key: Path | None = Field(default=None, description="PEM file: its key; default: it is in tls_cert")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM file: who has to have signed the certificates of callers on TCP"
    )
    plain_tcp: bool = Field(
        default=False, description="let the TCP API listen without TLS elsewhere than on this machine's loopback"
    )
    open_reading: bool = Field(
        default=False, description="let everybody on this machine read everything over TCP, without a token"
    )
    node: str = Field(
        default_factory=lambda: node_name(socket.gethostname()), pattern=NAME,
        description="this node's name for its peers, the daemons of other nodes",
    )  # fmt: skip
    peer_host: str = Field(default="0.0.0.0", description="address at which peers connect")
    peer_port: int = Field(
        default=-1,
        ge=-1,
        le=65535,
        description="its port; 0: any free one, -1: none, and this node only connects",
    )
    job_network: Annotated[str, AfterValidator(_range)] = Field(
        default="198.18.0.0/24",
        description="addresses of the networks of jobs of several nodes (`xmigctl run --network job`), the same on "
        "each node: IPv4, from /16 to /28. All jobs have the same ones, and nobody else sees them",
    )
    programs_from: str = Field(
        default="", max_length=5000, pattern=r"^(\*|[a-z0-9.,-]*)$",
        description="peers from which this node takes programs that move, separated by commas; *: all that it knows",
    )  # fmt: skip
    fleet_readers: str = Field(
        default="", max_length=5000, pattern=r"^(\*|[a-z0-9.,-]*)$",
        description="peers whose callers see this node's jobs as they would here, operators all, users those of their "
        "number; separated by commas; *: all that it knows",
    )  # fmt: skip
    fleet_controllers: str = Field(
        default="", max_length=5000, pattern=r"^(\*|[a-z0-9.,-]*)$",
        description="peers whose operators may have jobs of this node moved; separated by commas; *: all that it knows",
    )  # fmt: skip
    etcd_endpoints: Annotated[str, AfterValidator(_endpoints)] = Field(
        default="",
        description="addresses of an etcd, http(s)://HOST:PORT, separated by commas: a job moves to another node only "
        "under its lease there; empty: without leases",
    )
    etcd_ca: Path | None = Field(default=None, description="PEM file of who signed etcd's certificate")
    etcd_certificate: Path | None = Field(default=None, description="PEM file of a certificate that etcd asks for")
    etcd_key: Path | None = Field(default=None, description="PEM file of its key; default: in the same file")
    lease_seconds: int = Field(
        default=15, ge=2, le=3600, description="seconds after which a lease that is not kept alive is lost"
    )
    operators_group: str = Field(default="", description="group whose members see and control everything")
    request_rate: float = Field(
        default=2000.0, ge=0, description="requests a second that one caller may make, twice that at once; 0: any"
    )
    connections: Connections = 1024
    user_connections: UserConnections = 128
    user_streams: UserStreams = 64
    request_timeout: RequestTimeout = 10.0
    idle_timeout: IdleTimeout = 15
    hang_timeout: float = Field(
        default=300.0, ge=0, le=1e9,
        description="seconds without progress after which a device's work counts as hung; 0: never",
    )  # fmt: skip
    health_interval: float = Field(
        default=5.0, ge=0, description="seconds between two readings of the health of GPUs; 0: it is not read"
    )
    kernel_log: Path = Field(default=Path("/dev/kmsg"), description="where the driver reports Xids")
    standby: bool = Field(default=True, description="keep one warm standby server per process")
    preload: bool = Field(
        default=True, description="let standbys map the memory of their process, and load its modules and kernels"
    )
    host_pool_mib: int = Field(
        default=0, ge=0, description="MiB of host memory that is kept ready for suspended processes; 0: none"
    )
    # Natively a start is slow, and does not fail, when many programs start at once on a machine that was just booted.
    start_timeout: float = Field(default=120.0, gt=0, description="seconds a new process waits for its server")
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
    job_scopes: bool = Field(
        default=True, description="let `xmigctl run` make a program that begins in a login a systemd unit of its own"
    )
    criu: Path = Field(default=Path("criu"), description="CRIU 4 or later, which writes programs into checkpoints")
    checkpoint_every: float = Field(
        default=0.0, ge=0, le=525_600,
        description="minutes between two checkpoints of a job that has no policy of its own; 0: none",
    )  # fmt: skip
    checkpoint_keep: int = Field(
        default=3, ge=1, le=1000, description="checkpoints of such a job that are kept; older ones are removed"
    )
    checkpoint_before_drain: bool = Field(
        default=False, description="make a checkpoint of such a job before a drain moves it off its device"
    )
    checkpoint_last: bool = Field(
        default=True, description="make a checkpoint of a process that no recovery brings further, before it is lost"
    )
    checkpoint_mib: int = Field(
        default=0, ge=0, description="size of the folder of checkpoints beyond which none is made; 0: the disk's"
    )
    checkpoint_free_mib: int = Field(
        default=256, ge=0, description="room on the disk of checkpoints that a new one has to leave"
    )
    checkpoint_memory_mib: int = Field(
        default=0, ge=0,
        description="MiB of host memory for the newest checkpoints, from where they go to the disk; 0: none",
    )  # fmt: skip
    checkpoint_memory_dir: Path | None = Field(
        default=None, description="folder of a tmpfs for them; default: one of the daemon's own in /dev/shm"
    )
    checkpoint_mirror: Annotated[str, AfterValidator(_mirror)] = Field(
        default="",
        description="directory, of another machine say, or s3://BUCKET/PREFIX, that gets a copy of each finished "
        "checkpoint; empty: none",
    )
    checkpoint_mirror_endpoint: Annotated[str, AfterValidator(_endpoint)] = Field(
        default="", description="address of the S3-compatible store, https://HOST:PORT; empty: that of AWS"
    )
    checkpoint_mirror_region: str = Field(
        default="us-east-1", pattern=r"^[a-z0-9-]{1,64}$", description="region of the bucket"
    )
    checkpoint_mirror_credentials: Path | None = Field(
        default=None,
        description="file of the bucket's credentials, as ~/.aws/credentials; it belongs to root or the daemon's user, "
        "and nobody else may read it, or systemd has passed it to the daemon as a credential",
    )
    profile_every: int = Field(
        default=0, ge=0, le=1 << 20,
        description="one of so many operations is timed for profiles, say 64; 0: no profiles",
    )  # fmt: skip
    trace_mib: int = Field(
        default=64, ge=1, le=4096, description="memory that a server gets for a trace; an operation takes 88 bytes"
    )
    traces_kept: int = Field(default=20, ge=1, le=10_000, description="files of traces that are kept")
    reserve_predicted: bool = Field(
        default=False, description="reserve the predicted P90 of its device memory for a job that names none, if known"
    )
    critical_users: str = Field(
        default="", max_length=10_000,
        description="who may start critical jobs, beside operators: names, numbers, @groups, by commas; *: all",
    )  # fmt: skip
    best_effort_backlog: int = Field(
        default=4, ge=1, le=1024,
        description="kernels that a best-effort job gives a device at once which it shares with critical or other "
        "best-effort jobs",
    )  # fmt: skip
    best_effort_backlog_us: int = Field(
        default=1000, ge=1, le=10_000_000,
        description="microseconds that those may take, as estimated; one kernel is always given",
    )  # fmt: skip
    best_effort_wait: float = Field(
        default=0.1, ge=0, le=10, description="seconds that a kernel of a best-effort job waits for others at most"
    )
    best_effort_slice: float = Field(
        default=0.02, ge=0.001, le=10, description="seconds of a best-effort job's turn among others of its device"
    )
    mps_devices: Annotated[str, AfterValidator(_each_device)] = Field(
        default="",
        description="devices whose jobs run at the same time, through NVIDIA's MPS, for each user apart; separated by "
        "commas; empty: none",
    )
    rotation_slice: float = Field(
        default=0.0, ge=0, le=86_400,
        description="seconds that a best-effort job with a memory quota has its device at least, before it is "
        "suspended for another one; 0: none is",
    )  # fmt: skip
    events_kept: int = Field(default=20_000, ge=100, le=1_000_000, description="events that can be replayed")
    webhook_attempts: int = Field(
        default=10, ge=1, le=100, description="deliveries of an event to a webhook before it is a dead letter"
    )
    webhook_wait: float = Field(
        default=1.0, gt=0, le=60, description="seconds before the second of them; twice as long each time, at most 60"
    )
    webhook_timeout: float = Field(
        default=10.0, gt=0, le=60, description="seconds in which a webhook's target has to answer"
    )
    store: bool = Field(
        default=True, description="keep snapshots, journals and module images on disk, beside the database"
    )
    store_dir: Path | None = Field(default=None, description="folder for them; default: store, beside the database")
    store_budget: float = Field(default=0.01, gt=0, le=1, description="share of a core that keeping may cost")
    store_snapshots: int = Field(
        default=8, ge=1, le=1000, description="stored snapshots per process; older ones are removed"
    )
    store_days: float = Field(default=7.0, gt=0, description="days after which a stored snapshot is removed")
    store_mib: int = Field(
        default=4096, ge=1, description="size of the store; the oldest stored snapshots are removed first"
    )
    store_free_mib: int = Field(default=256, ge=0, description="room on the store's disk below which nothing is kept")
    store_image_mib: int = Field(default=1024, ge=0, description="module images longer than this are not kept")
    history_days: float = Field(
        default=90.0, gt=0, description="days after which jobs that are over, and what happened to them, are forgotten"
    )
    history_records: int = Field(
        default=20_000, ge=100, description="of each: jobs, faults, recoveries, migrations, operations"
    )
    audit_days: float = Field(
        default=365.0, gt=0, description="days after which audit entries go into a file beside the database"
    )
    audit_records: int = Field(default=200_000, ge=1000, description="audit entries in the database")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the least important messages that are logged"
    )
    log_json: bool = Field(default=False, description="log a JSON object per line")

    def reload(self) -> tuple[list[str], list[str]]:
        """Read file and environment again. Returns the settings that have changed and apply from now on, and those that
        would take a restart. Raises ValueError: nothing is changed."""
        read = type(self)()
        differing = [name for name in type(self).model_fields if getattr(read, name) != getattr(self, name)]
        for name in RELOADED.intersection(differing):
            setattr(self, name, getattr(read, name))
        return sorted(RELOADED.intersection(differing)), sorted(set(differing) - RELOADED)

    @property
    def place(self) -> Place:
        """For whoever calls the daemon that has these settings."""
        return Place(self.runtime_dir, "runtime_dir" in self.model_fields_set)

    @property
    def device_names(self) -> list[str]:
        return self.devices.split(",")

    @property
    def state_dir(self) -> Path:
        """What is this node's for good: the database, its identity and its peers."""
        return self.database.parent

    @property
    def mps_names(self) -> list[str]:
        return self.mps_devices.split(",") if self.mps_devices else []

    @property
    def client_socket(self) -> Path:
        return self.runtime_dir / "client.sock"

    @property
    def names_folder(self) -> Path:
        """The shims under all of the driver's plain names, for what searches a path."""
        return self.runtime_dir.absolute() / "lib"

    @property
    def control_socket(self) -> Path:
        return self.runtime_dir / "control.sock"

    @property
    def api_socket(self) -> Path:
        return self.runtime_dir / "api.sock"

    @property
    def store_folder(self) -> Path:
        return self.store_dir or self.database.parent / "store"

    @property
    def lock_file(self) -> Path:
        return self.runtime_dir / "xmigd.lock"
