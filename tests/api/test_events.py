"""Events: the durable sequence, replay, listeners that are too slow; over the API of a real daemon."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.daemon.node import Node, Program, until
from xmigd.database.writer import Writer
from xmigd.events import repository
from xmigd.events.bus import QUEUE, Bus, Event

Test = Callable[[Bus], Coroutine[Any, Any, None]]
SSE = {"accept": "text/event-stream"}


def run(writer: Writer, test: Test, newest: int = 0, **options: Any) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(Bus(writer, newest=newest, **options)), 60)

    asyncio.run(main())


class TestBus:
    def test_ids_are_durable_and_never_used_twice(self, writer: Writer, readers: Engine) -> None:
        seen: list[Event] = []

        async def test(bus: Bus) -> None:
            subscription = bus.subscribe(lambda event: True)
            for number in range(5):
                bus.publish("fault", "process", "p", None, {"n": number}, durable=number != 2)
            while len(seen) < 5:
                seen.extend(await subscription.read(30))
            with Session(readers) as session:
                assert [row.data["n"] for row in repository.page(session, after=0)] == [0, 1, 3, 4]
                repository.page(session)
            await bus.close()

        run(writer, test)
        assert [event.id for event in seen] == [1, 2, None, 3, 4]
        writer.submit("events.add", lambda session: repository.trim(session, 4)).result(60)
        with Session(readers) as session:
            assert (repository.newest(session), repository.oldest(session)) == (4, None)

    def test_old_ones_are_trimmed(self, writer: Writer, readers: Engine) -> None:
        async def test(bus: Bus) -> None:
            for _ in range(10):
                for number in range(100):
                    bus.publish("fault", "process", "p", None, {"n": number})
                await bus.flushed()
            with Session(readers) as session:
                assert repository.newest(session) == 1000
                assert (repository.oldest(session) or 0) > 500

        run(writer, test, keep=100)

    def test_a_slow_listener_is_disconnected(self, writer: Writer) -> None:
        async def test(bus: Bus) -> None:
            slow, quick = bus.subscribe(lambda event: True), bus.subscribe(lambda event: event.data["n"] % 2 == 0)
            for number in range(QUEUE + 1):
                bus.publish("fault", "process", "p", None, {"n": number})
            await bus.flushed()
            assert (await slow.read(30), slow.ended) == ([], "too slow")
            assert len(await quick.read(30)) == QUEUE // 2 + 1
            await bus.close()
            assert (await quick.read(30), quick.ended) == ([], "xmigd is stopping")

        run(writer, test)

    def test_what_can_never_be_written_is_reported(self, writer: Writer) -> None:
        async def test(bus: Bus) -> None:
            subscription = bus.subscribe(lambda event: True)
            bus.publish("fault", "process", "p", None, {"n": object()})
            events = await subscription.read(30)
            assert [(event.id, event.type, event.data["count"]) for event in events] == [(1, "events.lost", 1)]

        run(writer, test)


def listen(http: httpx.Client, **headers: str) -> Iterator[dict[str, str]]:
    """Events of a stream, as their fields."""
    with http.stream("GET", "/v1/events", headers=SSE | headers, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name:
                fields[name] = value
            elif fields:
                yield fields
                fields = {}


class TestStream:
    def test_live_then_replayed_after_a_restart(self, node: Node) -> None:
        with node.http() as http:
            heard = listen(http)
            assert "retry" in next(heard)
            job = http.post("/v1/jobs", json={"name": "j"}).json()
            first = next(event for event in heard if event["event"] != "audit")
            assert (first["event"], json.loads(first["data"])["job_id"]) == ("job.created", job["id"])
            with Program(node, job=job["environment"]["XMIG_JOB"]) as program:
                assert program.welcome()[0] == 0
                for event in heard:
                    if event.get("event") == "process.state" and '"running"' in event["data"]:
                        break
            for event in heard:
                if event["event"] == "job.ended":
                    break
            heard.close()  # type: ignore[attr-defined]
        node.kill()
        node.start()
        with node.http() as http:
            again = listen(http, **{"Last-Event-ID": first["id"]})
            next(again)
            replayed = [next(again) for _ in range(int(event["id"]) - int(first["id"]))]
            assert [int(each["id"]) for each in replayed] == list(range(int(first["id"]) + 1, int(event["id"]) + 1))
            assert replayed[-1] == event
            again.close()  # type: ignore[attr-defined]
            page = http.get("/v1/events", params={"after": first["id"], "limit": 2}).json()
            assert [each["id"] for each in page] == [int(first["id"]) + 1, int(first["id"]) + 2]
            newest = http.get("/v1/events", params={"limit": 1}).json()[0]["id"]
            assert http.get("/v1/events", params={"before": newest, "limit": 1}).json()[0]["id"] == newest - 1

    def test_reset_where_history_is_missing(self, node: Node) -> None:
        with node.http() as http:
            http.post("/v1/jobs", json={"name": "j"})
        until(lambda: len(node.get("/v1/events")) > 1, "they are written")
        assert node.kill(signal.SIGTERM) == 0
        with sqlite3.connect(node.database) as database:  # as trimming does
            database.execute("DELETE FROM events WHERE id = 1")
        database.close()
        node.start()
        with node.http() as http:
            for requested, why in (("0", "trimmed"), ("999999", "unknown")):
                heard = listen(http, **{"Last-Event-ID": requested})
                next(heard)
                reset = next(heard)
                assert reset["event"] == "reset"
                assert json.loads(reset["data"])["why"] == why
                heard.close()  # type: ignore[attr-defined]

    def test_the_daemon_leaves_while_some_listen(self, node: Node) -> None:
        with node.http() as http:
            heard = listen(http)
            next(heard)
            rest: list[dict[str, str]] = []
            reader = threading.Thread(target=lambda: rest.extend(heard))
            reader.start()
            assert node.kill(signal.SIGTERM) == 0
            reader.join(30)
            assert not reader.is_alive()
            assert rest == []


def test_operations_over_the_api(daemon: Node) -> None:
    with daemon.http() as http:
        assert http.get("/v1/operations").json() == []
        for method, path in (("GET", "x"), ("DELETE", "x"), ("GET", "x/wait")):
            answer = http.request(method, f"/v1/operations/{path}")
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
        assert http.get("/v1/operations?state=dancing").status_code == 422
