"""What is taken from others is what they published, and everything is in the package."""

from __future__ import annotations

import hashlib
import json
import re

from tests.harness import ROOT
from xmigd.web.render import folder

VENDOR = ROOT / "web" / "static" / "vendor"


def test_vendored_files_are_what_was_published() -> None:
    listed = json.loads((VENDOR / "checksums.json").read_text())
    assert set(listed) | {"checksums.json"} == {file.name for file in VENDOR.iterdir()}
    for name, entry in listed.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == entry["sha256"], name
    packages = {entry["package"] for entry in listed.values() if "licence" in entry}
    assert packages == {entry["package"] for name, entry in listed.items() if name.startswith("LICENSE.")}


def test_nothing_is_fetched_from_elsewhere() -> None:
    for file in (ROOT / "web").rglob("*"):
        if file.is_file() and file.parent != VENDOR:
            found = re.findall(r"https?://[^\"'\s)<]+", file.read_text())
            assert [url for url in found if url != "http://www.w3.org/2000/svg"] == [], file


def test_the_files_are_found_beside_the_package() -> None:
    assert folder() == ROOT / "web"
    cmake = (ROOT / "shim" / "CMakeLists.txt").read_text()
    assert "install(DIRECTORY ../web/ DESTINATION xmigd/web_files" in cmake
