"""What strangers write is refused as a name, and otherwise shown as something that a terminal and a page only show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.daemon.node import Node, send_raw, until
from tests.web.front import Front
from xmigd.ipc.handshake import pack_notice

from .conftest import ctl

ESCAPE, CSI, OVERRIDE, ISOLATE, MARK, LINE = "\x1b]0;x\x07", "\x9b2J", "\u202e", "\u2066", "\u200f", "a\nb"
UNASSIGNED, PRIVATE = "\u0378", "\ue000"
HOSTILE = f"train {ESCAPE}{CSI}{OVERRIDE}evil{ISOLATE}{MARK}{LINE}{UNASSIGNED}{PRIVATE}"
SHOWN = r"train \x1b]0;x\x07\x9b2J\u202eevil\u2066\u200fa\x0ab\u0378\ue000"


def only_seen(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("bad", [ESCAPE, CSI, OVERRIDE, "\u202a", ISOLATE, "\u2069", "\u200e", MARK, LINE, "\u2028"])
def test_names_are_refused(node: Node, bad: str) -> None:
    name = f"a{bad}b"
    with node.http() as http:
        for path, body in (("/v1/jobs", {"name": name}), ("/v1/tokens", {"name": name})):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
            assert answer.json()["detail"].startswith("body.name: U+")
        tag = http.get("/v1/devices/cpu:0").headers["etag"]
        answer = http.patch("/v1/devices/cpu:0", json={"cordoned": True, "reason": name}, headers={"if-match": tag})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
        answer = http.post("/v1/devices/cpu:0:drain", json={"reason": name})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
        assert "a character that people do not see" in answer.json()["detail"]
    done = ctl(node, "run", "--name", name, "--", "true")
    assert done.returncode == 2
    assert "a character that people do not see" in done.stderr
    assert only_seen(done.stderr)
    assert ctl(node, "token", "create", name).returncode == 2


def test_half_characters_are_refused(node: Node) -> None:
    with node.http() as http:
        answer = http.post("/v1/jobs", content=b'{"name": "a\\ud800b"}', headers={"content-type": "application/json"})
        assert answer.status_code == 422
        assert "body.name" in answer.json()["detail"]


def test_commands_are_shown_harmless(node: Node) -> None:
    """In every list and detail of the command line, in JSON that a terminal may get, and in the daemon's log."""
    with node.http() as http:
        job = http.post("/v1/jobs", json={"command": HOSTILE}).json()
        derived = http.post("/v1/jobs", json={"command": f"/bin/{CSI}x y"}).json()
        assert derived["name"] == r"\x9b2Jx"
    assert send_raw(node.runtime_dir / "client.sock", pack_notice(job["environment"]["XMIG_JOB"], HOSTILE)) == b""
    until(lambda: node.get(f"/v1/jobs/{job['id']}/logs"), "the line")
    for words in (("job", "list"), ("job", "show", job["id"]), ("logs", job["id"]), ("events", "--limit", "20"),
                  ("audit",), ("ps", "--all")):  # fmt: skip
        done = ctl(node, *words)
        assert done.returncode == 0, done.stderr
        assert only_seen(done.stdout), (words, done.stdout)
        if words[0] in ("job", "logs"):
            assert SHOWN in "".join(line.strip() for line in done.stdout.splitlines()), done.stdout
        done = ctl(node, *words, "-o", "json")
        assert only_seen(done.stdout), (words, done.stdout)
    assert json.loads(ctl(node, "job", "show", job["id"], "-o", "json").stdout)["command"] == HOSTILE
    done = ctl(node, "stop", HOSTILE)
    assert done.returncode == 4
    assert only_seen(done.stderr)
    assert only_seen(node.log.read_text())


def test_pages_show_them_harmless(node: Node) -> None:
    with node.http() as http:
        job = http.post("/v1/jobs", json={"command": HOSTILE}).json()
    send_raw(node.runtime_dir / "client.sock", pack_notice(job["environment"]["XMIG_JOB"], HOSTILE))
    until(lambda: node.get(f"/v1/jobs/{job['id']}/logs"), "the line")
    with Front(node) as front, httpx.Client(base_url=front.address, timeout=60) as visitor:
        pages = {path: visitor.get(path).text for path in ("/", "/jobs", f"/jobs/{job['id']}", "/audit", "/history")}
        problem = visitor.get(f"/jobs/{'%E2%80%AE'}").text
    assert SHOWN in pages[f"/jobs/{job['id']}"]
    for path, page in (pages | {"problem": problem}).items():
        seen = page.replace("\N{NARROW NO-BREAK SPACE}", " ").replace("\N{NO-BREAK SPACE}", " ")
        assert only_seen(seen), (path, [c for c in seen if not c.isprintable() and c != "\n"])


def test_the_programs_words_are_bytes(node: Node, tmp_path: Path) -> None:
    """An argument that is no UTF-8: the program gets it as it is, the job's command shows it."""
    odd = b"\xff\xfe-\xe9"
    out = tmp_path / "out"
    code = "import os, sys; open(sys.argv[1], 'wb').write(os.fsencode(sys.argv[2]) + os.environb[b'ODD'])"
    words: list[str | bytes] = [sys.executable, "-m", "xmigd.cli", "run", "--name", b"n\xff", "--", sys.executable,
                                "-c", code, str(out), odd]  # fmt: skip
    environment = node.environment | {"ODD": os.fsdecode(b"\xfd")}
    done = subprocess.run(words, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == odd + b"\xfd"
    (job,) = node.get("/v1/jobs")
    assert r"'\xff\xfe-\xe9'" in job["command"]
    assert job["name"] == r"n\xff"
    for columns in ("job", "list"), ("job", "show", job["id"]):
        done = subprocess.run([sys.executable, "-m", "xmigd.cli", *columns], env=node.environment, capture_output=True,
                              timeout=60, check=True)  # fmt: skip
        assert only_seen(done.stdout.decode())


@pytest.mark.parametrize("words", [("job", "show", "\udcff"), ("stop", "\udcff"), ("logs", "\udcff"), ("device",
                                   "cordon", "\udcff"), ("run", "--device", "\udcff", "--", "true"), ("migrate",
                                   "\udcff", "cpu:1"), ("token", "create", "\udcff")])  # fmt: skip
def test_arguments_that_are_no_text(node: Node, words: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", "xmigd.cli", *map(os.fsencode, words)], env=node.environment,
                          capture_output=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode in (2, 4), done.stderr
    reported = done.stderr.decode()
    assert reported.startswith("xmigctl: "), reported
    assert only_seen(reported)
    assert "Traceback" not in reported
