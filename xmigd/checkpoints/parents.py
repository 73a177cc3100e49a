"""A program that is to end with its parent (PR_SET_PDEATHSIG), as the child of `xmigctl run` may be, in CRIU's images.

CRIU restores that wish, too. The new parent is CRIU, which leaves when it is done: so the program would end at once.
The wish is taken out of the image of the first process of the tree; what it is for, the earlier parent, is over. The
parents of all other processes are restored with them.

The image is two magic numbers, the size of the entry, and the entry, as protocol buffers (CRIU's images/core.proto).
"""

from __future__ import annotations

import struct
from pathlib import Path

from xmigd.checkpoints.fields import BYTES, fields, varint
from xmigd.store.objects import Damaged

FRAME = struct.Struct("<8sI")  # both magic numbers, bytes of the entry
THREAD_CORE, PDEATH_SIG = 5, 8  # fields of core_entry, and of thread_core_entry in it


def leave_parent(folder: Path, pid: int) -> None:
    """In the images in this folder, of a tree that begins with this process. Blocks. Raises Damaged, OSError."""
    path = folder / f"core-{pid}.img"
    path.write_bytes(without_death_signal(path.read_bytes()))


def without_death_signal(image: bytes) -> bytes:
    """Raises Damaged: it is no such image."""
    if len(image) < FRAME.size:
        raise Damaged("CRIU's image of the program is too short")
    magic, size = FRAME.unpack_from(image)
    entry, rest = image[FRAME.size : FRAME.size + size], image[FRAME.size + size :]
    changed = bytearray()
    for number, kind, raw, content in fields(entry):
        if (number, kind) == (THREAD_CORE, BYTES):
            core = b"".join(part for name, _, part, _ in fields(content) if name != PDEATH_SIG)
            changed += varint(number << 3 | kind) + varint(len(core)) + core
        else:
            changed += raw
    return FRAME.pack(magic, len(changed)) + changed + rest
