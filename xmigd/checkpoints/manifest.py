"""What a checkpoint consists of: one JSON document, which names content by its hash.

The content itself lies elsewhere: in the node's store of objects, or in the same file as the document (an exported
checkpoint). Nothing in here is to be believed before it was checked: a manifest may come from another node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, ip_address
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Text = Annotated[str, Field(max_length=4096)]
Error = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MOST_CONNECTIONS = 4096  # of a part: a message of peers has all of them
MOST_MOUNTS = 4096


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of some content that is not all zeros. There are tens of thousands: a model takes ten times as long to
    make."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    at: Count  # bytes from its beginning
    bytes: Annotated[int, Field(gt=0, le=1 << 30)]
    hash: Hash  # SHA-256 of these bytes


class Content(Strict):
    """Bytes by their pieces, in ascending order and without overlap. What lies between is zero."""

    bytes: Count
    chunks: tuple[Chunk, ...]


class Memory(Strict):
    """A descriptor that a server handed to the daemon, with the message that hands it to the next server."""

    id: Count
    kind: Literal["shadow", "image"]
    ordinal: Annotated[int, Field(ge=0, lt=8)]
    message: Text  # JSON
    content: Content


class Image(Strict):
    """A file that CRIU has written."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    content: Content


class OpenFile(Strict):
    """A regular file that the program had open. It is found again by its path, and must not be shorter."""

    path: Text
    bytes: Count  # that it had
    writable: bool
    owner: Count | None = None  # user; None: not known


def host_and_port(text: str) -> tuple[str, int]:
    """Of `10.0.0.1:80` or `[::1]:80`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    address = ip_address(host.removeprefix("[").removesuffix("]"))
    number = int(port)
    if text != (f"[{address}]:{number}" if address.version == 6 else f"{address}:{number}") or not 0 < number < 1 << 16:
        raise ValueError(f"{text!r} is no address with a port")
    return str(address), number


def _end(text: str) -> str:
    host_and_port(text)
    return text


End = Annotated[str, Field(max_length=64), AfterValidator(_end)]


class Connection(Strict):
    """By TCP, established, with a program of another part of the checkpoint."""

    local: End
    remote: End
    pid: Annotated[int, Field(ge=0, lt=1 << 31)] = 0  # that had it


def _range(text: str) -> str:
    if text != str(IPv4Network(text)) or not 16 <= IPv4Network(text).prefixlen <= 28:
        raise ValueError(f"{text!r} is no range of addresses")
    return text


def _address(text: str) -> str:
    return str(IPv4Address(text))


class Network(Strict):
    """Of the job, over its nodes."""

    range: Annotated[str, Field(max_length=18), AfterValidator(_range)]
    place: Annotated[int, Field(ge=0, lt=64)]  # of the node in the list, from which its address follows
    # Addresses that the loopback device has, too.
    loopback: Annotated[
        tuple[Annotated[str, Field(max_length=15), AfterValidator(_address)], ...], Field(max_length=1024)
    ] = ()


class Device(Strict):
    """As the program sees it."""

    kind: Literal["cpu", "null", "cuda"]
    name: Text
    total_bytes: Count


class Program(Strict):
    """The process that was dumped."""

    id: Id
    pid: Annotated[int, Field(gt=0, lt=1 << 31)]
    inner_pid: Annotated[int, Field(ge=0, lt=1 << 31)] = 0  # as the program sees it; 0: the same
    device: Text = ""  # that it was on, by this node's name; empty: not known
    uid: Count
    gid: Count
    leader: bool  # of its session
    command: Text
    generation: Count  # servers that it has had
    devices: tuple[Device, ...]
    layout: Count  # of the memory that it shares with its server: journal/layout.h
    shared_bytes: tuple[Count, Count, Count]  # of the journal, the staging copy, the page-locked memory
    memory: tuple[Memory, ...]
    snapshots: tuple[Content, Content]  # the two files, of which the journal's header says which is the last
    images: tuple[Image, ...]
    files: tuple[OpenFile, ...]


class Rounded(Strict):
    """Numbers of one type, of all programs, that their frameworks have named. An error is the largest of any of them;
    the relative one is against what the number was."""

    type: Literal["float16", "bfloat16", "float32", "float64"]
    ranges: Count
    bytes: Count
    changed: Count  # numbers that are not what they were
    largest_relative: Error
    largest_absolute: Error


class Lossy(Strict):
    """What is not as the programs had it."""

    keep_bits: Annotated[int, Field(ge=1, le=51)]  # of mantissas, without the implicit one
    rounded: tuple[Rounded, ...]
    piece_bytes: Count  # of the pieces that have such numbers, which may have others
    stored_bytes: Count | None  # that they take on the disk; None: they were in host memory only


class Manifest(Strict):
    format: Literal[1] = 1
    id: Id
    job: Id
    job_name: Text
    node: Text
    xmig_version: Text
    created_at: float  # seconds since 1970
    root: Annotated[int, Field(ge=0, lt=1 << 31)] = 0  # pid from which all descend; 0: of the first program
    namespaces: tuple[Literal["pid", "mnt", "net", "ipc", "uts"], ...] = ()  # that all have for themselves
    mounts: Annotated[tuple[Text, ...], Field(max_length=MOST_MOUNTS)] = ()  # where they had those of the machine
    priority: Literal["critical", "normal", "best-effort"] = "normal"
    memory_quota: Annotated[int, Field(ge=0, lt=1 << 53)] = 0  # bytes of each device, for all programs; 0: all
    sm_share: Annotated[int, Field(ge=0, le=100)] = 0  # percent of its device's multiprocessors; 0: all
    nodes: tuple[Annotated[str, Field(max_length=64)], ...] = ()  # on which its job had ranks; each has a part of it
    round: Count = 0  # of the group snapshot at which the ranks of all parts stand; 0: they are in no group
    connections: Annotated[tuple[Connection, ...], Field(max_length=MOST_CONNECTIONS)] = ()  # with other parts
    network: Network | None = None  # in which they are; None: in the machine's, or in one that CRIU makes again
    lossy: Lossy | None = None  # None: all of it is as the programs had it
    programs: tuple[Program, ...]  # the first has what CRIU has written, and the open files, of all


def contents(manifest: Manifest) -> Iterator[Content]:
    """All that it names."""
    for program in manifest.programs:
        yield from (memory.content for memory in program.memory)
        yield from program.snapshots
        yield from (image.content for image in program.images)
