"""The words of xMIG's own that pages use: what a tooltip says, and the page /words. docs/concepts.md has them all."""

from __future__ import annotations

from typing import NamedTuple


class Word(NamedTuple):
    name: str
    meaning: str
    page: str  # of docs/ that says more


WORDS = {
    "generation": Word(
        "Generation",
        "How many GPU servers have served this process, one after the other. Each recovery or move adds one.",
        "recovery.md",
    ),
    "shadow": Word(
        "Shadow",
        "Memory that holds what the last snapshot preserved, beside the program's own. It is given back when "
        "the program ends.",
        "recovery.md",
    ),
    "held": Word(
        "Held",
        "Memory that xMIG keeps allocated for the process: the program's own, the snapshot's copy of it, and "
        "loaded code.",
        "concepts.md",
    ),
    "snapshot": Word(
        "Snapshot",
        "A consistent state of device memory, taken now and then while the program runs. After a fault the "
        "program goes on from the last one, and only what came after it is done again.",
        "recovery.md",
    ),
    "standby": Word(
        "Standby",
        "A second GPU server that is started already and waits: it takes the process over when the first one fails.",
        "recovery.md",
    ),
    "server": Word(
        "Server",
        "The process that executes the program's GPU calls. It may die; the program does not.",
        "concepts.md",
    ),
    "journal": Word(
        "Journal",
        "The log of the program's GPU calls since the last snapshot.",
        "protocol.md",
    ),
    "replayed": Word(
        "Replayed",
        "Calls since the last snapshot that were executed again after a fault.",
        "recovery.md",
    ),
    "cordoned": Word(
        "Cordoned",
        "The device gets no new program; those that run there stay.",
        "operations.md",
    ),
    "drain": Word(
        "Drain",
        "Cordon a device and move every program on it to other devices.",
        "operations.md",
    ),
    "suspended": Word(
        "Suspended",
        "The program waits in its next GPU call and has no device memory; its state is in host memory or in "
        "files until it is resumed.",
        "migration.md",
    ),
    "lost": Word(
        "Lost",
        "The state of the process could not be brought back. Its program got an error; start it again.",
        "recovery.md",
    ),
    "breaker": Word(
        "Circuit breaker",
        "Stops xMIG's own decisions when there are too many in a short time. A person closes it again.",
        "operations.md",
    ),
}
