"""A stand-in for Kubernetes' API server: objects in memory, with versions, watches and conflicts as it has them.

Each request and each object is checked against what Kubernetes 1.37 knows (contract.py), and each request against what
a ClusterRole allows. What it does not do: admission, defaults, field ownership, protobuf.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

from tests.kubernetes import contract

PATH = re.compile(
    r"^/(?:api|apis/(?P<group>[a-z0-9.]+))/(?P<version>v1)(?:/namespaces/(?P<namespace>[a-z0-9-]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[a-z0-9.-]+))?(?:/(?P<part>status))?$"
)
KINDS_OF = re.compile(r"^/apis/(?P<group>[a-z0-9.]+)/(?P<version>[a-z0-9]+)$")
VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
PATCHES = {"application/merge-patch+json", "application/strategic-merge-patch+json"}
POLL = 0.02  # seconds between two looks of a watch
Json = dict[str, Any]
Hook = Callable[[str, str], None]  # method and path of a request of the adapter


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Standin:
    """`rules`: of the ClusterRole that the token "adapter" has. The token "admin" may everything."""

    def __init__(self, rules: Iterable[Mapping[str, Any]], port: int = 0) -> None:
        self._rules = list(rules)
        self._lock = threading.RLock()
        self._objects: dict[tuple[str, str, str], Json] = {}  # by plural, namespace, name
        self._history: list[tuple[int, str, str, Json]] = []  # version, plural, type of the event, object
        self._version = 100
        self.oldest = 0  # events up to this version are forgotten
        self.used: set[tuple[str, str]] = set()  # verbs and resources that the adapter has used
        self.refused: list[str] = []  # requests of the adapter that were not as they should be
        self.before: Hook | None = None  # called before a request has its effect, and after it
        self.after: Hook | None = None
        self.watches = 0
        self._handler = type("Handler", (Handler,), {"standin": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler)
        self._server.daemon_threads = True
        self.ending = threading.Event()  # watches end
        self.port = self._server.server_address[1]

    def __enter__(self) -> Self:
        self._serve()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _serve(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def leave(self) -> None:
        """Nobody takes connections any more."""
        self.drop()
        self._server.shutdown()
        self._server.server_close()

    def come_back(self) -> None:
        """With what it had, at the same port."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler)
        self._server.daemon_threads = True
        self._serve()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """As etcd's compaction: watches end, and none can go on from where it was."""
        with self._lock:
            self._version += 1
            self.oldest = self._version
        self.drop()

    def drop(self) -> None:
        """Every watch loses its connection."""
        self.ending.set()
        self.ending = threading.Event()

    # --- requests -----------------------------------------------------------------------------------------------------

    def check(self, token: str, verb: str, group: str, resource: str) -> None:
        if token == "admin":
            return
        if token != "adapter":
            raise Refused(401, "Unauthorized")
        self.used.add((verb, resource))
        for rule in self._rules:
            if group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]:
                return
        raise Refused(403, f"cannot {verb} {resource}")

    def page(self, kind: Any, query: Mapping[str, str], namespace: str) -> Json:
        with self._lock:
            items = [each for each in self._of(kind) if not namespace or each["metadata"]["namespace"] == namespace]
            selected = [each for each in items if fits(each, query.get("fieldSelector", ""))]
            api = kind._api_info.resource
            version = f"{api.group}/{api.version}" if api.group else api.version
            return {
                "kind": f"{api.kind}List", "apiVersion": version, "items": copy.deepcopy(selected),
                "metadata": {"resourceVersion": str(self._version)},
            }  # fmt: skip

    def _of(self, kind: Any) -> Iterable[Json]:
        plural = kind._api_info.plural
        return [each for key, each in self._objects.items() if key[0] == plural]

    def get(self, key: tuple[str, str, str]) -> Json:
        with self._lock:
            if key not in self._objects:
                raise Refused(404, f"{key[0]} {key[2]!r} not found")
            return copy.deepcopy(self._objects[key])

    def create(self, key: tuple[str, str, str], body: Json) -> Json:
        with self._lock:
            if key in self._objects:
                raise Refused(409, f"{key[0]} {key[2]!r} already exists")
            metadata = body["metadata"]
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata["creationTimestamp"] = _now()
            return self._write(key, "ADDED", body)

    def patch(self, key: tuple[str, str, str], part: str, kind: str, body: Json) -> Json:
        with self._lock:
            before = self.get(key)
            wanted = body.get("metadata", {}).get("resourceVersion")
            if wanted is not None and wanted != before["metadata"]["resourceVersion"]:
                raise Refused(409, "the object has been modified; please apply your changes to the latest version")
            allowed = {"status", "metadata"} if part else set(body) - {"status"}
            if set(body) - allowed:
                raise Refused(422, f"{sorted(set(body) - allowed)} cannot be written here")
            after = merged(before, body, strategic="strategic" in kind)
            return before if after == before else self._write(key, "MODIFIED", after)

    def delete(self, key: tuple[str, str, str], grace: int | None) -> Json:
        with self._lock:
            found = self.get(key)
            if key[0] == "pods" and found.get("spec", {}).get("nodeName") and grace != 0:
                seconds = grace if grace is not None else found["spec"].get("terminationGracePeriodSeconds", 30)
                end = datetime.now(UTC) + timedelta(seconds=seconds)
                found["metadata"] |= {
                    "deletionTimestamp": end.strftime("%Y-%m-%dT%H:%M:%SZ"), "deletionGracePeriodSeconds": seconds
                }  # fmt: skip
                return self._write(key, "MODIFIED", found)
            self._write(key, "DELETED", found)
            del self._objects[key]
            return found

    def _write(self, key: tuple[str, str, str], event: str, found: Json) -> Json:
        contract.check(found)
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        self._objects[key] = found
        self._history.append((self._version, key[0], event, copy.deepcopy(found)))
        return copy.deepcopy(found)

    def since(self, plural: str, version: int, selector: str) -> tuple[list[Json], int]:
        """Raises Refused: that is forgotten."""
        with self._lock:
            if version < self.oldest:
                raise Refused(410, "The resourceVersion for the provided watch is too old.")
            found = [
                {"type": event, "object": each}
                for at, of, event, each in self._history
                if at > version and of == plural and fits(each, selector)
            ]
            return copy.deepcopy(found), self._version


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    standin: ClassVar[Standin]

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        of_adapter = token != "admin"
        with contextlib.suppress(ConnectionError):
            try:
                if of_adapter and self.standin.before is not None:
                    self.standin.before(self.command, parts.path)
                answer = self.answer(token, parts.path, dict(parse_qsl(parts.query)))
                if answer is None:
                    return
                if of_adapter and self.standin.after is not None:
                    self.standin.after(self.command, parts.path)
                self.send(201 if self.command == "POST" else 200, answer)
            except (Refused, ValueError) as refused:
                status = refused.status if isinstance(refused, Refused) else 422
                if of_adapter and status not in (404, 409, 410):
                    self.standin.refused.append(f"{self.command} {self.path}: {status} {refused}")
                self.send(status, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status,
                                   "message": str(refused)})  # fmt: skip

    do_GET = do_POST = do_PATCH = do_DELETE = handle_any

    def answer(self, token: str, path: str, query: dict[str, str]) -> Json | None:
        body = self.body()
        if (match := KINDS_OF.match(path)) is not None:
            names = [key[2] for key in contract.PLURALS if key[:2] == (match["group"], match["version"])]
            if not names:
                raise Refused(404, "the server could not find the requested resource")
            return {"kind": "APIResourceList", "resources": [{"name": name} for name in names]}
        match = PATH.match(path)
        kind = (
            None if match is None else contract.PLURALS.get((match["group"] or "", match["version"], match["plural"]))
        )
        if match is None or kind is None:
            raise Refused(404, "the server could not find the requested resource")
        plural, name, part = match["plural"], match["name"], match["part"] or ""
        verb = VERBS[self.command] if name or self.command != "GET" else "watch" if "watch" in query else "list"
        self.standin.check(token, verb, match["group"] or "", f"{plural}/{part}" if part else plural)
        if verb == "watch":
            self.watch(plural, query)
            return None
        if verb == "list":
            return self.standin.page(kind, query, match["namespace"] or "")
        if verb == "create":
            contract.check(body)
            name = body["metadata"]["name"]
        key = (plural, match["namespace"] or "", name)
        if verb == "get":
            return self.standin.get(key)
        if verb == "create":
            return self.standin.create(key, body)
        if verb == "delete":
            grace = query.get("gracePeriodSeconds")
            return self.standin.delete(key, None if grace is None else int(grace))
        if (content_type := self.headers["Content-Type"]) not in PATCHES:
            raise Refused(415, f"{content_type} is no patch")
        return self.standin.patch(key, part, content_type, body)

    def body(self) -> Json:
        found = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return dict(json.loads(found)) if found else {}

    def send(self, status: int, answer: Json) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def watch(self, plural: str, query: Mapping[str, str]) -> None:
        ending, version = self.standin.ending, int(query["resourceVersion"])
        end = time.monotonic() + float(query["timeoutSeconds"])
        self.standin.since(plural, version, "")
        self.standin.watches += 1
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while time.monotonic() < end:
            if ending.is_set():
                self.close_connection = True
                return  # in the middle, as a connection that is lost
            events, version = self.standin.since(plural, version, query.get("fieldSelector", ""))
            for event in events:
                self.chunk(json.dumps(event).encode() + b"\n")
            time.sleep(POLL)
        self.chunk(b"")

    def chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()


def fits(found: Mapping[str, Any], selector: str) -> bool:
    for each in filter(None, selector.split(",")):
        path, _, wanted = each.partition("=")
        value: Any = found
        for key in path.split("."):
            value = value.get(key, {}) if isinstance(value, dict) else {}
        if value != wanted:
            return False
    return True


def merged(before: Any, change: Any, *, strategic: bool) -> Any:
    """RFC 7386; and of strategic merge patches what conditions need: a list that is merged by its types."""
    if strategic and isinstance(before, list) and isinstance(change, list) and all("type" in each for each in change):
        found = {each["type"]: each for each in before}
        for each in change:
            found[each["type"]] = merged(found.get(each["type"], {}), each, strategic=True)
        return list(found.values())
    if not isinstance(change, dict):
        return change
    after = dict(before) if isinstance(before, dict) else {}
    for key, value in change.items():
        if value is None:
            after.pop(key, None)
        else:
            after[key] = merged(after.get(key), value, strategic=strategic)
    return after


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
