"""The coverage document: every function of ``cuda.h`` and every unpublished table, with what becomes of a call."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import table
from cuda_header import Prototype

EntryPoints = list[tuple[str, int, bool, str]]

# (title, names): a function belongs to the first that fits.
GROUPS: tuple[tuple[str, str], ...] = (
    (
        "Initialisation, versions, entry points, errors",
        r"cu(Init|DriverGetVersion|GetProcAddress|GetExportTable|GetError).*",
    ),
    ("Green contexts", r"cu(GreenCtx|DevResource|DevSmResource).*|.*(DevResource|GreenCtx)|cuCtx(Record|Wait)Event"),
    (
        "Arrays, textures, surfaces",
        r"cu(Array|MipmappedArray|Tex(Ref|Object)|Surf(Ref|Object)).*|.*(Tex|Surf)Ref"
        r"|cuMemcpy(AtoA|AtoD|AtoH|DtoA|HtoA).*|cuMemMapArray.*|.*Texture1D.*",
    ),
    (
        "Graphs and stream capture",
        r"cuGraph(?!ics).*|cuUserObject.*|cuStream.*Captur.*|cuThreadExchange.*|cuDevice.*Graph.*",
    ),
    ("Devices", r"cuDevice(?!PrimaryCtx).*"),
    ("Contexts", r"cu(Ctx|DevicePrimaryCtx|FlushGPUDirect).*"),
    (
        "Sharing with other processes and devices",
        r"cu(Ipc|Multicast).*|cuMem(Pool)?(Export|Import).*|cuMemGetHandleFor.*",
    ),
    ("Graphics, external memory and semaphores", r"cu(Graphics|Import|Destroy|External|Signal|Wait).*"),
    ("Copies and fills", r"cuMem(cpy|set|Batch).*"),
    ("Tensor maps", r"cuTensorMap.*"),
    ("Memory", r"cu(Mem|Pointer).*"),
    ("Streams", r"cuStream.*|cuLaunchHostFunc.*"),
    ("Events", r"cuEvent.*"),
    ("Launches and occupancy", r"cu(Launch|Occupancy|Param).*"),
    ("Modules, libraries, kernels", r"cu(Module|Library|Kernel|Func|Link).*"),
    ("Profiling, dumps, checkpoints", r"cu(Profiler|Coredump|Logs|Checkpoint).*"),
)

PER_THREAD = ("_ptsz", "_ptds")

ABOUT = """\
# What of the driver interface is covered

Written by `make coverage` from [the API table](../shim/api/table.py) and `cuda.h` of CUDA {version}; a test fails when
it differs from what the table says.

{counts}

| class | what happens to a call |
|---|---|
| local | the client answers it, alone or after records of its own (see the note) |
| queued | a record goes to the server; the call returns at once |
| synchronous | a record goes to the server; the call waits for the reply |
| not supported | `CUDA_ERROR_NOT_SUPPORTED`, and one line in the job's log that names the function |

*Since* is the CUDA version from which on `cuGetProcAddress` gives this form for the name without `_v2`, `_v3`; a name
that `cuda.h` does not have is "not found", as from a driver of that version. ⧗: there is a form whose default stream is
the calling thread's own, in the same class.

## What counts as asking for a function that is not covered

Every copy of `libcudart` looks up all the names it knows when it is loaded, and the stub of a function that is not
supported is a good answer to that: no genuine driver of this version gives a null pointer. So a look-up of a name in
these tables is no demand. These are, and with `XMIG_REQUESTED` in its environment, the name of a file, a process under
xMIG appends one line for each:

| line | the program |
|---|---|
| `refused NAME` | called a function that is not supported, or a slot of an unpublished table that has no answer |
| `missing NAME` | looked up, by `cuGetProcAddress`, a name that no version of `cuda.h` up to this one has |
| `table UUID` | a request for an unpublished table that is not there |
| `called NAME` | called this exported function (the first time in the process; covered or not) |

