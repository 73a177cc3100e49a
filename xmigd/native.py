"""The native programs: where they are, and the sizes that `xmig-server --layout` says they were built with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xmigd.errors import StartError

SERVER = "xmig-server"
DESCRIPTOR_STORE = "xmig-descriptor-store"
SHIM = "libcuda.so.1"
NVML_SHIM = "libnvidia-ml.so.1"
NCCL_SHIM = "libnccl.so.2"
LOADER = "libxmig-loader.so"  # opens these in the place of the driver's and NCCL's under their other names
PLANES = "libxmig-planes.so"  # for xmigd/checkpoints/planes.py


class Layout(BaseModel):
    """Sizes of what client and server share. The defaults are those of shim/journal/layout.h; a sanitizer build has
    others, and says so."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    layout_version: int = 3
    header_bytes: int = Field(default=2 << 20, gt=0, le=1 << 30)
    staging_bytes: int = Field(default=4 * (4 << 20), gt=0, le=1 << 34)
    pinned_bytes: int = Field(default=1 << 38, gt=0, le=1 << 46)
    tail_offset: int = Field(default=6464, ge=0, le=1 << 20)  # of JournalHeader::tail
    memory_changes_at: int = Field(default=6808, ge=0, lt=1 << 30)  # where in the journal's header; 0: not known
    server_pid_at: int = Field(default=6724, ge=0, lt=1 << 30)
    stall_at: int = Field(default=1129600, ge=0, lt=1 << 30)  # JournalHeader::stall; 0: not known
    group_at: int = Field(
        default=1199488, ge=0, lt=1 << 30
    )  # the last round prepared and the last decided; 0: not known
    standby_bytes_at: int = Field(default=1207744, ge=0, lt=1 << 30)  # JournalHeader::standby_bytes; 0: not known
    devices_open_at: int = Field(default=1207816, ge=0, lt=1 << 30)  # JournalHeader::devices_open; 0: not known
    notices_at: int = Field(default=1129728, ge=0, lt=1 << 30)  # JournalHeader::notices_posted
    notices: int = Field(default=64, ge=1, le=1024)  # slots for them
    room_bytes: int = Field(default=64 << 20, gt=0, le=1 << 30)  # of a piece of host memory for a suspended process


def find_native_dir(configured: Path | None) -> Path:
    """The folder with the native programs. Raises StartError if they are not there."""
    if configured is not None:
        candidates = [configured]
    elif os.environ.get("XMIG_NATIVE_DIR"):
        candidates = [Path(os.environ["XMIG_NATIVE_DIR"])]
    else:
        candidates = [Path(__file__).parent / "native"]
    for folder in candidates:
        if os.access(folder / SERVER, os.X_OK):
            return folder.resolve()
    raise StartError(
        f"{SERVER} is not in {candidates[0]}",
        hint="build it (make build), or set XMIG_NATIVE_DIR to the folder that has it",
        code="native_missing",
    )


def find_shims(native_dir: Path) -> list[Path]:
    """What programs preload: beside the server, or where a build folder has it. Raises StartError without it."""
    folder = _folder_of(SHIM, native_dir)
    return [folder / SHIM, folder / NVML_SHIM, folder / NCCL_SHIM, folder / LOADER]


def find_planes() -> Path:
    """The library of that name, as `find_shims`. Raises StartError."""
    return _folder_of(PLANES, find_native_dir(None)) / PLANES


def _folder_of(name: str, native_dir: Path) -> Path:
    for folder in (native_dir, native_dir / "shim"):
        if (folder / name).exists():
            return folder
    raise StartError(
        f"{name} is not in {native_dir}",
        hint="build it (make build), or set XMIG_NATIVE_DIR to the folder that has it",
        code="native_missing",
    )


def link_names(folder: Path, shims: list[Path]) -> None:
    """The shims in a folder of their own under every plain name that a program or a linker may look for: `libcuda.so`
    is what `ctypes.util.find_library("cuda")` and `ld -lcuda` want. Raises StartError."""
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        for shim in shims:
            if shim.name not in (SHIM, NVML_SHIM):
                continue
            for name in (shim.name, shim.name.removesuffix(".1")):
                made = folder / f".{name}"
                made.unlink(missing_ok=True)
                made.symlink_to(shim)
                made.rename(folder / name)
    except OSError as error:
        raise StartError(
            f"{folder} cannot be written: {error.strerror}", hint="choose another XMIG_RUNTIME_DIR"
        ) from None


def read_layout(native_dir: Path) -> Layout:
    """Ask the server for its layout. Raises StartError when it does not run or uses another layout."""
    server = native_dir / SERVER
    try:
        done = subprocess.run(
            [server, "--layout"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, cwd="/", check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"{server} does not run: {error}", hint="build it again (make build)") from None
    if done.returncode != 0:
        reported = done.stderr.decode(errors="replace").strip()[:300]
        raise StartError(
            f"{server} --layout failed with exit code {done.returncode}: {reported}", hint="build it again (make build)"
        )
    try:
        layout = Layout.model_validate_json(done.stdout)
    except ValidationError as error:
        raise StartError(f"{server} --layout printed something else than its layout: {error}") from None
    if layout.layout_version != Layout().layout_version:
        raise StartError(
            f"{server} uses layout {layout.layout_version}, this daemon {Layout().layout_version}",
            hint="install daemon and native part from the same version",
        )
    return layout
