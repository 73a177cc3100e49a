"""docs/settings.md: every field of Settings, and every other variable that a program of ours reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from tests.docs.markdown import MADE, table
from tests.harness import ROOT
from xmigd.kubernetes.settings import KubernetesSettings
from xmigd.settings import Settings
from xmigd.web.settings import WebSettings

# Variables that are no setting of the daemon. A test finds all that are read anywhere.
OTHERS = {
    "XMIG_CONFIG": ("xmigd, xmigctl", "the settings file; default: /etc/xmig/xmigd.toml if it exists"),
    "XMIG_WEB_CONFIG": ("xmig-web", "its settings file; default: /etc/xmig/xmig-web.toml if it exists"),
    "XMIG_KUBERNETES_CONFIG": (
        "xmig-kubernetes",
        "its settings file; default: /etc/xmig/xmig-kubernetes.toml if it exists",
    ),
    "XMIG_URL": ("xmigctl", "a daemon on the network, https://HOST:PORT; default: the local one (`--url`)"),
    "XMIG_TOKEN": ("xmigctl", "what it shows to a daemon on the network: a token, or @FILE (`--token`)"),
    "XMIG_CA_FILE": ("xmigctl", "PEM file of who signed that daemon's certificate (`--ca-file`)"),
    "XMIG_CLIENT_CERT": ("xmigctl", "PEM file with the certificate that it shows, and its key (`--client-cert`)"),
    "XMIG_JOB": ("the shim", "the job that a program belongs to, ID:TOKEN; `xmigctl run` sets it"),
    "XMIG_SOCKET": ("the shim", "the daemon's client.sock; `xmigctl run` sets it"),
    "XMIG_STDERR": ("the shim", "device and inode of the standard error of `xmigctl run`, which sets it"),
    "XMIG_WITHOUT_DAEMON": (
        "the shim",
        "`native`: without a daemon this machine's own driver answers; by default the program hears of no GPU",
    ),
    "XMIG_NATIVE_LIBCUDA": ("the shim", "that driver's library, where the loader does not find it"),
    "XMIG_NATIVE_LIBNCCL": (
        "the shim",
        "the NCCL library that the program's server opens; default: the one that the program would load",
    ),
    "XMIG_JOIN_TIMEOUT": ("the shim", "seconds that a rank waits for the others of its communicator; default: 600"),
    "XMIG_COLLECTIVE_TIMEOUT": (
        "the shim",
        "seconds that a collective of cpu devices waits for a rank that does nothing; default: 1800",
    ),
    "XMIG_NODES": ("`xmigctl run`", "as `--nodes`: the nodes that the job has ranks on, the first one coordinates"),
    "XMIG_LABELS": ("`xmigctl run`", "as `--label`: KEY=VALUE, several separated by spaces; for launchers"),
    "XMIG_LOSSY_OPTIMIZER_STATE": (
        "`xmigctl run`, PyTorch",
        "as `--lossy-optimizer-state`: entries of the state of optimizers that lossy checkpoints may round",
    ),
    "XMIG_MOVABLE": ("`xmigctl run`", "1: as `--movable`; the program does not get it"),
    "XMIG_WALLTIME": ("`xmigctl run`", "as `--walltime`: the time that the job takes at most; for launchers"),
    "XMIG_EXTERNAL_ID": ("`xmigctl run`", "as `--external-id`: what its scheduler calls the job; for launchers"),
    "XMIG_CACHED_BLOCKS": (
        "the shim, xmigctl",
        "`keep`: snapshots preserve what the program's allocator has got back, too; none is chosen for it",
    ),
    "XMIG_EVERY_DEVICE": ("the shim", "set: all devices that `CUDA_VISIBLE_DEVICES` could name; for what NVML counts"),
    "XMIG_FAILPOINT": ("xmigd", "a file that names the place at which it kills itself: for tests"),
    "XMIG_REQUESTED": ("the shim", "a file that gets what a program asks of the driver: for tests"),
}

READS = re.compile(
    r"""(?:getenv|environ\.get|environ|envvar=|(?:file_variable|FILE_VARIABLE) =)\s*[(\[]?\s*["'](XMIG_[A-Z_]+)["']"""
)
SOURCES = ("*.py", "*.cc", "*.h", "*.c")


def page() -> str:
    others = [(f"`{name}`", who, what) for name, (who, what) in OTHERS.items()]
    return f"""{MADE}
# Settings

A setting has a default, the settings file may give another value (TOML, `/etc/xmig/xmigd.toml`, or what
`xmigd --config` or `XMIG_CONFIG` names), and the environment has the last word: `XMIG_` and its name in
capitals. `xmigd` does not start with a value that is wrong, nor with a name in the file
that is no setting, and says which. `xmigctl` reads the same
settings: `runtime_dir` is where it finds the daemon.

{_table(Settings)}
## The dashboard

`xmig-web` has settings of its own, in `/etc/xmig/xmig-web.toml` and as `XMIG_WEB_` and the name.

{_table(WebSettings)}
## The adapter to Kubernetes

`xmig-kubernetes` has settings of its own, in `/etc/xmig/xmig-kubernetes.toml` and as `XMIG_KUBERNETES_` and the name.
Where xMIG's socket is, xmigd's own settings say.

{_table(KubernetesSettings)}
## Other variables

{table(("variable", "read by", "what"), others)}"""


def _table(settings: type[BaseSettings]) -> str:
    rows = [
        (f"`{name}`", f"`{variable(name, settings)}`", kind(field), default(name, field), field.description)
        for name, field in settings.model_fields.items()
    ]
    return table(("setting", "variable", "values", "default", "what"), rows)


def variable(name: str, settings: type[BaseSettings] = Settings) -> str:
    return f"{settings.model_config['env_prefix']}{name.upper()}"


def default(name: str, field: FieldInfo) -> str:
    """As it is for root."""
    places = {"runtime_dir": "`/run/xmig`; for others `$XDG_RUNTIME_DIR/xmig`",
              "api": "`unix:` and `api.sock` in xmigd's runtime directory",
              "node": "the host's name",
              "database": "`/var/lib/xmig/xmig.db`; for others `~/.local/state/xmig/xmig.db`"}  # fmt: skip
    if name in places:
        return places[name]
    if field.default is PydanticUndefined or field.default in (None, ""):
        return "-"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def kind(field: FieldInfo) -> str:
    annotation = field.annotation
    options = [option for option in get_args(annotation) if option is not type(None)]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{option}`" for option in options)
    base = options[0] if options else annotation
    names = {int: "number", float: "number", bool: "`true`, `false`", str: "text", Path: "path"}
    limits = "".join(
        f" {sign} {getattr(limit, attribute)}"
        for limit in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if hasattr(limit, attribute)
    )
    return names.get(base, str(base)) + limits  # type: ignore[arg-type]


def variables_read() -> set[str]:
    """Every variable of ours that the sources read by its name."""
    found: set[str] = set()
    for folder in ("xmigd", "shim"):
        for pattern in SOURCES:
            for path in (ROOT / folder).rglob(pattern):
                if "native" not in path.relative_to(ROOT).parts[:2]:
                    found |= set(READS.findall(path.read_text(errors="replace")))
    return found