The tests with PyTorch, CuPy, JAX and Triton (`tests/frameworks`) run so, and fail with the names when there is any of
the first three but what is listed [below](#what-is-requested-and-not-missed). They do not see names that a library
asks the dynamic linker for: every function of `cuda.h` is exported.
"""


@dataclass(frozen=True)
class Row:
    name: str
    since: str
    per_thread: bool
    call: str
    note: str


def coverage_md(protos: dict[str, Prototype], points: EntryPoints) -> str:
    rows = [row(name, protos, points) for name in sorted(protos) if not name.endswith(PER_THREAD)]
    check_reasons(rows)
    counts = Counter(r.call for r in rows)
    covered = len(rows) - counts["not supported"]
    reported = (
        f"**{covered} of {len(rows)} functions are covered**: {counts['local']} local, {counts['queued']} queued, "
        f"{counts['synchronous']} synchronous; {counts['not supported']} are not supported. "
        f"{sum(r.per_thread for r in rows)} have a form for per-thread default streams, too."
    )
    newest = max(version for _, version, _, _ in points)
    out = [ABOUT.format(version=version_text(newest), counts=reported)]
    for title, members in grouped(rows):
        inside = sum(r.call != "not supported" for r in members)
        out.append(f"\n## {title}: {inside} of {len(members)}\n\n")
        out.append("| function | since | class | note |\n|---|--:|---|---|\n")
        out += [f"| `{r.name}`{' ⧗' if r.per_thread else ''} | {r.since} | {r.call} | {r.note} |\n" for r in members]
    return "".join([*out, export_tables_md()])


def row(name: str, protos: dict[str, Prototype], points: EntryPoints) -> Row:
    known = {f.name: f for f in table.FUNCTIONS}
    versions = [version for _, version, _, symbol in points if symbol == name]
    per_thread = any(name + suffix in protos for suffix in PER_THREAD)
    call: str
    if name in table.SAME_AS:
        call, note = known[table.SAME_AS[name]].call, f"as `{table.SAME_AS[name]}`"
    elif name in known:
        call, note = known[name].call, known[name].note
    else:
        call, note = "not supported", reason(name, known)
    return Row(name, version_text(min(versions)) if versions else "", per_thread, call, note)


def reason(name: str, known: Iterable[str]) -> str:
    for pattern, why in table.NOT_SUPPORTED:
        if re.fullmatch(pattern, name):
            return why
    later = [f"{name}_v{n}" for n in range(2, 10) if f"{name}_v{n}" in known]
    if later and not re.search(r"_v\d$", name):
        return f"32-bit addresses and sizes, before CUDA 3.2; now `{later[0]}`"
    raise SystemExit(f"table.py: {name} is neither in the table nor in NOT_SUPPORTED, which says why")


def check_reasons(rows: list[Row]) -> None:
    missing = [r.name for r in rows if r.call == "not supported"]
    for pattern, _ in table.NOT_SUPPORTED:
        if not any(re.fullmatch(pattern, name) for name in missing):
            raise SystemExit(f"table.py: NOT_SUPPORTED has {pattern}, which fits no function that is not supported")


def grouped(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    members: dict[str, list[Row]] = {title: [] for title, _ in GROUPS}
    for r in rows:
        titles = [title for title, pattern in GROUPS if re.fullmatch(pattern, r.name)]
        if not titles:
            raise SystemExit(f"coverage.py: {r.name} belongs to no group")
        members[titles[0]].append(r)
    return [(title, found) for title, found in members.items() if found]


def version_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def export_tables_md() -> str:
    out = [
        "\n## Unpublished tables (`cuGetExportTable`)\n\nA slot that is not named here answers "
        "`CUDA_ERROR_NOT_SUPPORTED` and names itself in the job's log.\n\n"
        "| table | requested by | slots that are called, of | what each answers |\n|---|---|---|---|\n"
    ]
    for t in table.EXPORT_TABLES:
        answers = ", ".join(f"{n}: {what}" for n, (_, what) in t.answers.items())
        out.append(f"| {t.name} `{t.uuid}` | {t.requested_by} | {len(t.answers)} of {t.slots} | {answers} |\n")
    out.append("\n## What is requested and not missed\n\n| name or table | why |\n|---|---|\n")
    for what, why in {**table.UNKNOWN_NAMES, **table.DENIED_TABLES}.items():
        out.append(f"| `{what.replace('|', '&#124;')}` | {why} |\n")
    return "".join(out)
