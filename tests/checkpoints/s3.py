"""A real S3-compatible server that checks signatures, and a proxy before it that does to requests what a test says."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests import harness

EVERYTHING = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}'
PAGE = 2  # names that it lists at once
TO_PREPARE = 3  # requests that need no signature


@dataclass(frozen=True)
class Server:
    endpoint: str
    key: str
    secret: str

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1", aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
        )  # fmt: skip

    def credentials(self, path: Path, *, secret: str | None = None) -> Path:
        path.write_text(f"aws_access_key_id = {self.key}\naws_secret_access_key = {secret or self.secret}\n")
        path.chmod(0o600)
        return path


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Server]:
    import boto3

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    program = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(folder / "moto.log", "wb") as log:
        server = subprocess.Popen(
            program,
            stdout=log,
            stderr=log,
            env=os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": str(TO_PREPARE), "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)},
        )
    try:
        harness.wait_until(lambda: _answers(port), "the store answers", 120)
        iam = boto3.client(
            "iam", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="any", aws_secret_access_key="any"
        )
        iam.create_user(UserName="xmig")
        key = iam.create_access_key(UserName="xmig")["AccessKey"]
        iam.put_user_policy(UserName="xmig", PolicyName="all", PolicyDocument=EVERYTHING)
        yield Server(endpoint, key["AccessKeyId"], key["SecretAccessKey"])
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False


@dataclass
class Request:
    method: str
    path: str
    body: bytes


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


# What becomes of a reply. None: the connection ends in the middle of it.
Fault = Callable[[Request, Reply], Reply | None]


@dataclass
class Proxy:
    endpoint: str = ""
    fault: Fault | None = None
    requests: list[Request] = field(default_factory=list)

    def count(self, method: str, part: str) -> int:
        return sum(1 for request in self.requests if request.method == method and part in request.path)


def failing(code: str, status: int, *, method: str = "PUT") -> Fault:
    """The store refuses."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()

    def fault(request: Request, reply: Reply) -> Reply:
        return Reply(status, [("Content-Type", "application/xml")], body) if request.method == method else reply

    return fault


@contextlib.contextmanager
def proxy_of(server: Server) -> Iterator[Proxy]:
    proxy, origin = Proxy(), urlsplit(server.endpoint)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(self.command, self.path, body)
            proxy.requests.append(request)
            connection = http.client.HTTPConnection(origin.hostname or "", origin.port, timeout=60)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():  # the host, too: the signature covers it
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            reply: Reply | None = Reply(answer.status, answer.getheaders(), answer.read())
            connection.close()
            assert reply is not None
            length = str(len(reply.body))
            if self.command == "HEAD":
                length = dict(reply.headers).get("Content-Length", "0")
            changed = reply if proxy.fault is None else proxy.fault(request, reply)
            sent = reply if changed is None else changed
            self.send_response(sent.status)
            for name, value in sent.headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length if sent is reply else str(len(sent.body)))
            self.end_headers()
            if changed is None:
                self.wfile.write(sent.body[: len(sent.body) // 2])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            elif self.command != "HEAD":
                self.wfile.write(sent.body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        def log_message(self, format: str, *arguments: Any) -> None: ...

    class Threads(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None: ...  # the client has left

    http_server = Threads(("127.0.0.1", 0), Handler)
    proxy.endpoint = f"http://127.0.0.1:{http_server.server_address[1]}"
    thread = threading.Thread(target=http_server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        http_server.shutdown()
        http_server.server_close()
        thread.join()
