"""One word for each thing: words that the vocabulary has retired do not come back."""

from __future__ import annotations

import re
import subprocess

from tests.harness import ROOT

# What is said instead: snapshot, replay, staging copy, snapshot store or holder, inject, report, request, use.
RETIRED = re.compile(
    r"(?<![A-Za-z])(?i:cuts?|redo(?:ne|es|ing)?|bounced?|keepers?|str(?:ikes?|uck|iking)|spoil(?:s|ed|t|ing)?|told|asked|said|speaks)"
    r"(?![A-Za-z])|[a-z](?:Cuts?|Redo|Bounce|Keeper|Strikes?)(?![a-z])"
)
# English, and the program of that name.
ENGLISH = re.compile(
    r"\bcut[ _](?:off|short|at|into)\b|_cut_(?:at|into)_|_are_cut\b|every_cut_is|\| cut -c", re.IGNORECASE
)
# History keeps its words, and so does the test of how it is brought up to date.
HISTORY = ("CHANGELOG.md", "migrations/", "tests/daemon/test_upgrade.py", "tests/daemon/test_database.py")
OTHERS = ("tests/fuzz/corpus/", "tests/docs/test_words.py", "requirements", "LICENSE")


def test_retired_words_do_not_come_back() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in listed.splitlines():
        path = ROOT / name
        if name.startswith((*HISTORY, *OTHERS)) or path.suffix in (".svg", ".png", ".ico", ".lock"):
            continue
        if not path.is_file() or b"\0" in (content := path.read_bytes()):
            continue
        for number, line in enumerate(content.decode().splitlines(), 1):
            if RETIRED.search(ENGLISH.sub("", line)):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
